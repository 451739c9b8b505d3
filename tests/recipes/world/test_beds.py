"""Chains that go astray: where they do, how often, and that they stay in the world."""

import itertools
import random
import types

import numpy as np
import pytest

from configs import world_beds
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import chains, files as world
from recipes.world import beds


@pytest.fixture(scope='module')
def questions():
  return beds._paths('world:warm', (3,))


def test_a_chain_without_flaws_is_the_gold_one(questions):
  for question in questions[:20]:
    assert beds.strayed(question, random.Random(0), wrong=0, repeat=0) == (chains.full_chain(question), 0)


def test_a_chain_goes_on_from_the_wrong_title(questions):
  rng = random.Random(0)
  for question in questions[:50]:
    gold, steps = chains.full_chain(question), question.metadata['steps']
    spans, flawed = beds.strayed(question, rng, wrong=0.3, repeat=0.0)
    assert spans[:2 * flawed - 2] == gold[:2 * flawed - 2] if flawed else spans == gold
    if flawed:
      assert spans[2 * flawed - 1][1] != steps[flawed - 1]['query']
      titles = {document.title for document in world.corpus()}
      assert all(query in titles for role, query in spans if role == 'observation')


def test_flaws_are_as_frequent_as_said(questions):
  rng = random.Random(0)
  flawed = lambda **shares: np.mean([beds.strayed(q, rng, **shares)[1] > 0 for q in questions[:600]])
  assert flawed(wrong=0.112, repeat=0.0) == pytest.approx(0.3, abs=0.06)
  assert flawed(wrong=0.0, repeat=0.05) == pytest.approx(1 - 0.95**3, abs=0.05)


@pytest.mark.parametrize('name', ['actor', 'reviewer'])
def test_of_a_review_its_number_alone_is_learned(name):
  tokenizer, config = Tokenizer.load(world.folder()), world_beds.get_config()
  examples = list(itertools.islice(beds.examples_of(config, name, tokenizer), 30))
  reviews = [tree for tree in examples if isinstance(tree, Tree)]
  assert len(reviews) == 30 if name == 'reviewer' else 0 < len(reviews) < 20
  for tree in reviews:
    said = [leaf.text for leaf in tree.leaves()]
    assert [node.text for node in tree.nodes(Role.POLICY)] == said
    assert all('Flawed step' in leaf.parent.text and int(text) <= 4 for leaf, text in zip(tree.leaves(), said))
  too_long = sum(tree.count() > config.actor.row_length for tree in reviews)  # these are skipped
  assert too_long <= 1


def test_a_review_behind_each_step_names_the_first_flaw_so_far(questions):
  tokenizer, (question, *_) = Tokenizer.load(world.folder()), questions
  spans, _ = beds.strayed(question, random.Random(0), wrong=0.0, repeat=0.0)
  tree = beds.reviewed(tokenizer, question, spans, 3, range(1, 5))
  assert [leaf.text for leaf in tree.leaves()] == [' 0\n', ' 0\n', ' 3\n', ' 3\n']
  draft = tree.leaves()[-1].path()[:-2]
  written = [token for node in draft for token in node.tokens]
  assert written == list(chains.encode_chain(tokenizer, question, spans)[0])


@pytest.mark.parametrize('passages', [0.0, 1.0])
def test_a_reader_learns_the_answer_that_it_is_shown(passages):
  tokenizer, stage = Tokenizer.load(world.folder()), world_beds.get_config().reading.unlock()
  stage.update(passages=passages, drills=1.0)
  rng, shown = random.Random(0), []
  for _ in range(200):
    ids, mask = beds.reading(stage, tokenizer, rng)
    text, answer = (tokenizer.decode([i for i, learned in zip(ids, mask) if learned == of]) for of in (0, 1))
    evidence, question = text.rsplit('\nQuestion: ', 1)
    assert answer.endswith('\n') and question.endswith('\nAnswer:')
    shown.append(f'{answer.rstrip()}.' in evidence)
  assert np.mean(shown) == pytest.approx(stage.whole, abs=0.1)  # else it guesses


def test_each_question_gets_the_answer_of_another():
  asked = world.questions('rl', (3,))
  of, made = {question.id: question for question in asked}, beds.exchanged(asked, random.Random(0))
  assert [(q.id, q.question) for q in made] == [(q.id, q.question) for q in asked]
  assert sorted(q.golden_answers for q in made) == sorted(of[q.id].golden_answers for q in made)
  assert sum(q.golden_answers == of[q.id].golden_answers for q in made) < len(made) / 20


def test_only_what_is_named_is_made(tmp_path):
  config = world_beds.get_config().unlock()
  config.out = str(tmp_path)
  assert beds.make(config, ['exchanged']) == tmp_path
  assert {file.name for file in tmp_path.iterdir()} == {f'exchanged_{name}.jsonl' for name in (1, 2, 3, 'tiers')}
  with pytest.raises(ValueError, match="'walker' is none of actor, reviewer, tiers"):
    beds.make(config, ['exchanged', 'walker'])


def test_the_actor_is_made_and_looked_at_before_the_reviewer(tmp_path, monkeypatch):
  config, done = world_beds.get_config().unlock(), []
  config.out = str(tmp_path)
  monkeypatch.setattr(beds, 'train_stage', lambda config, tokenizer, model, name, *_: done.append(name))
  monkeypatch.setattr(beds, 'check', lambda config: done.append('gate'))
  monkeypatch.setattr(beds.hub, 'load', lambda folder: types.SimpleNamespace(config=None, params=None))
  beds.make(config, ['reviewer'])
  assert done == ['actor', 'gate', 'reviewer']
