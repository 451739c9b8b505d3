"""The request to run a program that the policy wrote in the sandbox (CARL's tool)."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxsearch.tools.calls import ToolCall, ToolFailure, shorten_text
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node

# Characters, documents, and their characters, of a search in a program.
MAX_QUERY, MAX_TOPK, MAX_FOUND = 1000, 10, 100_000


@dataclasses.dataclass(frozen=True)
class RunPython(ToolCall):
  """Runs a program; the reply is what it printed, cut to the room after `node`.

  The program may call `search(query, k)`, which returns documents of the search back end as text, and
  `table()`, which returns the rows of `table`.

  Attributes:
    node: the span with the program.
    show: the text that the method will write for a reply, by which it is measured; by default CARL's.
  """
  node: Node
  code: str
  table: Sequence[Sequence[str]] = ()
  show: Callable[[str], str] | None = None
  tool = 'python'

  @property
  def query(self) -> str:
    return self.code

  def check(self, tools):
    if tools.python is None:
      raise ValueError('a RunPython, but the rollout has no sandbox')

  def run(self, tools, searches):
    """Raises the last search's error if all searches of the program failed: then the tool failed."""
    end = time.monotonic() + tools.deadline

    def search(query: str, k: int = tools.topk) -> str:
      if not isinstance(query, str) or len(query) > MAX_QUERY:  # an error of the program's
        raise ValueError(f'a query is a text of at most {MAX_QUERY} characters')
      k = min(max(int(k), 1), MAX_TOPK)
      searches.append(TimeoutError('no reply to a search'))  # until there is one
      try:
        if tools.search is None:
          raise RuntimeError('there is no search')
        if time.monotonic() > end:
          raise TimeoutError('no time left for a search')
        listed = grammar.listed(tools.find(self.node, query, k)[0])
      except Exception as error:
        searches[-1] = error
        raise
      searches[-1] = None
      return listed[:MAX_FOUND] or 'No documents were found.\n'

    table = lambda: [list(row) for row in self.table]
    printed = tools.python.run(self.code, {'search': search, 'table': table})
    if searches and None not in searches:
      raise searches[-1]
    return printed

  def read(self, result, tools, room, tokenizer):
    if not isinstance(result, str):
      return ToolFailure('malformed reply of the sandbox', 'malformed')
    room = min(tools.max_observation, room - tools.answer_reserve)
    show = self.show or (lambda text: grammar.output(text, tokenizer.special_tokens))
    return shorten_text(result, room, show, tokenizer)
