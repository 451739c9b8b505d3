"""Questions follow from the entities and the seed."""

import random

from jaxsearch.world import files as world
from recipes.world import choose
from recipes.world.entities import read_back

ENTITIES = read_back(world.corpus())


def test_questions_follow_from_the_entities_and_the_seed():
  rng = random.Random(0)
  capitals = {e.links['capital'] for e in ENTITIES if e.type == 'country'}
  small = [e for e in ENTITIES if e.type != 'city' or e.id in capitals or rng.random() < 0.05]
  sizes = {'warm': 40, 'rl': 30, 'test': 20, 'dev': 10}
  first, again = (choose.questions(small, seed=3, sizes=sizes) for _ in range(2))
  assert first == again
  assert first['warm'] != choose.questions(small, seed=4, sizes=sizes)['warm']
