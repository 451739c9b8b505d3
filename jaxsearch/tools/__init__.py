"""Search back ends: objects with `search(queries, topk) -> list[list[Document]]`, opened by kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from jaxsearch.tools.documents import Document

if TYPE_CHECKING:
  from jaxsearch.data.corpus import Passage

KINDS = ('bm25', 'http')


class SearchBackend(Protocol):
  """What the sampler and the evaluation need of a back end; `search` is called from several threads."""

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]: ...


def open_search(kind: str, *, corpus: str | os.PathLike | Sequence[Passage] | None = None,
                url: str | None = None, engine: str = 'rank_bm25', timeout: float = 30.0,
                token: str | None = None) -> SearchBackend:
  """Opens the back end of the given kind from plain settings.

  Args:
    kind: 'bm25' searches `corpus` (a file or passages) with `engine`; 'http' asks the server at `url`.
    corpus: for 'bm25'.
    url: for 'http'; without a path, '/retrieve' is meant.
    engine: for 'bm25': 'rank_bm25' or 'bm25s'.
    timeout: for 'http', seconds for a search, all attempts together.
    token: for 'http', a bearer token.

  Raises:
    ValueError: an unknown kind, or the setting that it needs is missing; names which.
  """
  if kind == 'bm25':
    if corpus is None:
      raise ValueError("search kind 'bm25' needs a corpus")
    from jaxsearch.data.corpus import read_corpus
    from jaxsearch.tools.bm25 import BM25
    return BM25(read_corpus(corpus) if isinstance(corpus, (str, os.PathLike)) else corpus, engine=engine)
  if kind == 'http':
    if not url:
      raise ValueError("search kind 'http' needs a url")
    from jaxsearch.tools.http import HttpSearch
    return HttpSearch(url, timeout=timeout, token=token)
  raise ValueError(f'unknown search kind {kind!r}; known: {", ".join(KINDS)}')
