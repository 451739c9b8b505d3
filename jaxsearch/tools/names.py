"""Finds documents by their ids and titles, in memory of 32 bytes a document."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.tools.sparse import hashed


class Names:
  """Opens documents by hashes of their ids and titles.

  Args:
    heads: (id, title) of each document, in the order of their numbers.
    read: returns the documents of numbers.
  """

  def __init__(self, heads: Iterable[tuple[str, str]], read: Callable[[Sequence[int]], list[Document]]):
    keys = np.fromiter((hashed(key) for head in heads for key in map(plain, head)), np.uint64)
    self._order, self._read = np.argsort(keys, kind='stable'), read
    self._keys = keys[self._order]

  def open(self, name: str) -> list[Document]:
    """Returns the documents with this id, in order; if none has it, those with this title; [] for ''."""
    if not (name := plain(name)):  # the title of documents that have none
      return []
    key = np.uint64(hashed(name))
    first, last = (np.searchsorted(self._keys, key, side) for side in ('left', 'right'))
    alike = self._read(np.unique(self._order[first:last] // 2).tolist())  # as far as hashes tell
    return ([document for document in alike if plain(document.id) == name] or
            [document for document in alike if plain(document.title) == name])


def plain(name: str) -> str:
  """Returns an id or a title as it is compared: in any case, spaces alike."""
  return ' '.join(name.split()).casefold()
