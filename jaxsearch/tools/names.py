"""Finds documents by their ids and titles, in memory of 32 bytes a document."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.tools.sparse import hashed


class Names:
  """Numbers of documents by hashes of ids and titles; the caller compares the names themselves.

  Args:
    heads: (id, title) of each document, in the order of their numbers.
  """

  def __init__(self, heads: Iterable[tuple[str, str]]):
    keys = np.fromiter((hashed(key) for head in heads for key in map(plain, head)), np.uint64)
    self._order = np.argsort(keys, kind='stable')
    self._keys = keys[self._order]

  def find(self, name: str) -> list[int]:
    """Returns the numbers of documents with this id or title, in order, as far as hashes tell; [] for ''."""
    if not plain(name):  # the title of documents that have none
      return []
    key = np.uint64(hashed(plain(name)))
    first, last = (np.searchsorted(self._keys, key, side) for side in ('left', 'right'))
    return np.unique(self._order[first:last] // 2).tolist()


def plain(name: str) -> str:
  """Returns an id or a title as it is compared: in any case, spaces alike."""
  return ' '.join(name.split()).casefold()


def named(name: str, documents: Sequence[Document]) -> list[Document]:
  """Returns those of the documents that have this id; if none has, those that have this title."""
  return ([document for document in documents if plain(document.id) == plain(name)] or
          [document for document in documents if plain(document.title) == plain(name)])
