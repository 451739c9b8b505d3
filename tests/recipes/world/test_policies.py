import itertools
import random

import numpy as np
import pytest

from configs import world_policy as recipe
from jaxsearch.models import hub
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.trees.layout import lay_out, pack
from jaxsearch.world import files as world
from recipes.world import policies


def examples(sizes):
  for size in sizes:
    yield list(range(1, size + 1)), [False] + [True] * (size - 1)


def test_forests_fill_their_rows_and_pass_over_what_is_too_long():
  rng = random.Random(0)
  sizes = (rng.randint(5, 70) for _ in itertools.count())
  forests = list(itertools.islice(policies.filled(examples(sizes), rows=4, length=64), 6))
  for forest, following in itertools.pairwise(forests):
    counts = [tree.count() for tree in forest]
    assert lay_out(forest, 64, pad_id=0).tokens.shape == (4, 64) and max(counts) <= 64
    assert len(pack([*counts, following[0].count()], 64)) > 4  # the next example had no room


@pytest.fixture
def config(tmp_path):
  config = recipe.get_config()
  config.out = str(tmp_path)
  for name in ('short', 'skill', 'names', 'drill', 'mix', 'review', 'carl', 'recall', 'reader'):
    config[name].update(updates=2, rows=2, row_length=256)
  config.gate.update(em=0.0, number=2)
  return config


@pytest.mark.slow
def test_stages_are_saved_and_not_trained_twice(config, monkeypatch):
  monkeypatch.setattr(policies, 'share_right', lambda *_: 1.0)
  folder = policies.make(config)
  first = hub.load(folder).params['embedding']
  monkeypatch.setattr(policies.sft, 'open_imitation', lambda *_, **__: pytest.fail('trained again'))
  np.testing.assert_array_equal(hub.load(policies.make(config)).params['embedding'], first)
  assert Tokenizer.load(folder).encode('<search>') == Tokenizer.load(world.folder()).encode('<search>')
