"""The one place where an observation is shortened to the room that is left for it; a question never is."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxsearch.tools.documents import Document


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
