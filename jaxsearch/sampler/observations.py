"""The one place where what a tool returned is checked, and shortened to the room that is left for it; a question never is."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import RunPython, Search, ToolFailure
from jaxsearch.trees import grammar


def fitted(request: Search | RunPython, result: Any, room: int, tokenizer) -> list[Document] | str | ToolFailure:
  """The reply to a request from what its tool returned: documents, or text, whose observation has at most `room` tokens.

  A failure stays one; what is no reply to the request becomes one.
  """
  if isinstance(result, ToolFailure):
    return result
  special = tokenizer.special_tokens
  if isinstance(request, RunPython):
    if not isinstance(result, str):
      return ToolFailure('malformed reply of the sandbox')
    shown = shorten([Document('', '', result, 0.0)], room, lambda texts: len(tokenizer.encode(
      grammar.output(''.join(document.text for document in texts), special))))
    return ''.join(document.text for document in shown)
  documents = result[0] if isinstance(result, list) and len(result) == 1 else None
  if not isinstance(documents, list) or not all(isinstance(document, Document) for document in documents):
    return ToolFailure('malformed reply of the search back end')
  return shorten(documents, room, lambda documents: len(tokenizer.encode(grammar.information(documents, special))))


def shorten(documents: Sequence[Document], budget: int, measure: Callable[[Sequence[Document]], int]) -> list[Document]:
  """Cuts the texts of documents so that all of them together measure at most `budget`.

  All texts are cut at one common number of characters, the largest that fits; whatever tags enclose the documents are
  written later and stay whole. If titles alone are too long, documents are left out from the end, down to none.

  Args:
    documents: best first.
    budget: tokens that the observation may have.
    measure: tokens of the observation that shows these documents.
  """
  documents = list(documents)
  if measure(documents) <= budget:
    return documents

  def cut(characters):
    return [dataclasses.replace(document, text=document.text[:characters]) for document in documents]

  while documents and measure(cut(0)) > budget:
    documents.pop()
  fits, too_long = 0, max((len(document.text) for document in documents), default=0) + 1
  while too_long - fits > 1:
    middle = (fits + too_long) // 2
    if measure(cut(middle)) <= budget:
      fits = middle
    else:
      too_long = middle
  return cut(fits)
