"""Tools of a policy: search back ends, a Python sandbox, and clients and servers over HTTP.

A search back end is a file of this folder, listed in BACKENDS, whose `BACKEND` declares all of it; a tool
that the policy calls by name is one listed in TOOLS, see tool.py. The rest of the package knows none by name.
"""

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxsearch.data.corpus import Document

BACKENDS = {  # name -> module
  'bm25': 'bm25', 'index': 'index', 'http': 'search_http', 'web': 'search_web', 'simulated': 'simulated'}
TOOLS = {'search': 'search_passages', 'open': 'open_document', 'find': 'find_in_document',
         'python': 'python_sandbox', 'finish': 'finish'}


class SearchBackend(Protocol):
  """Searches; called from several threads. It may also have
    set_step(step, total_steps): called before each training step, with 0 before an evaluation;
    for_call(question, *call): a back end for the one tool call that the numbers `call` name;
    paid, price: credits paid so far, and what one costs;
    known: its 'corpus' and 'index' by their hashes, as a server tells them;
    open(name): the whole documents with an id, else with a title;
    threads: searches that a server should run at a time.
  """

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]: ...


@dataclasses.dataclass(frozen=True)
class Backend:
  """Declares a search back end. `settings` are the fields of config.search, read as attributes."""
  # (settings, corpus=, seed=, generator=) -> SearchBackend. `corpus` has the passages, if `corpus` below says
  # so; `generator(model, temperature)` loads a language model: (prompts, seeds) -> replies.
  open: Callable[..., SearchBackend]
  # Fields of config.search that configs/base.py does not list: defaults; ranges, as in configs/checks.py.
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  checks: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
  # settings -> {field: kind} of what has to be set. Kinds: 'path' and 'model' must exist, 'url' is one HTTP
  # address or several separated by commas, 'name' is any text.
  needs: Callable[[Any], Mapping[str, str]] = lambda settings: {}
  # settings -> what is wrong with its fields, asked whichever back end is chosen.
  mistakes: Callable[[Any], Iterable[str]] = lambda settings: ()
  corpus: Callable[[Any], bool] = lambda settings: False  # whether it searches the passages of data.corpus
  # Whether it may be opened for each source of questions: on the source's passages, or with the source in
  # place of '{source}' in its fields.
  by_source: bool = False
  # settings -> what its results depend on, for manifests; 'corpus_hash' names the passages.
  identity: Callable[[Any], Mapping[str, Any]] = lambda settings: {}


def find_backend(name: str) -> Backend:
  """Returns the declaration of a back end by its name in BACKENDS."""
  return importlib.import_module(f'{__name__}.{BACKENDS[name]}').BACKEND


def find_tool(name: str) -> Any:
  """Returns the declaration of a tool, a `tool.Tool`, by its name in TOOLS."""
  return importlib.import_module(f'{__name__}.{TOOLS[name]}').TOOL


def declared() -> dict[str, Backend]:
  """Returns all back ends by name."""
  return {name: find_backend(name) for name in BACKENDS}


class SearchBySource:
  """A back end for each source of questions (their `metadata['source']`), opened by `of(source)`."""

  def __init__(self, open_one: Callable[[str | None], SearchBackend]):
    self._open, self._locks = functools.cache(open_one), {}

  def of(self, source: str | None) -> SearchBackend:
    """Returns the back end of a source; the first of the threads that want it opens it."""
    with self._locks.setdefault(source, threading.Lock()):
      return self._open(source)

  def search(self, queries: Sequence[str], topk: int = 3):
    raise ValueError('search.by_source=True is for questions of a known source alone: set it to False here')
