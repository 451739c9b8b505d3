"""The entities of the embedded world, as they are read back from its documents.

An `Entity` has a title and attributes; an attribute has a value and, where the value is itself an entity, that entity's id.
What the documents say is enough to restore all of it. Where the facts came from: recipe/gather.py.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jaxsearch.data.corpus import Document

ATTRIBUTES = {  # attribute -> (what an agent says it looks for, the sentence that states it)
  'country': ('country', '{title} is a city in {value}.'),
  'population': ('population', '{title} has the population {value}.'),
  'timezone': ('time zone', '{title} has the time zone {value}.'),
  'continent': ('continent', '{title} is a country in {value}.'),
  'capital': ('capital', '{title} has the capital {value}.'),
  'currency': ('currency', '{title} has the currency {value}.'),
  'language': ('language', '{title} has the language {value}.'),
  'calling_code': ('calling code', '{title} has the calling code {value}.'),
  'domain': ('internet domain', '{title} has the internet domain {value}.'),
  'symbol': ('symbol', '{title} has the symbol {value}.'),
  'number': ('atomic number', '{title} has the atomic number {value}.'),
  'discoverer': ('discoverer', '{title} was discovered by {value}.'),
  'year': ('year', '{title} was discovered in the year {value}.'),
  'found_in': ('country', '{title} was first found in {value}.'),
  'element': ('element', '{title} discovered {value}.'),
  'currency_code': ('code', '{title} is a currency with the code {value}.'),
  'language_code': ('code', '{title} is a language with the code {value}.'),
}
TARGETS = {  # attribute whose value names an entity -> the type of that entity
  'country': 'country', 'found_in': 'country', 'capital': 'city', 'currency': 'currency', 'language': 'language',
  'discoverer': 'person', 'element': 'element',
}  # fmt: skip


def sentence(attribute: str, title: str, value: str) -> str:
  """The sentence that states a fact."""
  return ATTRIBUTES[attribute][1].format(title=title, value=value)


@dataclasses.dataclass(frozen=True)
class Entity:
  """One thing of the world.

  `values` maps an attribute to its text, `links` an attribute to the id of the entity that it names; `multiple` holds the
  attributes with several values (in the text only, never in a question); `mention` is how a question names the entity and
  `query` what finds it.
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

  def named(entity):
    title = entity.title
    if count[title] == 1:
      return dataclasses.replace(entity, mention=title, query=title)
    if entity.type != 'city':
      return dataclasses.replace(entity, mention=f'the {entity.type} {title}', query=title)
    home = entity.values['country']
    return dataclasses.replace(entity, mention=f'{title} in {home}', query=title if home == title else f'{title} {home}')

  return [named(entity) for entity in entities]


def read_back(documents: Sequence[Document]) -> list[Entity]:
  """The entities that the world's documents are about; the inverse of writing `Entity.text`.

  Raises:
    ValueError: a sentence that states no known attribute.
    KeyError: a country whose capital has no document.
  """
  ids = {(_type(document), document.title): document.id for document in documents}
  homes = {}  # (title, country) -> id of a city: titles of cities repeat, so a capital is looked up with its country
  entities = []
  for document in documents:
    sentences = document.text.removesuffix('.').split(f'. {document.title} ')
    facts = [_fact(text.removeprefix(document.title + ' '), document) for text in sentences]
    count = Counter(attribute for attribute, _ in facts)
    values = {attribute: value for attribute, value in facts if count[attribute] == 1}
    multiple = tuple(fact for fact in facts if count[fact[0]] > 1)
    entities.append(Entity(document.id, _type(document), document.title, values, {}, multiple))
    if entities[-1].type == 'city':
      homes[document.title, values['country']] = document.id

  def links(entity):
    found = {name: ids.get((TARGETS[name], value)) for name, value in entity.values.items() if name in TARGETS}
    if entity.type == 'country':
      found['capital'] = homes[entity.values['capital'], entity.title]
    return {name: key for name, key in found.items() if key}

  return name_all([dataclasses.replace(entity, links=links(entity)) for entity in entities])


def _type(document: Document) -> str:
  return document.id.split('-')[0]


def _fact(text: str, document: Document) -> tuple[str, str]:
  """(attribute, value) of a sentence without its title and full stop."""
  for attribute, (_, pattern) in ATTRIBUTES.items():
    opening = pattern.removeprefix('{title} ').removesuffix('{value}.')
    if text.startswith(opening):
      return attribute, text.removeprefix(opening)
  raise ValueError(f'document {document.id}: no known fact in {text!r}')
