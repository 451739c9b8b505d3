"""The request for a search, whatever back end serves it."""

import dataclasses
from collections.abc import Callable

from jaxsearch.data.corpus import Document, first_words
from jaxsearch.tools.calls import ToolCall, ToolFailure, is_documents, shorten
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node


@dataclasses.dataclass(frozen=True)
class Search(ToolCall):
  """Asks the search back end; the reply is a list of documents, best first, cut to the room after `node`.

  Attributes:
    node: the span with the query.
    topk: how many documents; None takes the rollout's.
    show: the text that the method will write for documents, by which they are measured; by default
      Search-R1's.
  """
  node: Node
  query: str
  topk: int | None = None
  show: Callable[[list[Document]], str] | None = None
  tool = 'search'

  def check(self, tools):
    if tools.search is None:
      raise ValueError('a Search, but the rollout has no search back end')

  def run(self, tools, searches):
    return tools.find(self.node, self.query, tools.topk if self.topk is None else self.topk)

  def searched(self, reply, searches):
    return [reply]

  def read(self, result, tools, room, tokenizer):
    documents = result[0] if isinstance(result, list) and len(result) == 1 else None
    if not is_documents(documents):
      return ToolFailure('malformed reply of the search back end', 'malformed')
    if tools.words:
      documents = [dataclasses.replace(one, text=first_words(one.text, tools.words)) for one in documents]
    room = min(tools.max_observation, room - tools.answer_reserve)
    show = self.show or (lambda documents: grammar.information(documents, tokenizer.special_tokens))
    return shorten(documents, room, show, tokenizer)
