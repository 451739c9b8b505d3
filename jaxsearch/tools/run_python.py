"""The request to run a program that the policy wrote in the sandbox (CARL's tool)."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxsearch.tools.calls import ToolCall
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
    show: see `ToolCall`; by default CARL's observation.
  """
  node: Node
  code: str
  table: Sequence[Sequence[str]] = ()
  show: Callable[[str], str] | None = None
  tool = 'python'

  @property
  def query(self) -> str:
    return self.code

  def run(self, tools):
    """Raises the last search's error if all searches of the program failed: then the tool failed."""
    end = time.monotonic() + tools.deadline

    def search(query: str, k: int = tools.topk) -> str:
      if not isinstance(query, str) or len(query) > MAX_QUERY:  # an error of the program's
        raise ValueError(f'a query is a text of at most {MAX_QUERY} characters')
      if time.monotonic() > end:
        raise TimeoutError('no time left for a search')
      listed = grammar.listed(tools.find(self.node, query, min(max(int(k), 1), MAX_TOPK)))
      return listed[:MAX_FOUND] or 'No documents were found.\n'

    table = lambda: [list(row) for row in self.table]
    printed = tools.python.run(self.code, {'search': search, 'table': table})
    if tools.searches and None not in tools.searches:
      raise tools.searches[-1]
    return printed

  def written(self, reply, special_tokens):
    return grammar.output(reply, special_tokens)
