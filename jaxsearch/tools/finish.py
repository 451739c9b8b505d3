"""The tool `finish`, for protocols in which the answer is a call too."""

from pydantic import Field

from jaxsearch.tools.tool import Arguments, declare


class FinishArguments(Arguments):
  """Ends the work with the answer."""
  answer: str = Field(description='The answer, as short as it can be.')


TOOL = declare('finish', FinishArguments, None)
