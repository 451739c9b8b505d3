"""How a question about the embedded world is made: paths of one to four hops, comparisons, arithmetic.

A question is built from legs. A leg is a start entity and a path of attributes; following it gives one step
an attribute: the query, the document that answers it, and what is found there. One leg makes a path question,
two legs with the same path make a comparison or a sum. choose.py says which questions there are.
"""

import dataclasses
from collections.abc import Sequence

from jaxsearch.data.questions import Question
from recipes.world.entities import Entity

World = dict[str, Entity]  # by id
Pair = tuple[str, str, tuple[str, ...]]  # operation, type of both starts, path


@dataclasses.dataclass(frozen=True)
class Leg:
  """A start and what a path from it found: `steps` as in the metadata, `entities` all that were met."""
  start: Entity
  steps: tuple[dict, ...]
  entities: tuple[str, ...]

  @property
  def value(self) -> str:
    return self.steps[-1]['finding']


def combine(operation: str, a: str, b: str) -> str:
  """Combines two findings into 'yes' or 'no', a number, or which of the two it is, 'a' or 'b'."""
  if operation == 'same':
    return 'yes' if a == b else 'no'
  x, y = int(a), int(b)
  if operation in ('sum', 'difference'):
    return str(x + y if operation == 'sum' else abs(x - y))
  return 'a' if (x > y if operation == 'more' else x < y) else 'b'


def follow(world: World, start: Entity, path: Sequence[str]) -> Leg | None:
  """Follows a path of attributes from `start`; None where an attribute is missing on the way."""
  here, steps, entities = start, [], [start.id]
  for attribute in path:
    if attribute not in here.values:
      return None
    # A later entity is searched by the name that was found, the first by what the question says.
    query = here.title if steps else here.query
    finding = here.values[attribute]
    steps.append({'query': query, 'passage_id': here.id, 'finding': finding, 'attribute': attribute})
    if attribute in here.links:
      here = world[here.links[attribute]]
      entities.append(here.id)
  return Leg(start, tuple(steps), tuple(entities))


def path_question(world: World, start: Entity, path: Sequence[str], split: str) -> Question | None:
  """Makes a question that follows one path, without words yet.

  None when the path breaks or naming the start gives the answer away.
  """
  leg = follow(world, start, path)
  if leg is None or (path[0] == 'country' and (leg.value in start.mention or start.mention != start.title)):
    return None  # "X in Y" already says the country
  answers = [leg.value]  # and what else is plainly right: a currency's code, a number with separators
  if path[-1] == 'population' and int(leg.value) > 999:
    answers.append(f'{int(leg.value):,}')
  if path[-1] == 'currency':
    answers.append(world[leg.entities[-1]].values['currency_code'])
  return _question('.'.join([start.type, *path]), answers, [leg], split, answer_type=path[-1])


def pair_question(world: World, a: Entity, b: Entity, pair: Pair, split: str) -> Question | None:
  """Makes a comparison or a sum over two starts; None when a fact is missing or the answer is not decided."""
  operation, _, path = pair
  legs = [follow(world, start, path) for start in (a, b)]
  if a.id == b.id or a.title == b.title or None in legs:
    return None
  if len(path) > 1 and set(legs[0].entities[:2]) & set(legs[1].entities[:2]):
    return None  # in the same country the second half of the search would be idle
  x, y = (leg.value for leg in legs)
  names_country = path[0] == 'country' and (a.mention != a.title or b.mention != b.title)
  if names_country or (operation in ('more', 'less', 'difference') and x == y):
    return None
  answers = [combine(operation, x, y)]
  answer_type = 'yes_no' if operation == 'same' else f'{operation}_{path[-1]}'
  if operation in ('more', 'less'):
    winner = a if answers == ['a'] else b
    answers, answer_type = list(dict.fromkeys([winner.title, winner.mention])), 'choice'
  return _question('.'.join([operation, a.type, *path]), answers, legs, split, answer_type=answer_type,
                   operation=operation, choices=[a.title, b.title])


def _question(kind: str, answers: Sequence[str], legs: Sequence[Leg], split: str, **more) -> Question:
  steps = [step for leg in legs for step in leg.steps]
  metadata = {
    'kind': kind, 'hops': len(steps), 'split': split, 'starts': [leg.start.id for leg in legs],
    'gold_passages': list(dict.fromkeys(step['passage_id'] for step in steps)),
    'entities': list(dict.fromkeys(entity for leg in legs for entity in leg.entities)),
    'steps': steps, **more,
  }  # fmt: skip
  return Question('-'.join([kind, *metadata['starts']]), '', tuple(answers), metadata)
