"""What a search returns: a list of documents for each query."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
  """A passage that was found; `score` is its back end's, higher is better, 0 where none was given."""

  id: str
  title: str
  text: str
  score: float = 0.0
