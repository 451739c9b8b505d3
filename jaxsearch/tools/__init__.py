"""Tools of a policy: search back ends, opened here by kind, a Python sandbox, and clients and servers over HTTP.

A search back end is an object with `search(queries, topk) -> list[list[Document]]`.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxsearch import registry
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_corpus

KINDS = ('bm25', 'index', 'http', 'web', 'simulated')


class SearchBackend(Protocol):
  """What the sampler and the evaluation need of a back end; `search` is called from several threads.

  One that simulates may also have `set_step(step, total_steps)` and `for_call(question, *call)`, see tools/simulated.py.
  """

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]: ...


class SearchBySource:
  """A back end for each source of questions (their `metadata['source']`); `open_one` opens that of a source."""

  def __init__(self, open_one: Callable[[str | None], SearchBackend]):
    self.of = functools.cache(open_one)  # the back end for questions from a source; ValueError if there is none

  def search(self, queries: Sequence[str], topk: int = 3):
    raise ValueError('search.by_source=True searches for questions of a known source alone: set it to False here')


class Writer(Protocol):
  """Writes documents for queries, see tools/simulated.py; `write` is called from several threads."""

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int],
            question: Question | None = None) -> list[list[Document]]:
    """At most `topk` documents for each query, all useful, or all noisy where `noisy` is true; all that is random about
    them follows from the query's seed (31 bits). `question` is what they are searched for, None if that is not known."""


def paid(search: SearchBackend | None, before: int = 0) -> dict[str, float]:
  """What was paid for searches since `before`: searches_paid (credits) and searches_cost (money); {} where they are free."""
  credits = getattr(search, 'paid', None)
  return {} if credits is None else {'searches_paid': credits - before, 'searches_cost': (credits - before) * search.price}


def check_search(queries: Sequence[str], topk: int) -> None:
  """Raises TypeError for one string in place of a list of queries, ValueError for a `topk` below 1."""
  if isinstance(queries, str):
    raise TypeError('queries must be a list of strings, not one string')
  if topk < 1:
    raise ValueError(f'topk={topk} must be at least 1')


def open_search(kind: str, *, corpus: str | os.PathLike | Sequence[Document] | None = None, url: str | None = None,
                engine: str = 'rank_bm25', index: str | os.PathLike = '', encoder: str = '', timeout: float = 30.0,
                token: str | None = None, cache: str | os.PathLike | None = None, replay: bool = False,
                writer: str | Writer = 'world', writer_model: str = '', writer_temperature: float = 0.8,
                writer_templates: str = '', noise_start: float = 0.0, noise_end: float = 0.5,
                noise_eval: float | None = None, noise_false: bool = False, price: float = 0.0, seed: int = 0) -> SearchBackend:
  """Opens the back end of the given kind from plain settings.

  Args:
    kind: 'bm25' searches `corpus` with `engine`; 'index' the folder `index`; 'http' the servers at `url`; 'web' Google through
      SERPER, with the key in SERPER_API_KEY; 'simulated' has a `writer` make documents up.
    corpus: for 'bm25' and the writer 'world': passages, or a name that `data.sources.load_corpus` takes.
    url: of the server for 'http' (without a path, '/retrieve' is meant; a comma between several), for 'web' (instead of SERPER's
      own), and for the writer 'chat' ('/chat/completions' is appended).
    engine: of BM25, 'rank_bm25' or 'bm25s'.
    index, encoder: for 'index': a folder of `jaxsearch index`, and where its encoder lies if that has moved.
    timeout: seconds for a search by a server, all attempts together.
    token: a bearer token for 'http'.
    cache: file that keeps responses of 'http', of 'web' and of the writer 'chat'; None or '' keeps none.
    replay: for 'http': take all results from the `cache`; a query that is not in it fails.
    writer: for 'simulated': 'world', which needs no model; 'chat', the `writer_model` behind a server, with its key (if it
      wants one) in OPENAI_API_KEY; or any `Writer`.
    writer_temperature, writer_templates: of the writer 'chat'; the folder of templates of `trees.templates.writer_files`.
    noise_start, noise_end, noise_eval, seed: for 'simulated', see tools/simulated.py.
    noise_false: for the writers 'world' and 'chat': whether noisy documents state false facts, or are only of no help.
    price: for 'web': of a credit of SERPER's.

  Raises ValueError for an unknown kind or a missing setting; names it.
  """
  def passages(needed_by):
    if corpus is None:
      raise ValueError(f'{needed_by} needs a corpus')
    return load_corpus(os.fspath(corpus)) if isinstance(corpus, (str, os.PathLike)) else corpus

  if kind == 'bm25':
    from jaxsearch.tools.bm25 import BM25
    return BM25(passages("search kind 'bm25'"), engine=engine)
  if kind == 'http':
    if not url:
      raise ValueError("search kind 'http' needs a url")
    from jaxsearch.tools.search_remote import SearchServers
    return SearchServers(url.split(','), timeout=timeout, token=token, cache=cache, replay=replay)
  if kind == 'index':
    from jaxsearch.tools.index import Index
    if not index:
      raise ValueError("search kind 'index' needs the folder of an index")
    return Index(index, encoder=encoder or None)
  if kind == 'web':
    from jaxsearch.tools.search_remote import SERPER, WebSearch
    return WebSearch(url or SERPER, timeout=timeout, cache=cache, price=price)
  if kind == 'simulated':
    from jaxsearch.tools.simulated import ModelWriter, SimulatedSearch
    if isinstance(writer, str) and writer in registry.ENTRIES['writers']:
      writer = registry.find('writers', writer)(passages(f'writer {writer!r}'), engine=engine, false_facts=noise_false)
    elif writer == 'chat':
      from jaxsearch.tools.chat import Chat
      if not (url and writer_model):
        raise ValueError("writer 'chat' needs a url and a writer_model")
      chat = Chat(url, writer_model, temperature=writer_temperature, timeout=timeout, cache=cache)
      writer = ModelWriter(chat.replies, writer_templates, noise_false)
    elif isinstance(writer, str):
      raise ValueError(f'unknown writer {writer!r}; known: world, chat')
    return SimulatedSearch(writer, noise_start=noise_start, noise_end=noise_end, noise_eval=noise_eval, seed=seed)
  raise ValueError(f'unknown search kind {kind!r}; known: {", ".join(KINDS)}')
