"""Search back ends: objects with `search(queries, topk) -> list[list[Document]]`, opened by kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from jaxsearch import registry
from jaxsearch.data.corpus import Document

if TYPE_CHECKING:
  from jaxsearch.data.corpus import Document
  from jaxsearch.tools.simulated import Writer

KINDS = ('bm25', 'http', 'web', 'simulated')


class SearchBackend(Protocol):
  """What the sampler and the evaluation need of a back end; `search` is called from several threads."""

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]: ...


def open_search(kind: str, *, corpus: str | os.PathLike | Sequence[Document] | None = None,
                url: str | None = None, engine: str = 'rank_bm25', timeout: float = 30.0,
                token: str | None = None, cache: str | os.PathLike | None = None, writer: str | Writer = 'world',
                writer_model: str = '', noise_start: float = 0.0, noise_end: float = 0.5, seed: int = 0) -> SearchBackend:
  """Opens the back end of the given kind from plain settings.

  Args:
    kind: 'bm25' searches `corpus` with `engine`; 'http' asks the server at `url`; 'web' asks Google by way of SERPER, with the
      key in SERPER_API_KEY; 'simulated' has a `writer` make documents up.
    corpus: for 'bm25' and the writer 'world': passages, or a name that `data.sources.load_corpus` takes.
    url: for 'http', where without a path '/retrieve' is meant; for 'web', in place of SERPER's own; for the writer
      'chat', what '/chat/completions' is put behind.
    engine: for 'bm25' and the writer 'world': 'rank_bm25' or 'bm25s'.
    timeout: for all that ask a server, seconds for a search, all attempts together.
    token: for 'http', a bearer token.
    cache: for 'web' and the writer 'chat', a file that keeps answers; None or '' keeps none.
    writer: for 'simulated': 'world', which needs no model; 'chat', a model behind a server, with its key (if it wants
      one) in OPENAI_API_KEY; or any `tools.simulated.Writer`.
    writer_model: for the writer 'chat', the name of the model.
    noise_start, noise_end, seed: for 'simulated', see `tools.simulated.SimulatedSearch`.

  Raises:
    ValueError: an unknown kind, or the setting that it needs is missing; names which.
  """
  if kind == 'bm25':
    from jaxsearch.tools.bm25 import BM25
    return BM25(_passages(corpus, "search kind 'bm25'"), engine=engine)
  if kind == 'http':
    if not url:
      raise ValueError("search kind 'http' needs a url")
    from jaxsearch.tools.search_client import HttpSearch
    return HttpSearch(url, timeout=timeout, token=token)
  if kind == 'web':
    from jaxsearch.tools.web import SERPER, WebSearch
    return WebSearch(url or SERPER, timeout=timeout, cache=cache)
  if kind == 'simulated':
    from jaxsearch.tools.simulated import ModelWriter, SimulatedSearch
    if isinstance(writer, str) and writer in registry.ENTRIES['writers']:
      writer = registry.find('writers', writer)(_passages(corpus, f'writer {writer!r}'), engine=engine)
    elif writer == 'chat':
      from jaxsearch.tools.chat import Chat
      if not (url and writer_model):
        raise ValueError("writer 'chat' needs a url and a writer_model")
      writer = ModelWriter(Chat(url, writer_model, timeout=timeout, cache=cache).replies)
    elif isinstance(writer, str):
      raise ValueError(f'unknown writer {writer!r}; known: world, chat')
    return SimulatedSearch(writer, noise_start=noise_start, noise_end=noise_end, seed=seed)
  raise ValueError(f'unknown search kind {kind!r}; known: {", ".join(KINDS)}')


def _passages(corpus: str | os.PathLike | Sequence[Document] | None, wanted_by: str) -> Sequence[Document]:
  if corpus is None:
    raise ValueError(f'{wanted_by} needs a corpus')
  from jaxsearch.data.sources import load_corpus
  return load_corpus(os.fspath(corpus)) if isinstance(corpus, (str, os.PathLike)) else corpus
