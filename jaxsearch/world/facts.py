"""The entities of the embedded world, as they are read back from its documents.

Where the facts came from: recipes/world/gather.py.
"""

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxsearch.data.corpus import Document

WORDS = tomllib.loads((Path(__file__).parent / 'words.toml').read_text(encoding='utf-8'))
ATTRIBUTES = WORDS['attributes']  # by name


def sentence(attribute: str, title: str, value: str) -> str:
  """Returns the sentence that states a fact."""
  return ATTRIBUTES[attribute]['sentence'].format(title=title, value=value)


@dataclasses.dataclass(frozen=True)
class Entity:
  """A thing of the world."""
  id: str
  type: str
  title: str
  values: dict          # attribute -> its text
  multiple: tuple = ()  # (attribute, text) of attributes with several, which are never in a question

  @property
  def facts(self) -> list[tuple[str, str]]:
    """All (attribute, value) pairs, in the order of the text."""
    return [*self.values.items(), *self.multiple]

  @property
  def text(self) -> str:
    """The text of its document: one sentence a fact, each beginning with the title."""
    return ' '.join(sentence(attribute, self.title, value) for attribute, value in self.facts)


def read_back(documents: Sequence[Document]) -> list[Entity]:
  """Restores the entities that the world's documents are about; the inverse of writing `Entity.text`.

  Raises ValueError for a sentence that states no known attribute.
  """
  entities = []
  for document in documents:
    sentences = document.text.removesuffix('.').split(f'. {document.title} ')
    facts = [_fact(text.removeprefix(document.title + ' '), document) for text in sentences]
    count = Counter(attribute for attribute, _ in facts)
    values = {attribute: value for attribute, value in facts if count[attribute] == 1}
    multiple = tuple(fact for fact in facts if count[fact[0]] > 1)
    entities.append(Entity(document.id, document.id.split('-')[0], document.title, values, multiple))
  return entities


def _fact(text: str, document: Document) -> tuple[str, str]:
  """Returns (attribute, value) of a sentence without its title and full stop."""
  for attribute, row in ATTRIBUTES.items():
    opening = row['sentence'].removeprefix('{title} ').removesuffix('{value}.')
    if text.startswith(opening):
      return attribute, text.removeprefix(opening)
  raise ValueError(f'document {document.id}: no known fact in {text!r}')
