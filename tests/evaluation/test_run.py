"""The shipped policy answers questions of the world; files and folders in, scores and predictions out."""

import dataclasses
import json

import jax
import pytest

from configs import quickstart
from jaxsearch import cli
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import run
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from tests.evaluation.test_competence import Letters


@pytest.fixture(scope='module')
def config():
  config = quickstart.get_config()
  config.sampler.slots = 8
  return config


@pytest.fixture(scope='module')
def agent(config):
  return run.open_agent(config)


@pytest.fixture(scope='module')
def answered(agent):
  return rollout(agent, world.questions('test')[:12], jax.random.key(0))[0]


def test_scores_are_means_over_trees(answered):
  scores = run.scores(run.predictions(answered))
  right = [exact_match(tree.answer, tree.question.golden_answers) for tree in answered]
  assert scores['n'] == 12 and scores['em'] == pytest.approx(sum(right) / 12)
  assert scores['f1'] >= scores['em']
  assert scores['searches'] == pytest.approx(sum(len(tree.nodes(Role.OBSERVATION)) for tree in answered) / 12, abs=1)


def test_recall_is_the_share_that_retrieved_a_gold_answer():
  trees = []
  for gold, texts in (('Paris', ['Lyon', 'In Paris.']), ('Rome', []), ('Rome', ['Roman']), ('red blue', ['red', 'blue']),
                      ('Oslo', ['Oslo'])):
    trees.append(Tree(Letters(), Question(gold, 'Where?', (gold,))))
    trees[-1].metrics = {'searches': len(texts)}
    for text in texts:
      trees[-1].root.append(text, Role.OBSERVATION)
  scores = run.scores(run.predictions(trees))
  assert scores['retrieval_recall'] == pytest.approx(2 / 5) and scores['searches'] == pytest.approx(6 / 5)


def test_a_prediction_says_which_data_set_its_question_is_of():
  trees = [Tree(Letters(), Question('1', 'Who?', ('A',), metadata)) for metadata in ({'source': 'hotpotqa'}, {})]
  assert [record['source'] for record in run.predictions(trees)] == ['hotpotqa', '']


def test_predictions_hold_every_token_of_the_tree(answered):
  for tree, record in zip(answered, run.predictions(answered)):
    text = ''.join(span['text'] for span in record['spans'])
    assert text == tree.tokenizer.decode([token for node in tree.walk() for token in node.tokens])
    assert record['spans'][0]['role'] == 'prompt'
  assert json.loads(json.dumps(run.predictions(answered)))


def test_sampling_is_that_of_the_call(agent):
  questions = world.questions('test')[:6]
  greedy = [run.predictions(rollout(agent, questions, jax.random.key(seed), sampling=GREEDY)[0]) for seed in (0, 1)]
  sampled = [run.predictions(rollout(agent, questions, jax.random.key(seed))[0]) for seed in (0, 1)]
  assert greedy[0] == greedy[1] and sampled[0] != sampled[1]


def test_random_numbers_are_a_function_of_the_key_and_the_number_of_a_tree(agent):
  questions = world.questions('test')[:3]
  trees, _ = rollout(agent, questions, jax.random.key(1))
  alone, _ = rollout(agent, questions[2:], jax.random.key(1), numbers=[2])
  drawn = [tree.rng.random() for tree in trees]
  assert len(set(drawn)) == 3 and alone[0].rng.random() == drawn[2]
  assert run.predictions(alone) == run.predictions(trees[2:])
  other, _ = rollout(agent, questions[:1], jax.random.key(2))
  assert other[0].rng.random() != drawn[0]


def test_watching_sees_every_reply_in_order_and_changes_nothing(agent):
  questions, seen = world.questions('test')[:3], []
  plain, _ = rollout(agent, questions, jax.random.key(3))
  watched, _ = rollout(agent, questions, jax.random.key(3),
                       observer=lambda tree, request, reply: seen.append(request))
  assert run.predictions(plain) == run.predictions(watched)
  assert seen.count(None) == 3  # the ends
  assert len(seen) - 3 == sum(len(tree.nodes(Role.POLICY)) + tree.metrics['searches'] for tree in watched)


def test_held_out_rows_are_the_same_whenever_they_are_made(agent, config):
  config.eval.update(number=4, temperatures=(1.0, 0.0))
  rows = [list(run.held_out(agent, config, step)) for step in (0, 7)]
  assert [row['temperature'] for row in rows[0]] == [1.0, 0.0]
  assert [row | {'step': 0} for row in rows[1]] == rows[0]


def test_held_out_rows_have_the_em_of_each_data_set(agent, config, monkeypatch):
  named = [dataclasses.replace(question, metadata=question.metadata | source) for question, source in zip(
    world.questions('test'), [{'source': 'nq'}] * 3 + [{'source': '2wiki'}] * 2 + [{}])]
  monkeypatch.setattr(run, 'read_held_out', lambda config: (named, {}))
  row = next(run.held_out(agent, config, 1))
  right = [record['em'] for record in row['samples']]
  assert sum(right) not in (0, 6)
  assert {name: value for name, value in row.items() if name.startswith('em_of_')} == {
    'em_of_nq': pytest.approx(sum(right[:3]) / 3), 'em_of_2wiki': pytest.approx(sum(right[3:5]) / 2)}
  assert row['em'] == pytest.approx(sum(right) / 6)


def test_eval_writes_scores_manifest_and_predictions(tmp_path, capsys):
  questions, corpus, out = tmp_path / 'q.jsonl', tmp_path / 'c.jsonl', tmp_path / 'deep' / 'r.json'
  questions.write_text(''.join(
    json.dumps({'id': q.id, 'question': q.question, 'golden_answers': list(q.golden_answers)}) + '\n'
    for q in world.questions('test')[:3]))
  corpus.write_text(''.join(
    json.dumps({'id': p.id, 'contents': f'"{p.title}"\n{p.text}'}) + '\n' for p in world.corpus()[:50]))
  assert cli.main(['eval', '--config=configs/quickstart.py', '--config.sampler.slots=8', f'--questions={questions}',
                   f'--corpus={corpus}', f'--out={out}', f'--checkpoint={world.folder()}']) == 0
  result = json.loads(out.read_text())
  assert {'em', 'f1', 'searches', 'n', 'manifest', 'predictions'} <= result.keys() and result['n'] == 3
  assert len(result['manifest']['files']['questions']['sha256']) == 64
  assert json.loads(capsys.readouterr().out)['n'] == 3


def test_ask_shows_the_search_and_the_answer(capsys):
  assert cli.main(['ask', '--config.sampler.slots=8', 'What', 'is the capital of Portugal?']) == 0
  assert capsys.readouterr().out.strip()


def test_export_needs_a_checkpoint(tmp_path, capsys):
  assert cli.main(['export', f'--checkpoint={tmp_path}', f'--out={tmp_path}/hf']) == 2
  assert 'no checkpoints here' in capsys.readouterr().err


def test_a_manifest_has_the_hash_of_every_file_in_a_name(config, tmp_path):
  first, second = tmp_path / 'a.json', tmp_path / 'b.json'
  first.write_text('1')
  second.write_text('2')
  hashes = lambda name: run.manifest(config, questions=name)['files']['questions']['sha256']
  joined = hashes(f'hotpotqa:{first}+{second}')
  assert len(joined) == 64 and hashes(str(first)) == hashes(f'gsm8k:{first}') != joined and hashes('world:test') is None
  second.write_text('3')
  assert hashes(f'hotpotqa:{first}+{second}') != joined
