"""The tool `open`: a document of the corpus, by its id or title, in windows of lines.

Calls share no state: each names document and line, so that several of one turn can run at the same time.
"""

import bisect
import dataclasses
import textwrap
from collections.abc import Callable, Sequence

from pydantic import Field

from jaxsearch.tools.calls import ToolCall, Tools
from jaxsearch.tools.tool import Arguments, declare
from jaxsearch.trees.tree import Node

WIDTH, WINDOW = 80, 100  # characters of a line; lines of a window at most


class OpenArguments(Arguments):
  """Shows a document from a line on, as many lines as fit, and says which lines of how many these are."""
  document: str = Field(description='The id of the document, as in the results of a search, or its title.')
  line: int = Field(1, ge=1, description='The line to begin with.')


@dataclasses.dataclass(frozen=True)
class Page:
  """A window of a document: `lines` are those from line `first` on of `total`."""
  title: str
  lines: Sequence[str]
  first: int
  total: int

  def __str__(self):
    last = self.first + len(self.lines) - 1
    return '\n'.join([f'{self.title}, lines {self.first} to {last} of {self.total}', *self.lines])


@dataclasses.dataclass(frozen=True)
class OpenDocument(ToolCall):
  """Shows a document; the reply is a text, with as many lines as there is room for after `node`."""
  node: Node
  document: str
  line: int = 1
  show: Callable[[str], str] | None = None
  tool = 'open'

  @property
  def query(self) -> str:
    return self.document + (f', line {self.line}' if self.line > 1 else '')

  def run(self, tools):
    title, paragraphs = read(tools, self.node, self.document)
    lines = wrapped(paragraphs)
    if self.line > max(len(lines), 1):
      return f'{title} has {len(lines)} lines.'
    return Page(title, lines[self.line - 1:][:WINDOW], self.line, len(lines)) if lines else title

  def cut(self, reply, tools, room, tokenizer):
    if not isinstance(reply, Page):  # a text, or a failure
      return super().cut(reply, tools, room, tokenizer)
    room, show = min(tools.max_observation, room - tools.answer_reserve), self.show or str
    window = lambda size: str(dataclasses.replace(reply, lines=reply.lines[:size]))
    fitting = bisect.bisect_right(range(1, len(reply.lines) + 1), room,
                                  key=lambda size: len(tokenizer.encode(show(window(size)))))
    return window(fitting) if fitting else super().cut(window(1), tools, room, tokenizer)


def read(tools: Tools, node: Node, name: str) -> tuple[str, list[str]]:
  """Returns (title, paragraphs) of a document by its id or title; (what is wrong, []) if there is none.

  Documents of one title, such as the passages of an article, are one.
  """
  documents = tools.open(node, name)
  if not documents:
    return 'There is no document of this id or title. Search, and open a document by its id.', []
  title = documents[0].title.strip() or documents[0].id
  return title, [paragraph for document in documents for paragraph in document.text.splitlines()]


def wrapped(paragraphs: Sequence[str]) -> list[str]:
  """Returns the lines of a document, which differ from its text in white space alone."""
  return [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, WIDTH) or ['']]


TOOL = declare('open', OpenArguments, lambda node, arguments, show: [
  OpenDocument(node, arguments.document, arguments.line, show)], opens=True)
