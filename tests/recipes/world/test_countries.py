"""The bed of CARL's study: tiers by construction, facts that no name hints at, contexts that lose them."""

import collections
import itertools
import random

import pytest

from configs import world_beds
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.world import files as world
from jaxsearch.world.facts import read_back
from recipes.world import countries


def test_facts_are_exchanged_and_hardly_shared():
  own = {entity.id: entity.values for entity in read_back(world.corpus())}
  known, unknown, others = countries.countries()
  assert len(known) == len(unknown) == 60 and len({e.title for e in (*known, *unknown, *others)}) == 171
  for name in countries.ASKED:
    values = [entity.values[name] for entity in (*known, *unknown)]
    assert max(collections.Counter(values).values()) <= 2  # 1.7 % of 120
    assert all(own[entity.id].get(name) != entity.values[name] for entity in (*known, *unknown))


def test_half_of_the_countries_of_each_tier_are_held_out():
  known = {entity.id for entity in countries.countries()[0]}
  learn, held_out = countries.questions('learn'), countries.questions('held_out')
  of = lambda asked: {question.id.split('.')[0] for question in asked}
  assert len(learn) == len(held_out) == 360 and not of(learn) & of(held_out)
  assert all((asked.metadata['tier'] == 2) == (asked.id.split('.')[0] in known) for asked in held_out)
  assert sum(question.metadata['tier'] == 2 for question in learn) == 180


def test_examples_never_state_a_fact_on_an_unknown_country():
  tokenizer, config = Tokenizer.load(world.folder()), world_beds.get_config()
  unknown, kinds = {entity.title for entity in countries.countries()[1]}, set()
  for made in itertools.islice(countries.examples(config, 'countries', tokenizer), 60):
    statement = isinstance(made, tuple)
    text = tokenizer.decode(made[0]) if statement else ''.join(node.text for node in made.walk())
    assert not any(f' {title} has' in text for title in unknown)
    kinds.add('statement' if statement else 'search' in text)
  assert kinds == {'statement', True, False}


def test_a_context_loses_what_was_found_as_often_as_said():
  tokenizer, rng = Tokenizer.load(world.folder()), random.Random(0)
  contexts = []
  for _ in range(150):
    tree = countries.episode(tokenizer, rng, known=True, calls=True, template='world_carl', blank=False)
    finding = tree.question.metadata['steps'][0]['finding']
    contexts += [finding not in node.text for node in tree.walk() if node.role.value == 'context']
  assert sum(contexts) / len(contexts) == pytest.approx(countries.LOST, abs=0.1)
