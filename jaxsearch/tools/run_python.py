"""The tool `python`: a program in the sandbox of tools/python_sandbox.py."""

from pydantic import Field

from jaxsearch.tools.python_sandbox import MODULES, RunPython
from jaxsearch.tools.tool import Arguments, declare


class PythonArguments(Arguments):
  __doc__ = ('Runs a program of Python and shows what it prints. It has no files and no network. It may '
             f'import {", ".join(MODULES)}; search(query, k) returns passages as text, table() the rows of '
             "the question's table.")
  code: str = Field(description='The program.')


TOOL = declare('python', PythonArguments, lambda node, arguments, show: [
  RunPython(node, arguments.code, tuple(node.tree.question.metadata.get('table') or ()), show)])
