"""Questions about the embedded world: paths of one to four hops, comparisons, arithmetic, in disjoint splits.

A question is built from legs. A leg is a start entity and a path of attributes; following it gives one step
an attribute: the query, the passage that answers it, and what is found there. One leg makes a path question,
two legs with the same path make a comparison or a sum. Pure Python: entities in, questions out, the same for
the same seed.
"""

import dataclasses
import random
from collections.abc import Sequence

from jaxsearch.data.questions import Question
from jaxsearch.world.facts import Entity

SIZES = {'warm': 14000, 'rl': 4000, 'test': 1000, 'dev': 300}
HOP_SHARES = {1: 0.25, 2: 0.4, 3: 0.2, 4: 0.15}
TEST_SHARES = {'country': 0.2, 'city': 0.15, 'chemistry': 0.2}
RL_SHARE = 0.3  # of the train entities, as start of a question

OF_COUNTRY = ('continent', 'population', 'currency', 'language', 'calling_code', 'domain', 'capital')
PATHS = {
  'city': (
    ('country',),
    ('population',),
    ('timezone',),
    *(('country', last) for last in OF_COUNTRY),
    ('country', 'capital', 'population'),
    ('country', 'capital', 'timezone'),
    ('country', 'currency', 'currency_code'),
    ('country', 'language', 'language_code'),
  ),
  'country': (
    *((last,) for last in OF_COUNTRY),
    ('capital', 'population'),
    ('capital', 'timezone'),
    ('currency', 'currency_code'),
    ('language', 'language_code'),
  ),
  'element': (
    ('symbol',),
    ('number',),
    ('year',),
    ('discoverer',),
    ('found_in',),
    *(('found_in', last) for last in OF_COUNTRY),
    ('found_in', 'capital', 'population'),
    ('found_in', 'capital', 'timezone'),
    ('found_in', 'currency', 'currency_code'),
  ),
  'person': (
    ('element',),
    ('element', 'symbol'),
    ('element', 'number'),
    ('element', 'year'),
    ('element', 'found_in'),
    *(('element', 'found_in', last) for last in OF_COUNTRY),
    ('element', 'found_in', 'capital', 'population'),
    ('element', 'found_in', 'capital', 'timezone'),
    ('element', 'found_in', 'currency', 'currency_code'),
  ),
}
PAIRS = {  # (operation, start type, path): questions about two legs
  ('more', 'city', ('population',)): (
    'Which city has more inhabitants, {a} or {b}?',
    'Which has the larger population, {a} or {b}?',
  ),
  ('more', 'country', ('population',)): (
    'Which country has more inhabitants, {a} or {b}?',
    'Which country has the larger population, {a} or {b}?',
  ),
  ('less', 'element', ('year',)): (
    'Which element was discovered first, {a} or {b}?',
    'Which was discovered earlier, {a} or {b}?',
  ),
  ('more', 'element', ('number',)): (
    'Which element has the higher atomic number, {a} or {b}?',
    'Which is heavier by atomic number, {a} or {b}?',
  ),
  ('same', 'city', ('country',)): (
    'Are {a} and {b} in the same country?',
    'Do {a} and {b} lie in the same country?',
  ),
  ('sum', 'city', ('population',)): (
    'How many people live in {a} and {b} together?',
    'What is the sum of the populations of {a} and {b}?',
  ),
  ('difference', 'element', ('year',)): (
    'How many years lie between the discoveries of {a} and {b}?',
    'By how many years do the discoveries of {a} and {b} differ?',
  ),
  ('sum', 'element', ('number',)): (
    'What is the sum of the atomic numbers of {a} and {b}?',
    'What do the atomic numbers of {a} and {b} add up to?',
  ),
  ('more', 'city', ('country', 'population')): (
    'Which city lies in the country with more inhabitants, {a} or {b}?',
    'Of {a} and {b}, which is in the country with the larger population?',
  ),
  ('same', 'city', ('country', 'currency')): (
    'Do the countries of {a} and {b} have the same currency?',
    'Does one pay with the same currency in {a} and {b}?',
  ),
  ('same', 'city', ('country', 'language')): (
    'Do the countries of {a} and {b} have the same language?',
    'Is the same language spoken in {a} and {b}?',
  ),
  ('sum', 'city', ('country', 'population')): (
    'How many people live in the countries of {a} and {b} together?',
    'What is the sum of the populations of the countries of {a} and {b}?',
  ),
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
  'population': (
    'What is the population of {}?',
    'How many people live in {}?',
    'How many inhabitants does {} have?',
  ),
  'timezone': (
    'What is the time zone of {}?',
    'In which time zone does {} lie?',
    'Which time zone is used in {}?',
  ),
  'continent': (
    'On which continent is {}?',
    'To which continent does {} belong?',
    'What is the continent of {}?',
  ),
  'capital': ('What is the capital of {}?', 'Which city is the capital of {}?', 'Name the capital of {}.'),
  'currency': (
    'What is the currency of {}?',
    'Which currency is used in {}?',
    'With which currency does one pay in {}?',
  ),
  'language': (
    'What is the language of {}?',
    'Which language is spoken in {}?',
    'What language do people speak in {}?',
  ),
  'calling_code': (
    'What is the calling code of {}?',
    'Which calling code does {} have?',
    'With which code does one call {}?',
  ),
  'domain': ('What is the internet domain of {}?', 'Which internet domain does {} have?'),
  'symbol': ('What is the symbol of {}?', 'Which symbol does {} have?', 'How is {} written in short?'),
  'number': ('What is the atomic number of {}?', 'Which atomic number does {} have?'),
  'discoverer': ('Who discovered {}?', 'By whom was {} discovered?', 'Who was the discoverer of {}?'),
  'year': (
    'When was {} discovered?',
    'In which year was {} discovered?',
    'What is the year of the discovery of {}?',
  ),
  'found_in': ('In which country was {} discovered?', 'Where was {} first found?'),
  'element': (
    'Which element did {} discover?',
    'What did {} discover?',
    'Name the element discovered by {}.',
  ),
  'currency_code': ('What is the code of {}?', 'Which code does {} have?'),
  'language_code': ('What is the code of {}?', 'Which code does {} have?'),
}


@dataclasses.dataclass(frozen=True)
class Leg:
  """A start and what a path from it found: `steps` as in the metadata, `entities` all that were met."""

  start: Entity
  path: tuple[str, ...]
  steps: tuple[dict, ...]
  entities: tuple[str, ...]

  @property
  def value(self) -> str:
    return self.steps[-1]['finding']


def follow(world: dict[str, Entity], start: Entity, path: Sequence[str]) -> Leg | None:
  """Follows a path of attributes from `start`; None where an attribute is missing on the way."""
  here, steps, entities = start, [], [start.id]
  for i, attribute in enumerate(path):
    if attribute not in here.values:
      return None
    # a later entity is searched by the name that was found, the first by what the question says
    query = here.query if i == 0 else here.title
    steps.append(
      {'query': query, 'passage_id': here.id, 'finding': here.values[attribute], 'attribute': attribute}
    )
    if attribute in here.links:
      here = world[here.links[attribute]]
      entities.append(here.id)
  return Leg(start, tuple(path), tuple(steps), tuple(entities))


def combine(operation: str, a: str, b: str) -> str:
  """What two findings give: 'yes' or 'no', a number, or which of the two it is, 'a' or 'b'."""
  if operation == 'same':
    return 'yes' if a == b else 'no'
  x, y = int(a), int(b)
  return {
    'sum': str(x + y),
    'difference': str(abs(x - y)),
    'more': 'a' if x > y else 'b',
    'less': 'a' if x < y else 'b',
  }[operation]


def _question(kind, text, answers, legs, split, **more) -> Question:
  steps = [step for leg in legs for step in leg.steps]
  metadata = {
    'kind': kind,
    'hops': len(steps),
    'split': split,
    'starts': [leg.start.id for leg in legs],
    'gold_passages': list(dict.fromkeys(step['passage_id'] for step in steps)),
    'entities': list(dict.fromkeys(e for leg in legs for e in leg.entities)),
    'steps': steps,
    **more,
  }
  return Question('-'.join([kind, *(leg.start.id for leg in legs)]), text, tuple(answers), metadata)


def _aliases(attribute: str, value: str, target: Entity | None) -> list[str]:
  """The value, and what else is plainly right: a currency's code, a number with separators."""
  answers = [value]
  if attribute == 'population' and int(value) > 999:
    answers.append(f'{int(value):,}')
  if attribute == 'currency' and target is not None:
    answers.append(target.values['currency_code'])
  return answers


def path_question(
  world: dict[str, Entity], start: Entity, path: Sequence[str], split: str, wording
) -> Question | None:
  """A question that follows one path; None when the path breaks or naming the start gives the answer away.

  `wording` is a `random.Random` that chooses one, or the text itself.
  """
  leg = follow(world, start, path)
  if leg is None or (path[0] == 'country' and (leg.value in start.mention or start.mention != start.title)):
    return None  # "X in Y" already says the country
  text = wording if isinstance(wording, str) else _worded(start.mention, path, wording)
  target = world[leg.entities[-1]] if path[-1] == 'currency' else None
  answers = _aliases(path[-1], leg.value, target)
  return _question('.'.join([start.type, *path]), text, answers, [leg], split, answer_type=path[-1])


def _worded(name: str, path: Sequence[str], rng: random.Random) -> str:
  for attribute in path[:-1]:
    name = rng.choice(PHRASES[attribute]).format(name)
  return rng.choice(ENDINGS[path[-1]]).format(name)


def pair_question(
  world: dict[str, Entity], a: Entity, b: Entity, pair: tuple, split: str, wording
) -> Question | None:
  """A comparison or a sum over two starts; None when a fact is missing or the answer is not decided."""
  operation, _, path = pair
  legs = [follow(world, start, path) for start in (a, b)]
  if a.id == b.id or a.title == b.title or None in legs:
    return None
  if len(path) > 1 and set(legs[0].entities[:2]) & set(legs[1].entities[:2]):
    return None  # in the same country the second half of the search would be idle
  x, y = (leg.value for leg in legs)
  named_country = path[0] == 'country' and (a.mention != a.title or b.mention != b.title)
  if named_country or (operation in ('more', 'less', 'difference') and x == y):
    return None
  result = combine(operation, x, y)
  answers = [result]
  answer_type = 'yes_no' if operation == 'same' else f'{operation}_{path[-1]}'
  if operation in ('more', 'less'):
    winner = a if result == 'a' else b
    answers, answer_type = list(dict.fromkeys([winner.title, winner.mention])), 'choice'
  text = wording if isinstance(wording, str) else wording.choice(PAIRS[pair]).format(a=a.mention, b=b.mention)
  kind = '.'.join([operation, a.type, *path])
  more = {'answer_type': answer_type, 'operation': operation, 'choices': [a.title, b.title]}
  return _question(kind, text, answers, legs, split, **more)


def restore(world: dict[str, Entity], name: str, text: str, split: str) -> Question:
  """The question again from its id and text; all else follows from the world, or it is a ValueError."""
  kind, *keys = name.split('-')
  starts = [world.get('-'.join(pair)) for pair in zip(keys[::2], keys[1::2], strict=False)]
  first, *path = kind.split('.')
  question = None
  if None not in starts and len(starts) == 1:
    question = path_question(world, starts[0], path, split, text)
  elif None not in starts and len(starts) == 2:
    question = pair_question(world, *starts, (first, path[0], tuple(path[1:])), split, text)
  if question is None:
    raise ValueError(f'no question {name!r} about this world')
  return question


def divide(entities: Sequence[Entity], seed: int) -> tuple[set[str], dict[str, str]]:
  """The ids of the test entities; for every train entity the split ('warm', 'rl') that may start there."""
  rng = random.Random(f'divide {seed}')
  test = set()
  countries = sorted(e.id for e in entities if e.type == 'country')
  test.update(rng.sample(countries, round(TEST_SHARES['country'] * len(countries))))
  capitals = {e.links['capital'] for e in entities if e.type == 'country'}
  for e in entities:
    if e.type == 'city':
      inherited = e.links['country'] in test
      drawn = rng.random() < TEST_SHARES['city'] and e.id not in capitals
      if inherited or drawn:
        test.add(e.id)
  groups = {}  # a discoverer and all that he found stay together
  for e in entities:
    if e.type == 'element':
      groups.setdefault(e.links.get('discoverer', e.id), set()).update(
        {e.id, e.links.get('discoverer', e.id)}
      )
  for key in sorted(groups):
    if rng.random() < TEST_SHARES['chemistry']:
      test |= groups[key]
  start = {}
  for e in entities:
    if e.type not in ('currency', 'language') and e.id not in test:
      start[e.id] = 'rl' if rng.random() < RL_SHARE else 'warm'
  return test, start


def _candidates(world, starts, split, allowed, count, rng) -> dict[str, list[Question]]:
  """Kind -> up to `count` questions of that kind, shuffled."""
  kinds = {}
  for kind, paths in PATHS.items():
    of_type = [e for e in starts if e.type == kind]
    for path in paths:
      made = (path_question(world, e, path, split, rng) for e in rng.sample(of_type, len(of_type)))
      kept = [q for q in made if q is not None and allowed(q)][:count]
      kinds['.'.join([kind, *path])] = kept
  for pair in PAIRS:
    kinds['.'.join([pair[0], pair[1], *pair[2]])] = _pairs(world, starts, pair, split, allowed, count, rng)
  return kinds


def _pairs(world, starts, pair, split, allowed, count, rng) -> list[Question]:
  """Up to `count` questions on two starts; half of the yes-no ones are about starts that agree."""
  operation, kind, path = pair
  legs = {e.id: leg for e in starts if e.type == kind and (leg := follow(world, e, path))}
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
    question = pair_question(world, world[a], world[b], pair, split, rng)
    if question is not None and allowed(question):
      found.setdefault(question.id, question)
  return list(found.values())


def _draw(kinds: dict[str, list[Question]], size: int, rng: random.Random) -> list[Question]:
  """`size` questions with the wanted shares of hops; inside a hop count the kinds take turns."""
  chosen = []
  for hops, share in HOP_SHARES.items():
    pools = [list(pool) for pool in kinds.values() if pool and pool[0].metadata['hops'] == hops]
    wanted = round(share * size)
    while wanted and any(pools):
      for pool in pools:
        if pool and wanted:
          chosen.append(pool.pop())
          wanted -= 1
  rng.shuffle(chosen)
  return chosen


def make(
  entities: Sequence[Entity], seed: int = 0, sizes: dict[str, int] | None = None
) -> dict[str, list[Question]]:
  """All questions by split: 'warm' and 'rl' about train entities, 'dev' and 'test' starting at test entities.

  No train question meets a test entity; 'warm' and 'rl' share no start; 'dev' and 'test' share no question.
  """
  sizes = sizes or SIZES
  world = {e.id: e for e in entities}
  test, start = divide(entities, seed)
  result = {}
  for split in ('warm', 'rl'):
    rng = random.Random(f'{split} {seed}')
    starts = [e for e in entities if start.get(e.id) == split]
    kinds = _candidates(
      world, starts, split, lambda q: test.isdisjoint(q.metadata['entities']), sizes[split], rng
    )
    result[split] = _draw(kinds, sizes[split], rng)
  rng = random.Random(f'test {seed}')
  starts = [e for e in entities if e.id in test]
  size = sizes['test'] + sizes['dev']
  both = _draw(_candidates(world, starts, 'test', lambda q: True, size, rng), size, rng)
  result['test'] = both[: sizes['test']]
  result['dev'] = [
    dataclasses.replace(q, metadata={**q.metadata, 'split': 'dev'}) for q in both[sizes['test'] :]
  ]
  return result
