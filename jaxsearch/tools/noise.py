"""Search that sometimes finds passages about other things: true ones, drawn at random from the corpus.

The draws depend on the seed and the query and, where every call draws anew, on the step and the call too: a
resumed run gets what the uninterrupted one would have got.
"""

import functools
import hashlib
import json
import types
from collections.abc import Sequence

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.tools import SearchBackend


class NoisySearch:
  """A back end over `corpus` whose results are replaced with probability `share`.

  Args:
    each: 'call', every call draws anew, so that a query sent again may find what it looks for; or 'query', a
      query always finds the same.
  """

  def __init__(self, back_end: SearchBackend, corpus: Sequence[Document], share: float, each: str, *,
               seed: int = 0):
    self._back_end, self._corpus, self._share = back_end, corpus, share
    self._each, self._seed, self._step = each, seed, 0
    if hasattr(back_end, 'open'):
      self.open = back_end.open

  def set_step(self, step: int, total_steps: int) -> None:
    """Notes the training step, from 1, or an evaluation, 0."""
    self._step = step

  def for_call(self, question: Question | None, *call: int) -> SearchBackend:
    """Returns this back end for one tool call, which the numbers `call` name."""
    others = {'open': self.open} if hasattr(self, 'open') else {}
    return types.SimpleNamespace(search=functools.partial(self.search, call=call), **others)

  def search(self, queries: Sequence[str], topk: int = 3, *,
             call: Sequence[int] = ()) -> list[list[Document]]:
    """Returns the passages for each query, or as many others."""
    return [self._others(found, rng) if (rng := self._rng(query, call)).random() < self._share else found
            for query, found in zip(queries, self._back_end.search(queries, topk))]

  def _rng(self, query: str, call: Sequence[int]) -> np.random.Generator:
    drawn_from = [self._seed, query] + ([self._step, *call] if self._each == 'call' else [])
    return np.random.default_rng(list(hashlib.sha256(json.dumps(drawn_from).encode()).digest()))

  def _others(self, found: Sequence[Document], rng: np.random.Generator) -> list[Document]:
    """Draws as many passages that were not found, nor have a title of those."""
    known = {document.id for document in found} | {document.title for document in found if document.title}
    others = (self._corpus[number] for number in rng.permutation(len(self._corpus)))
    fitting = (other for other in others if not {other.id, other.title} & known)
    return [other for _, other in zip(found, fitting)]
