"""Which questions about the embedded world there are, how they are worded, and which split they are in.

Pure Python: entities in, questions out, the same for the same seed.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

from jaxsearch.data.questions import Question
from jaxsearch.world.facts import Entity
from jaxsearch.world.questions import Pair, World, follow, pair_question, path_question

SIZES = {'warm': 14000, 'rl': 4000, 'test': 1000, 'dev': 300}
HOP_SHARES = {1: 0.25, 2: 0.4, 3: 0.2, 4: 0.15}
TEST_SHARES = {'country': 0.2, 'city': 0.15, 'chemistry': 0.2}
RL_SHARE = 0.3  # of the train entities, as start of a question

OF_COUNTRY = (
  ('continent',), ('population',), ('currency',), ('language',), ('calling_code',), ('domain',), ('capital',),
  ('capital', 'population'), ('capital', 'timezone'), ('currency', 'currency_code'), ('language', 'language_code'),
)  # fmt: skip
OF_ELEMENT = (
  ('symbol',), ('number',), ('year',), ('discoverer',), ('found_in',),
  *(('found_in', *path) for path in OF_COUNTRY if path[-1] != 'language_code'),
)  # fmt: skip
PATHS = {  # type of the start -> the paths of its questions
  'city': (('country',), ('population',), ('timezone',), *(('country', *path) for path in OF_COUNTRY)),
  'country': OF_COUNTRY,
  'element': OF_ELEMENT,
  'person': (('element',), *(('element', *path) for path in OF_ELEMENT if path != ('discoverer',))),
}
PAIRS: dict[Pair, tuple[str, str]] = {  # questions about two legs
  ('more', 'city', ('population',)): (
    'Which city has more inhabitants, {a} or {b}?', 'Which has the larger population, {a} or {b}?'),
  ('more', 'country', ('population',)): (
    'Which country has more inhabitants, {a} or {b}?', 'Which country has the larger population, {a} or {b}?'),
  ('less', 'element', ('year',)): (
    'Which element was discovered first, {a} or {b}?', 'Which was discovered earlier, {a} or {b}?'),
  ('more', 'element', ('number',)): (
    'Which element has the higher atomic number, {a} or {b}?', 'Which is heavier by atomic number, {a} or {b}?'),
  ('same', 'city', ('country',)): (
    'Are {a} and {b} in the same country?', 'Do {a} and {b} lie in the same country?'),
  ('sum', 'city', ('population',)): (
    'How many people live in {a} and {b} together?', 'What is the sum of the populations of {a} and {b}?'),
  ('difference', 'element', ('year',)): (
    'How many years lie between the discoveries of {a} and {b}?', 'By how many years do the discoveries of {a} and {b} differ?'),
  ('sum', 'element', ('number',)): (
    'What is the sum of the atomic numbers of {a} and {b}?', 'What do the atomic numbers of {a} and {b} add up to?'),
  ('more', 'city', ('country', 'population')): (
    'Which city lies in the country with more inhabitants, {a} or {b}?',
    'Of {a} and {b}, which is in the country with the larger population?'),
  ('same', 'city', ('country', 'currency')): (
    'Do the countries of {a} and {b} have the same currency?', 'Does one pay with the same currency in {a} and {b}?'),
  ('same', 'city', ('country', 'language')): (
    'Do the countries of {a} and {b} have the same language?', 'Is the same language spoken in {a} and {b}?'),
  ('sum', 'city', ('country', 'population')): (
    'How many people live in the countries of {a} and {b} together?',
    'What is the sum of the populations of the countries of {a} and {b}?'),
}
PHRASES = {  # a thing named by way of another
  'country': ('the country of {}', 'the country where {} lies', 'the country in which {} is found'),
  'capital': ('the capital of {}', 'the capital city of {}'),
  'currency': ('the currency of {}', 'the money of {}'),
  'language': ('the language of {}', 'the language spoken in {}'),
  'found_in': ('the country where {} was discovered', 'the country of the discovery of {}'),
  'element': ('the element discovered by {}', 'the element that {} discovered'),
}
ENDINGS = {  # the question about the last attribute
  'country': ('In which country is {}?', 'In what country does {} lie?', 'Which country is {} in?'),
  'population': ('What is the population of {}?', 'How many people live in {}?', 'How many inhabitants does {} have?'),
  'timezone': ('What is the time zone of {}?', 'In which time zone does {} lie?', 'Which time zone is used in {}?'),
  'continent': ('On which continent is {}?', 'To which continent does {} belong?', 'What is the continent of {}?'),
  'capital': ('What is the capital of {}?', 'Which city is the capital of {}?', 'Name the capital of {}.'),
  'currency': ('What is the currency of {}?', 'Which currency is used in {}?', 'With which currency does one pay in {}?'),
  'language': ('What is the language of {}?', 'Which language is spoken in {}?', 'What language do people speak in {}?'),
  'calling_code': ('What is the calling code of {}?', 'Which calling code does {} have?', 'With which code does one call {}?'),
  'domain': ('What is the internet domain of {}?', 'Which internet domain does {} have?'),
  'symbol': ('What is the symbol of {}?', 'Which symbol does {} have?', 'How is {} written in short?'),
  'number': ('What is the atomic number of {}?', 'Which atomic number does {} have?'),
  'discoverer': ('Who discovered {}?', 'By whom was {} discovered?', 'Who was the discoverer of {}?'),
  'year': ('When was {} discovered?', 'In which year was {} discovered?', 'What is the year of the discovery of {}?'),
  'found_in': ('In which country was {} discovered?', 'Where was {} first found?'),
  'element': ('Which element did {} discover?', 'What did {} discover?', 'Name the element discovered by {}.'),
  'currency_code': ('What is the code of {}?', 'Which code does {} have?'),
  'language_code': ('What is the code of {}?', 'Which code does {} have?'),
}


def questions(entities: Sequence[Entity], seed: int = 0, sizes: dict[str, int] | None = None) -> dict[str, list[Question]]:
  """All questions by split: 'warm' and 'rl' about train entities, 'dev' and 'test' starting at test entities.

  No train question meets a test entity; 'warm' and 'rl' share no start; 'dev' and 'test' share no question.
  """
  sizes = sizes or SIZES
  world = {entity.id: entity for entity in entities}
  test, start = divide(entities, seed)
  result = {}
  for split in ('warm', 'rl'):
    starts = [entity for entity in entities if start.get(entity.id) == split]
    result[split] = _chosen(world, starts, split, lambda question: test.isdisjoint(question.metadata['entities']), sizes[split],
                            random.Random(f'{split} {seed}'))
  starts = [entity for entity in entities if entity.id in test]
  both = _chosen(world, starts, 'test', lambda _: True, sizes['test'] + sizes['dev'], random.Random(f'test {seed}'))
  result['test'] = both[:sizes['test']]
  result['dev'] = [dataclasses.replace(q, metadata=q.metadata | {'split': 'dev'}) for q in both[sizes['test']:]]
  return result


def divide(entities: Sequence[Entity], seed: int) -> tuple[set[str], dict[str, str]]:
  """The ids of the test entities; for every train entity the split ('warm', 'rl') that may start there."""
  rng = random.Random(f'divide {seed}')
  countries = sorted(e.id for e in entities if e.type == 'country')
  test = set(rng.sample(countries, round(TEST_SHARES['country'] * len(countries))))
  capitals = {e.links['capital'] for e in entities if e.type == 'country'}
  for e in entities:
    if e.type == 'city':
      drawn = rng.random() < TEST_SHARES['city'] and e.id not in capitals
      if drawn or e.links['country'] in test:
        test.add(e.id)
  groups = {}  # a discoverer and all that he found stay together
  for e in entities:
    if e.type == 'element':
      key = e.links.get('discoverer', e.id)
      groups.setdefault(key, set()).update({e.id, key})
  for key in sorted(groups):
    if rng.random() < TEST_SHARES['chemistry']:
      test |= groups[key]
  train = [e.id for e in entities if e.type not in ('currency', 'language') and e.id not in test]
  return test, {key: 'rl' if rng.random() < RL_SHARE else 'warm' for key in train}


def _chosen(world: World, starts: Sequence[Entity], split: str, allowed: Callable[[Question], bool], size: int,
            rng: random.Random) -> list[Question]:
  """`size` allowed questions with the wanted shares of hops; inside a hop count the kinds take turns."""
  kinds = []  # the candidates of each kind, shuffled
  for kind, paths in PATHS.items():
    of_type = [e for e in starts if e.type == kind]
    for path in paths:
      made = (_worded_path(world, e, path, split, rng) for e in rng.sample(of_type, len(of_type)))
      kinds.append([question for question in made if question is not None and allowed(question)][:size])
  for pair in PAIRS:
    kinds.append(_pairs(world, [e for e in starts if e.type == pair[1]], pair, split, allowed, size, rng))
  chosen = []
  for hops, share in HOP_SHARES.items():
    pools = [list(pool) for pool in kinds if pool and pool[0].metadata['hops'] == hops]
    wanted = round(share * size)
    while wanted and any(pools):
      for pool in pools:
        if pool and wanted:
          chosen.append(pool.pop())
          wanted -= 1
  rng.shuffle(chosen)
  return chosen


def _worded_path(world: World, start: Entity, path: Sequence[str], split: str, rng: random.Random) -> Question | None:
  question = path_question(world, start, path, split)
  if question is None:
    return None
  name = start.mention
  for attribute in path[:-1]:
    name = rng.choice(PHRASES[attribute]).format(name)
  return dataclasses.replace(question, question=rng.choice(ENDINGS[path[-1]]).format(name))


def _pairs(world: World, starts: Sequence[Entity], pair: Pair, split: str, allowed: Callable[[Question], bool], count: int,
           rng: random.Random) -> list[Question]:
  """Up to `count` questions on two starts; half of the yes-no ones are about starts that agree."""
  operation, _, path = pair
  legs = {e.id: leg for e in starts if (leg := follow(world, e, path))}
  by_value = {}
  for key, leg in legs.items():
    by_value.setdefault(leg.value, []).append(key)

  def partners(a):  # that agree with `a`; on a longer path not from the same first stop: see pair_question
    return [b for b in by_value[legs[a].value] if b != a and (len(path) == 1 or legs[b].entities[1] != legs[a].entities[1])]

  found, keys = {}, list(legs)
  agreeing = [key for key in keys if operation == 'same' and partners(key)]
  for _ in range(2 * min(count, len(keys) ** 2)):
    if len(found) >= count:
      break
    agree = bool(agreeing) and rng.random() < 0.5
    a = rng.choice(agreeing if agree else keys)
    b = rng.choice(partners(a) if agree else keys)
    question = pair_question(world, world[a], world[b], pair, split)
    if question is not None:
      text = rng.choice(PAIRS[pair]).format(a=world[a].mention, b=world[b].mention)
      if allowed(question):
        found.setdefault(question.id, dataclasses.replace(question, question=text))
  return list(found.values())
