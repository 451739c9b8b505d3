"""Chooses the questions about the embedded world and their splits; their wordings are in words.toml.

Pure Python: entities in, questions out, the same for the same seed.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence

from jaxsearch.data.questions import Question
from jaxsearch.world.facts import ATTRIBUTES, WORDS
from recipes.world.entities import Entity
from recipes.world.questions import Pair, World, follow, pair_question, path_question

SIZES = {'warm': 14000, 'rl': 4000, 'test': 1000, 'dev': 300}
HOP_SHARES = {1: 0.25, 2: 0.4, 3: 0.2, 4: 0.15}
TEST_SHARES = {'country': 0.2, 'city': 0.15, 'chemistry': 0.2}
RL_SHARE = 0.3  # of the train entities, as start of a question

OF_COUNTRY = ['continent', 'population', 'currency', 'language', 'calling_code', 'domain', 'capital',
              'capital.population', 'capital.timezone', 'currency.currency_code', 'language.language_code']
OF_ELEMENT = ['symbol', 'number', 'year', 'discoverer', 'found_in',
              *(f'found_in.{path}' for path in OF_COUNTRY[:-1])]
PATHS = {  # type of the start -> the paths of its questions
  'city': ['country', 'population', 'timezone', *(f'country.{path}' for path in OF_COUNTRY)],
  'country': OF_COUNTRY,
  'element': OF_ELEMENT,
  'person': ['element', *(f'element.{path}' for path in OF_ELEMENT if path != 'discoverer')],
}
PAIRS: dict[Pair, list[str]] = {
  (row['operation'], row['type'], tuple(row['path'])): row['questions'] for row in WORDS['pairs']}


def questions(entities: Sequence[Entity], seed: int = 0,
              sizes: dict[str, int] | None = None) -> dict[str, list[Question]]:
  """Returns the questions by split: 'warm' and 'rl' about train entities, 'dev' and 'test' start at others.

  No train question meets a test entity; 'warm' and 'rl' share no start; 'dev' and 'test' share no question.
  """
  sizes = sizes or SIZES
  world, split_of = {entity.id: entity for entity in entities}, divide(entities, seed)
  test = {key for key, split in split_of.items() if split == 'test'}
  result = {}
  for split, size in (('warm', sizes['warm']), ('rl', sizes['rl']), ('test', sizes['test'] + sizes['dev'])):
    starts = [entity for entity in entities if split_of.get(entity.id) == split]
    result[split] = _chosen(world, starts, split, set() if split == 'test' else test, size, seed)
  rest = result['test'][sizes['test']:]
  result['dev'] = [dataclasses.replace(q, metadata=q.metadata | {'split': 'dev'}) for q in rest]
  return result | {'test': result['test'][:sizes['test']]}


def divide(entities: Sequence[Entity], seed: int) -> dict[str, str]:
  """Returns entity id -> the split that may start there: 'test', or of the train entities 'warm' or 'rl'."""
  rng = random.Random(f'divide {seed}')
  countries = sorted(e.id for e in entities if e.type == 'country')
  test = set(rng.sample(countries, round(TEST_SHARES['country'] * len(countries))))
  capitals = {e.links['capital'] for e in entities if e.type == 'country'}
  groups = {}  # a discoverer and all that he found stay together
  for e in entities:
    if e.type == 'city':
      drawn = rng.random() < TEST_SHARES['city'] and e.id not in capitals
      if drawn or e.links['country'] in test:
        test.add(e.id)
    elif e.type == 'element':
      key = e.links.get('discoverer', e.id)
      groups.setdefault(key, set()).update({e.id, key})
  for key in sorted(groups):
    if rng.random() < TEST_SHARES['chemistry']:
      test |= groups[key]
  train = [e.id for e in entities if e.type not in ('currency', 'language') and e.id not in test]
  return dict.fromkeys(test, 'test') | {key: 'rl' if rng.random() < RL_SHARE else 'warm' for key in train}


def _chosen(world: World, starts: Sequence[Entity], split: str, avoided: set[str], size: int,
            seed: int) -> list[Question]:
  """Returns `size` questions that meet no avoided entity, by HOP_SHARES; in a hop count kinds take turns."""
  rng, kinds = random.Random(f'{split} {seed}'), []  # the candidates of each kind, shuffled
  for kind, paths in PATHS.items():
    of_type = [e for e in starts if e.type == kind]
    for path in paths:
      made = (_worded_path(world, e, path.split('.'), split, rng) for e in rng.sample(of_type, len(of_type)))
      kinds.append([q for q in made if q and avoided.isdisjoint(q.metadata['entities'])][:size])
  for pair in PAIRS:
    of_type = [e for e in starts if e.type == pair[1]]
    kinds.append(_pairs(world, of_type, pair, split, avoided, size, rng))
  chosen = []
  for hops, share in HOP_SHARES.items():
    pools = [reversed(pool) for pool in kinds if pool and pool[0].metadata['hops'] == hops]
    turns = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*pools)))
    chosen += itertools.islice(turns, round(share * size))
  rng.shuffle(chosen)
  return chosen


def _worded_path(world: World, start: Entity, path: Sequence[str], split: str,
                 rng: random.Random) -> Question | None:
  question, name = path_question(world, start, path, split), start.mention
  if question is None:
    return None
  for attribute in path[:-1]:
    name = rng.choice(ATTRIBUTES[attribute]['phrases']).format(name)
  return dataclasses.replace(question, question=rng.choice(ATTRIBUTES[path[-1]]['questions']).format(name))


def _pairs(world: World, starts: Sequence[Entity], pair: Pair, split: str, avoided: set[str], count: int,
           rng: random.Random) -> list[Question]:
  """Returns up to `count` questions on two starts; half of the yes-no ones are about starts that agree."""
  operation, _, path = pair
  legs, by_value = {}, {}
  for e in starts:
    if leg := follow(world, e, path):
      legs[e.id] = leg
      by_value.setdefault(leg.value, []).append(e.id)

  def partners(a):  # that agree with `a`; on a longer path not from the same first stop: see pair_question
    stop = legs[a].entities[1:2] if len(path) > 1 else None
    return [b for b in by_value[legs[a].value] if b != a and legs[b].entities[1:2] != stop]

  found, keys = {}, list(legs)
  agreeing = [key for key in keys if operation == 'same' and partners(key)]
  for _ in range(2 * min(count, len(keys) ** 2)):
    if len(found) >= count:
      break
    agree = bool(agreeing) and rng.random() < 0.5
    a = rng.choice(agreeing if agree else keys)
    b = rng.choice(partners(a) if agree else keys)
    if question := pair_question(world, world[a], world[b], pair, split):
      text = rng.choice(PAIRS[pair]).format(a=world[a].mention, b=world[b].mention)
      if avoided.isdisjoint(question.metadata['entities']):
        found.setdefault(question.id, dataclasses.replace(question, question=text))
  return list(found.values())
