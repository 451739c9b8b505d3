"""The entities of the embedded world, as they are read back from its documents.

What the documents say is enough to restore them. Where the facts came from: recipes/world/gather.py.
"""

import dataclasses
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxsearch.data.corpus import Document

WORDS = tomllib.loads((Path(__file__).parent / 'words.toml').read_text(encoding='utf-8'))
ATTRIBUTES = WORDS['attributes']  # by name
# Attribute -> the type of the entity that its value names.
TARGETS = {name: row['names'] for name, row in ATTRIBUTES.items() if 'names' in row}


def sentence(attribute: str, title: str, value: str) -> str:
  """Returns the sentence that states a fact."""
  return ATTRIBUTES[attribute]['sentence'].format(title=title, value=value)


@dataclasses.dataclass(frozen=True)
class Entity:
  """A thing of the world.

  `values` maps an attribute to its text, `links` an attribute to the id of the entity that it names;
  `multiple` holds the attributes with several values (in the text only, never in a question); `mention` is
  how a question names the entity and `query` what finds it.
  """
  id: str
  type: str
  title: str
  values: dict
  links: dict
  multiple: tuple = ()
  mention: str = ''
  query: str = ''

  @property
  def facts(self) -> list[tuple[str, str]]:
    """All (attribute, value) pairs, in the order of the text."""
    return [*self.values.items(), *self.multiple]

  @property
  def text(self) -> str:
    """The text of its document: one sentence an attribute, each beginning with the title."""
    return ' '.join(sentence(attribute, self.title, value) for attribute, value in self.facts)


def name_all(entities: Sequence[Entity]) -> list[Entity]:
  """Sets `mention` and `query`: the title where it is the only one, else with the country, or the type."""
  count = Counter(entity.title for entity in entities)

  def names(title, kind, home):
    if count[title] == 1:
      return {'mention': title, 'query': title}
    if kind != 'city':
      return {'mention': f'the {kind} {title}', 'query': title}
    return {'mention': f'{title} in {home}', 'query': title if home == title else f'{title} {home}'}

  return [dataclasses.replace(e, **names(e.title, e.type, e.values.get('country'))) for e in entities]


def read_back(documents: Sequence[Document]) -> list[Entity]:
  """Restores the entities that the world's documents are about; the inverse of writing `Entity.text`.

  Raises:
    ValueError: a sentence that states no known attribute.
    KeyError: a country whose capital has no document.
  """
  ids = {(document.id.split('-')[0], document.title): document.id for document in documents}
  # (title, country) -> id of a city: titles of cities repeat, so a capital is looked up with its country
  homes = {}
  entities = []
  for document in documents:
    sentences = document.text.removesuffix('.').split(f'. {document.title} ')
    facts = [_fact(text.removeprefix(document.title + ' '), document) for text in sentences]
    count = Counter(attribute for attribute, _ in facts)
    values = {attribute: value for attribute, value in facts if count[attribute] == 1}
    multiple = tuple(fact for fact in facts if count[fact[0]] > 1)
    entities.append(Entity(document.id, document.id.split('-')[0], document.title, values, {}, multiple))
    if entities[-1].type == 'city':
      homes[document.title, values['country']] = document.id

  def links(entity):
    found = {name: ids.get((kind, entity.values.get(name))) for name, kind in TARGETS.items()}
    if entity.type == 'country':
      found['capital'] = homes[entity.values['capital'], entity.title]
    return {name: key for name, key in found.items() if key}

  return name_all([dataclasses.replace(entity, links=links(entity)) for entity in entities])


def _fact(text: str, document: Document) -> tuple[str, str]:
  """Returns (attribute, value) of a sentence without its title and full stop."""
  for attribute, row in ATTRIBUTES.items():
    opening = row['sentence'].removeprefix('{title} ').removesuffix('{value}.')
    if text.startswith(opening):
      return attribute, text.removeprefix(opening)
  raise ValueError(f'document {document.id}: no known fact in {text!r}')
