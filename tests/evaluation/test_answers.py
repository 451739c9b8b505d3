"""The shipped policy answers questions of the world: the records, and what eval and bench make of them."""

import dataclasses
import json
import re
import types

import jax
import numpy as np
import pytest

from configs import quickstart
from jaxsearch import cli
from jaxsearch.commands import command
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import agents, answers, figures
from jaxsearch.evaluation.figures import record_of
from jaxsearch.parallel import mesh as meshes
from jaxsearch.rewards.match import answer_found, exact_match
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import Ask, Search
from jaxsearch.training import row_files
from jaxsearch.trees.tree import Tree
from jaxsearch.world import files as world
from tests.methods.driving import Letters

SETTINGS = ['--config=quickstart', '--config.sampler.slots=8']
MEASURED = figures.FIGURES.keys() - set(figures.FOLDS)  # of trees that nothing was folded in


def test_each_record_says_what_was_paid_since_the_one_before(monkeypatch):
  search = types.SimpleNamespace(paid=5, price=0.5)

  def grown(agent, questions, key, *, observer, on_progress, **_):
    for question in questions:
      tree, search.paid = Tree(Letters(), question), search.paid + 2
      tree.metrics = {'searches': 1}
      observer(tree, None, {'requests': 1})
      on_progress(1, 3, {})

  monkeypatch.setattr(answers, 'rollout', grown)
  kept, agent = answers.Kept(None, {}, 3), types.SimpleNamespace(tools=types.SimpleNamespace(search=search))
  asked = [Question(str(n), '?', ('a',)) for n in range(3)]
  answers.answer(agent, asked, None, kept, sampling=None, on_progress=lambda *_: None)
  assert [record['searches_paid'] for record in kept.all()] == [2, 2, 2]


def test_what_changes_no_answer_is_no_other_evaluation():
  config = lambda **changes: {'config': {'seed': 0, 'progress': True, 'judge': {'url': 'http://a', 'model': 'm'},
                                         'eval': {'questions': 'q'}} | changes}
  same = config(progress=False, judge={'url': 'http://b', 'model': 'm'})
  assert answers._differing(config(), same) == ''
  for other, name in ((config(judge={'url': 'http://a', 'model': 'n'}), 'judge.model'),
                      (config(eval={'questions': 'r'}), 'eval.questions'), (config(seed=1), 'seed')):
    assert answers._differing(config(), other).startswith(f'config.{name} was ')


@pytest.fixture(scope='module')
def config():
  config = quickstart.get_config()
  config.sampler.slots = 8
  return config


@pytest.fixture(scope='module')
def agent(config):
  return agents.open_agent(config)


@pytest.fixture(scope='module')
def answered(agent):
  return rollout(agent, world.questions('test')[:12], jax.random.key(0))[0]


def test_a_record_holds_every_token_and_the_figures_of_its_tree(answered):
  records = list(map(record_of, answered))
  for tree, record in zip(answered, records):
    text = ''.join(span['text'] for span in record['spans'])
    assert text == tree.tokenizer.decode([token for node in tree.walk() for token in node.tokens])
    assert record['spans'][0]['role'] == 'prompt'
  assert json.loads(json.dumps(records)) == records
  means = figures.means(records)
  right = [exact_match(tree.answer, tree.question.golden_answers) for tree in answered]
  assert means['n'] == 12 and means['em'] == pytest.approx(sum(right) / 12) and means['f1'] >= means['em']
  assert means['searches'] == pytest.approx(np.mean([tree.metrics['searches'] for tree in answered]))


def test_all_devices_of_a_host_answer_as_one_does(monkeypatch, config, agent, answered):
  monkeypatch.setattr(meshes, 'of_host', meshes.of_host.__wrapped__)
  together = agents.open_agent(config)
  assert (agent.engine.lanes, together.engine.lanes) == (1, 4)
  trees, _ = rollout(together, world.questions('test')[:12], jax.random.key(0))
  assert list(map(record_of, trees)) == list(map(record_of, answered))


@pytest.mark.parametrize('evidence', [['Bonn is in Germany.'], [['Bonn', 'country', 'Germany']], [{'url': 'x'}]])
def test_evidence_of_another_data_set_is_not_that_of_browsecomp_plus(evidence):
  tree, watch = Tree(Letters(), Question('1', 'Where?', ('Bonn',), {'evidence': evidence})), answers.Watch()
  tree.metrics = {'searches': 1}
  watch(tree, Search(tree.root, 'where'), [Document('1', '', 'In Bonn.')])
  watch(tree, None, {'requests': 1})
  assert not watch.record(tree).keys() & {'evidence', 'evidence_recall'} and 'calls' not in tree.root.data


def test_a_record_says_whether_a_tool_returned_a_gold_answer():
  watch, records = answers.Watch(), []
  for number, (gold, texts) in enumerate((('Paris', ['Lyon', 'In Paris.']), ('Rome', []), ('Rome', ['Roman']),
                                          ('red blue', ['red', 'blue']), ('Oslo', ['Oslo']))):
    tree = Tree(Letters(), Question(str(number), 'Where?', (gold,), {'source': 'nq'} if number else {}))
    tree.metrics = {'searches': len(texts)}
    for text in texts:
      watch(tree, Search(tree.root, 'where'), [Document('1', '', text)])
    watch(tree, Ask('reader', 'where'), 'Rome')  # another model's words are not retrieved
    watch(tree, None, {'requests': 3, 'tokens_decoded': 7, 'tool_calls': len(texts), 'seconds': 1.0})
    records.append(watch.record(tree))
  assert [record['answer_recall'] for record in records] == [1, 0, 0, 0, 1] and len(watch.ended) == 5
  assert figures.means(records)['searches'] == 6 / 5 and records[0]['tool_calls'] == 2
  assert records[0]['tokens'] == 7 and records[0]['model_calls'] == 3 and 'seconds' not in records[0]
  assert [record['source'] for record in records[:2]] == ['', 'nq']


def test_held_out_rows_are_the_same_whenever_they_are_made(agent, config, monkeypatch):
  sources = [{'source': 'nq'}] * 3 + [{'source': '2wiki'}] * 2 + [{}]
  questions = [dataclasses.replace(question, metadata=question.metadata | source)
               for question, source in zip(world.questions('test'), sources)]
  monkeypatch.setattr(answers, 'read_held_out', lambda config: (questions, {}))
  config.eval.temperatures = (1.0, 0.0)
  rows = [list(answers.held_out(agent, config, step)) for step in (0, 7)]
  assert [row['temperature'] for row in rows[0]] == [1.0, 0.0]
  assert [row | {'step': 0} for row in rows[1]] == rows[0]
  right = [record['em'] for record in rows[0][0]['samples']]
  assert sum(right) not in (0, 6) and rows[0][0]['em'] == pytest.approx(sum(right) / 6)
  assert {name: value for name, value in rows[0][0].items() if name.startswith('em_of_')} == {
    'em_of_nq': pytest.approx(sum(right[:3]) / 3), 'em_of_2wiki': pytest.approx(sum(right[3:5]) / 2)}


# The commands.


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """FlashRAG's layout, the flat one, and a corpus with three of four passages of the world."""
  made = tmp_path_factory.mktemp('data')
  asked = world.questions('test')
  for path, questions in (('nq/test', asked[:4]), ('qa/hotpotqa', asked[4:10])):
    (made / path).parent.mkdir()
    row_files.write(made / f'{path}.jsonl', [
      {'id': f'test_{i}', 'question': one.question, 'golden_answers': list(one.golden_answers)}
      for i, one in enumerate(questions)])
  row_files.write(made / 'wiki_corpus.jsonl', [
    {'id': p.id, 'contents': f'"{p.title}"\n{p.text}'} for i, p in enumerate(world.corpus()) if i % 4])
  return made


@pytest.fixture(scope='module')
def result(folder, tmp_path_factory):
  out = tmp_path_factory.mktemp('whole') / 'r.json'
  assert cli.main(['bench', *SETTINGS, '--benchmarks=hotpotqa,nq', f'--folder={folder}', f'--out={out}']) == 0
  assert [file.name for file in out.parent.iterdir()] == ['r.json']
  return json.loads(out.read_text())


def test_bench_writes_figures_with_intervals(result):
  benchmarks = result['benchmarks']
  assert list(benchmarks) == ['hotpotqa', 'nq'] and [one['n'] for one in benchmarks.values()] == [6, 4]
  for one in benchmarks.values():
    low, high = one['ci95']
    assert 0 <= low <= one['em'] <= high <= 1 and one['f1'] >= one['em']
    assert one['em_f1'] == pytest.approx((one['em'] + one['f1']) / 2)
    assert one['intervals']['em'] == one['ci95'] and one['intervals'].keys() >= MEASURED
  for name in ('em', 'f1', 'tokens', 'seconds'):
    assert result['macro'][name] == pytest.approx(np.mean([one[name] for one in benchmarks.values()]))
  assert result['macro']['n'] == 10 and result['macro']['benchmarks'] == 2
  passages = [f'{p.title}\n{p.text}' for i, p in enumerate(world.corpus()) if i % 4]
  for name, one in benchmarks.items():
    records = [record for record in result['predictions'] if record['benchmark'] == name]
    there = [any(answer_found(record['golden_answers'], text) for text in passages) for record in records]
    assert one['share_in_corpus'] == pytest.approx(np.mean(there))
    right = [record['em'] for record, here in zip(records, there) if here]
    assert one['em_in_corpus'] == pytest.approx(np.mean(right))


def test_eval_is_bench_with_one_set(folder, result, tmp_path, capsys):
  out, questions = tmp_path / 'deep' / 'e.json', f'{folder}/qa/hotpotqa.jsonl'
  assert cli.main(['eval', *SETTINGS, f'--questions={questions}', f'--corpus={folder}/wiki_corpus.jsonl',
                   f'--out={out}', f'--checkpoint={world.folder()}']) == 0
  bench, single = result['benchmarks']['hotpotqa'], json.loads(out.read_text())
  assert {'em', 'f1', 'searches', 'n', 'manifest', 'predictions'} <= single.keys()
  assert json.loads(capsys.readouterr().out)['n'] == single['n'] == 6
  shared = MEASURED - {'seconds'}
  assert [single[name] for name in shared] == pytest.approx([bench[name] for name in shared])
  records = [record for record in result['predictions'] if record['benchmark'] == 'hotpotqa']
  timed = ('seconds', 'benchmark', 'sample')
  assert single['predictions'] == [
    {name: value for name, value in record.items() if name not in timed} | {'source': ''}
    for record in records]
  assert [record['id'] for record in records] == [f'test_{i}' for i in range(6)]
  spans = [sum(span['role'] == 'policy' for span in record['spans']) for record in records]
  assert bench['model_calls'] == pytest.approx(np.mean(spans)) and bench['answer_recall'] > 0
  assert all(record['seconds'] > 0 for record in records)
  ours, theirs = single['manifest'], result['manifest']
  assert ours['questions'][questions]['golds'] == theirs['questions']['hotpotqa']['golds']
  assert len(ours['files']['questions']['sha256']) == 64
  for name in ('corpus', 'index', 'k', 'turns', 'prompt', 'decoding', 'tokenizer', 'metric'):
    assert ours[name] == theirs[name], name


def test_the_manifest_says_what_scores_depend_on(folder, result):
  manifest = result['manifest']
  corpus = manifest['corpus']
  assert corpus['name'] == f'{folder}/wiki_corpus.jsonl' and len(corpus['sha256']) == 64
  assert manifest['index']['engine'] == 'rank_bm25'
  topk = quickstart.get_config().search.topk
  assert (manifest['k'], manifest['turns'], manifest['searched']) == (topk, 3, True)
  assert manifest['decoding'] == {'temperature': 0.0, 'top_p': 1.0, 'top_k': 0, 'samples': 1}
  questions = manifest['questions']
  assert {name: (own['split'], own['n']) for name, own in questions.items()} == {
    'nq': ('test', 4), 'hotpotqa': ('', 6)}
  assert len({own['golds'] for own in questions.values()}) == 2 and 'SQuAD' in manifest['metric']
  assert manifest['tokenizer']['size'] == 4096 and len(manifest['prompt']) == 64


def test_several_samples_and_lines_that_say_how_long_they_take(folder, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(command, 'LINE_SECONDS', 0.0)
  out = tmp_path / 'r.json'
  assert cli.main(['bench', *SETTINGS, '--benchmarks=nq', f'--folder={folder}', f'--out={out}', '--samples=3',
                   '--temperature=1.5', '--limit=2', '--config.eval.number=7']) == 0
  assert re.search(r'jaxsearch: 1 of 6 questions\n.*jaxsearch: 6 of 6 questions, 0 minutes left\n',
                   capsys.readouterr().err, re.DOTALL)
  found = json.loads(out.read_text())
  assert found['manifest']['ignored'] == ['--config.eval.number has no effect on an evaluation']
  own, records = found['benchmarks']['nq'], found['predictions']
  assert (own['n'], len(records)) == (2, 6) and [record['sample'] for record in records] == [0, 1, 2] * 2
  assert own['pass@1'] == pytest.approx(own['em']) == own['maj@1'] and 'pass@4' not in own
  assert len({record['spans'][1]['text'] for record in records}) > 2  # samples of a question differ
