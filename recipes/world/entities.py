"""The entities of the embedded world with what questions are made of: their names and what they name."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jaxsearch.world import facts

# Attribute -> the type of the entity that its value names.
TARGETS = {name: row['names'] for name, row in facts.ATTRIBUTES.items() if 'names' in row}


@dataclasses.dataclass(frozen=True)
class Entity(facts.Entity):
  """`links` maps an attribute to the id of the entity that it names; `mention` is how a question names the
  entity and `query` what finds it."""
  links: dict = dataclasses.field(default_factory=dict)
  mention: str = ''
  query: str = ''


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
