"""A tool that the policy calls by name: its schema, and the requests that serve a call.

Prompt, check and help are made from the schema, so that a tool is a file of this folder with `TOOL =
declare(…)` and its line in TOOLS. How a model writes calls and sees results is the business of a grammar.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxsearch.tools.calls import NoRoom, ToolCall, ToolFailure, is_documents
from jaxsearch.trees.tree import Node

NOTHING, NO_ROOM = 'Nothing was found.', 'Found, but there is no room to show it.'
Show = Callable[[Any], str] | None  # writes a reply into the context, for measuring; see `ToolCall`


class Arguments(BaseModel, extra='forbid', coerce_numbers_to_str=True):
  """The arguments of a tool; their docstring is what the policy is told of it.

  A grammar without types, such as Qwen3-Coder's, reads the query 2024 as a number: it becomes a text again.
  """


@dataclasses.dataclass(frozen=True)
class Tool:
  """Declares a tool."""
  # Of its function, as chat templates take it: `name`, `description`, `parameters` (JSON schema).
  schema: Mapping[str, Any]
  # Arguments as the policy wrote them -> those of `serve`; a ValueError is shown to the policy.
  check: Callable[[Mapping[str, Any]], Any]
  # (node, arguments, show) -> requests, served together; None where a call ends the episode and its argument
  # `answer` is the answer.
  serve: Callable[[Node, Any, Show], Sequence[ToolCall]] | None
  # What the policy sees of a reply, before the grammar neutralises and frames it.
  text: Callable[[Any], str] = lambda reply: listed(reply) if is_documents(reply) else str(reply)
  opens: bool = False  # whether it opens documents, which not every search back end does

  @property
  def name(self) -> str:
    return self.schema['name']

  @property
  def usage(self) -> str:
    """Returns the call in a line, such as `open(document, line?)`."""
    parameters = self.schema['parameters']
    required = parameters.get('required', ())
    names = (name + '?' * (name not in required) for name in parameters.get('properties', ()))
    return f'{self.name}({", ".join(names)})'

  def requests(self, node: Node, arguments: Any, frame: Callable[[str], str] = str) -> Sequence[ToolCall]:
    """Returns the requests of a call by the span `node`.

    Args:
      arguments: as the policy wrote them.
      frame: the observation around a text, so that a reply is cut to what fits with it.

    Raises ValueError for arguments that do not fit; the policy should see it.
    """
    return self.serve(node, self.check(arguments), lambda reply: frame(self.text(reply)))

  def result(self, replies: Sequence[Any]) -> str:
    """Returns what the policy sees of the replies to the requests of a call."""
    return '\n\n'.join(f'The tool failed: {reply.reason}' if isinstance(reply, ToolFailure) else
                       self.text(reply) for reply in replies)


def declare(name: str, arguments: type[Arguments],
            serve: Callable[[Node, Any, Show], Sequence[ToolCall]] | None, **more: Any) -> Tool:
  """Returns the tool of a name whose arguments are a model of pydantic; `more` are attributes of `Tool`."""
  whole = _untitled(arguments.model_json_schema())
  parameters = {key: whole[key] for key in ('type', 'properties', 'required', '$defs') if key in whole}
  schema = {'name': name, 'description': whole['description'], 'parameters': parameters}

  def check(given: Mapping[str, Any]) -> Arguments:
    try:
      return arguments.model_validate(given)
    except ValidationError as error:
      wrong = [f'{one["loc"][0] if one["loc"] else "arguments"}: {one["msg"]}' for one in error.errors()]
      raise ValueError(f'{tool.usage}: {"; ".join(wrong)}') from error

  tool = Tool(schema, check, serve, **more)
  return tool


def _untitled(schema: Any) -> Any:
  """Returns a JSON schema without the titles that pydantic makes of names."""
  if isinstance(schema, Mapping):
    return {key: _untitled(value) for key, value in schema.items()
            if key != 'title' or not isinstance(value, str)}
  return schema


def listed(documents: Sequence[Any]) -> str:
  """Writes documents with their ids, by which they can be opened and cited."""
  texts = (f'[{one.id}] {one.title.strip()}'.strip() + f'\n{one.text.strip()}' for one in documents)
  return '\n\n'.join(texts) or (NO_ROOM if isinstance(documents, NoRoom) else NOTHING)
