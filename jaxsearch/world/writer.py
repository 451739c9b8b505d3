"""A writer of simulated search results (tools/simulated.py) about the embedded world, without a model."""

import dataclasses
import random
from collections.abc import Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.tools.bm25 import BM25
from jaxsearch.world.facts import Entity, read_back


class WorldWriter:
  """A `tools.simulated.Writer` that needs no model; the same seed gives the same documents.

  Useful documents are those that BM25 finds. Noisy ones are true documents about something else of the same
  type; with `false_facts` those that were found, every fact replaced by one of another entity: wrong, and
  only another source can show it. Raises ValueError if `corpus` is not of the world.
  """

  def __init__(self, corpus: Sequence[Document], *, false_facts: bool = False):
    self._index, self._false_facts = BM25(corpus), false_facts
    try:
      self._entities = {entity.id: entity for entity in read_back(corpus)}
    except ValueError as error:
      message = f'the simulator without a model writes about the embedded world only: {error}'
      raise ValueError(message) from error
    stated: dict[tuple[str, str], set[str]] = {}  # (type, attribute) -> values
    for entity in self._entities.values():
      for attribute, value in entity.facts:
        stated.setdefault((entity.type, attribute), set()).add(value)
    self._stated = {key: sorted(values) for key, values in stated.items()}

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int],
            question: Question | None = None) -> list[list[Document]]:
    """Writes as `Writer` says. A useful search finds nothing where the world knows no word of the query."""
    results = self._index.search(queries, topk)
    return [self._noise(found, topk, random.Random(seed)) if noise else found
            for found, noise, seed in zip(results, noisy, seeds, strict=True)]

  def _noise(self, found: Sequence[Document], topk: int, rng: random.Random) -> list[Document]:
    subjects, entities = [self._entities[document.id] for document in found], list(self._entities.values())
    documents = []
    for place in range(topk):
      subject = subjects[place] if place < len(subjects) else rng.choice(subjects or entities)
      if place < len(subjects) and self._false_facts:
        documents.append(Document(f'false-{subject.id}', subject.title, self._falsified(subject, rng).text))
      else:
        used = {entity.title for entity in subjects} | {document.title for document in documents}
        others = [entity for entity in entities if entity.title not in used]
        alike = [entity for entity in others if entity.type == subject.type]
        other = rng.choice(alike or others or entities)
        documents.append(Document(other.id, other.title, other.text))
    return documents

  def _falsified(self, entity: Entity, rng: random.Random) -> Entity:
    def others(attribute: str, true: set[str]) -> list[str]:
      return [value for value in self._stated[entity.type, attribute] if value not in true]

    values = {name: rng.choice(others(name, {value}) or [value]) for name, value in entity.values.items()}
    true = {value for _, value in entity.multiple}
    pools = [(name, others(name, true)) for name, _ in entity.multiple]
    multiple = tuple((name, rng.choice(pool)) for name, pool in pools if pool)
    return dataclasses.replace(entity, values=values, multiple=multiple)
