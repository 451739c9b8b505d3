"""Benchmarks made of questions of the world, answered by its policy; figures against what the records say."""

import json
import re
import signal

import numpy as np
import pytest

from configs import quickstart
from jaxsearch import cli
from jaxsearch.commands import command
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation import bench, run
from jaxsearch.rewards.match import answer_found
from jaxsearch.training import row_files
from jaxsearch.world import files as world
from tests.data.test_tables import parquet, search_r1

SETTINGS = ['--config=quickstart', '--config.sampler.slots=8']


def write(path, questions):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps({'id': f'test_{i}', 'question': q.question, 'golden_answers': list(q.golden_answers)}) + '\n'
                          for i, q in enumerate(questions)))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """FlashRAG's layout, the flat one, and a corpus with three of four passages of the world."""
  made = tmp_path_factory.mktemp('data')
  write(made / 'nq' / 'test.jsonl', world.questions('test')[:4])
  write(made / 'qa' / 'hotpotqa.jsonl', world.questions('test')[4:10])
  (made / 'wiki_corpus.jsonl').write_text(''.join(
    json.dumps({'id': p.id, 'contents': f'"{p.title}"\n{p.text}'}) + '\n' for i, p in enumerate(world.corpus()) if i % 4))
  return made


@pytest.fixture(scope='module')
def result(folder, tmp_path_factory):
  out = tmp_path_factory.mktemp('whole') / 'r.json'
  assert cli.main(['bench', *SETTINGS, '--benchmarks=hotpotqa,nq', f'--folder={folder}', f'--out={out}']) == 0
  assert [file.name for file in out.parent.iterdir()] == ['r.json']
  return json.loads(out.read_text())


def test_the_contract(result):
  assert list(result['benchmarks']) == ['hotpotqa', 'nq'] and [one['n'] for one in result['benchmarks'].values()] == [6, 4]
  for one in result['benchmarks'].values():
    low, high = one['ci95']
    assert 0 <= low <= one['em'] <= high <= 1 and one['f1'] >= one['em']
    assert one['em_f1'] == pytest.approx((one['em'] + one['f1']) / 2)
    assert one['intervals']['em'] == one['ci95'] and bench.FIGURES.keys() <= one['intervals'].keys()
  for name in ('em', 'f1', 'tokens', 'seconds'):
    assert result['macro'][name] == pytest.approx(np.mean([one[name] for one in result['benchmarks'].values()]))
  assert result['macro']['n'] == 10 and result['macro']['benchmarks'] == 2


def test_scores_are_those_of_eval_and_of_the_records(folder, result, tmp_path):
  out = tmp_path / 'e.json'
  assert cli.main(['eval', *SETTINGS, f'--questions={folder}/qa/hotpotqa.jsonl', f'--corpus={folder}/wiki_corpus.jsonl',
                   f'--out={out}']) == 0
  own, other = result['benchmarks']['hotpotqa'], json.loads(out.read_text())
  assert (own['em'], own['f1'], own['searches']) == pytest.approx((other['em'], other['f1'], other['searches']))
  records = [record for record in result['predictions'] if record['benchmark'] == 'hotpotqa']
  assert [record['id'] for record in records] == [f'test_{i}' for i in range(6)]
  assert [record['prediction'] for record in records] == [record['prediction'] for record in other['predictions']]
  spans = [sum(span['role'] == 'policy' for span in record['spans']) for record in records]
  assert own['model_calls'] == pytest.approx(np.mean(spans)) and own['tokens'] == np.mean([one['tokens'] for one in records])
  assert own['answer_recall'] > 0 and own['answer_recall'] == pytest.approx(other['retrieval_recall'])
  assert all(record['seconds'] > 0 for record in records) and 'seconds' not in other['predictions'][0]


def test_the_share_of_answers_in_the_corpus(result):
  passages = [f'{p.title}\n{p.text}' for i, p in enumerate(world.corpus()) if i % 4]
  for name, own in result['benchmarks'].items():
    records = [record for record in result['predictions'] if record['benchmark'] == name]
    there = [any(answer_found(record['golden_answers'], text) for text in passages) for record in records]
    assert own['share_in_corpus'] == pytest.approx(np.mean(there))
    assert own['em_in_corpus'] == pytest.approx(np.mean([record['em'] for record, here in zip(records, there) if here]))


def test_the_manifest_says_what_scores_depend_on(folder, result):
  manifest = result['manifest']
  assert manifest['corpus']['name'] == f'{folder}/wiki_corpus.jsonl' and len(manifest['corpus']['sha256']) == 64
  assert manifest['index'] == {'backend': 'bm25', 'by_source': False, 'engine': 'rank_bm25'}
  assert (manifest['k'], manifest['turns'], manifest['searched']) == (quickstart.get_config().search.topk, 3, True)
  assert manifest['decoding'] == {'temperature': 0.0, 'top_p': 1.0, 'top_k': 0, 'samples': 1}
  questions = manifest['questions']
  assert {name: (own['split'], own['n']) for name, own in questions.items()} == {'nq': ('test', 4), 'hotpotqa': ('', 6)}
  assert len({own['golds'] for own in questions.values()}) == 2 and 'SQuAD' in manifest['metric']
  assert manifest['tokenizer']['size'] == 4096 and len(manifest['prompt']) == 64


def test_prompts_are_told_apart(tmp_path):
  config, found = quickstart.get_config(), []
  policy = run.load_policy(config)
  for template, turns in (('world', 3), ('search_r1', 3), ('world', 2)):
    config.grow.update(template=template, max_turns=turns)
    agent = run.open_agent(config, policy=policy)
    found.append(bench._prompt_digest(agent, config.grow))
  assert found[0] == found[2] != found[1]
  (tmp_path / 'thought.txt').write_text('One thought about {question}:')
  assert bench._prompt_digest(agent, config.grow) != bench._prompt_digest(agent, dict(config.grow) | {'prompts': str(tmp_path)})


def test_a_stopped_bench_resumes_to_the_same_answers(folder, result, tmp_path, monkeypatch, capsys):
  out, append, count = tmp_path / 'r.json', row_files.append, []

  def stop(path, rows):
    count.append(rows)
    if len(count) == 4:
      signal.raise_signal(signal.SIGTERM)
    append(path, rows)

  command = ['bench', *SETTINGS, '--benchmarks=hotpotqa,nq', f'--folder={folder}', f'--out={out}']
  with monkeypatch.context() as context:
    context.setattr(row_files, 'append', stop)
    with pytest.raises(SystemExit):
      cli.main(command)
  assert 'stopped after 3 of 10 questions; rerun the same command to resume' in capsys.readouterr().err
  assert cli.main(command) == 0 and 'has 3 answers' in capsys.readouterr().err
  bare = lambda found: [{key: value for key, value in record.items() if key != 'seconds'} for record in found['predictions']]
  assert bare(json.loads(out.read_text())) == bare(result)


def test_several_samples(folder, tmp_path):
  out = tmp_path / 'r.json'
  assert cli.main(['bench', *SETTINGS, '--benchmarks=nq', f'--folder={folder}', f'--out={out}', '--samples=3',
                   '--temperature=1.5', '--limit=3', '--config.eval.number=7']) == 0
  found = json.loads(out.read_text())
  assert found['manifest']['ignored'] == ['--config.eval.number, what counts is --limit']
  own, records = found['benchmarks']['nq'], found['predictions']
  assert (own['n'], len(records)) == (3, 9) and {record['sample'] for record in records} == {0, 1, 2}
  assert own['pass@1'] == pytest.approx(own['em']) and own['maj@1'] == pytest.approx(own['em']) and 'pass@4' not in own
  assert len({record['spans'][1]['text'] for record in records}) > 3  # samples of a question differ


def test_without_a_terminal_lines_say_how_long_it_takes(folder, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(command, 'LINE_SECONDS', 0.0)
  assert cli.main(['bench', *SETTINGS, '--benchmarks=nq', f'--folder={folder}', f'--out={tmp_path}/r.json', '--limit=2']) == 0
  assert re.search(r'jaxsearch: 1 of 2 questions\njaxsearch: 2 of 2 questions, 0 minutes left\n', capsys.readouterr().err)


def test_the_time_left_is_not_that_of_the_first_question(monkeypatch, capsys):
  seconds = {0: 0.0} | {done: 600.0 + 30 * done for done in range(1, 41)}  # compilation and the first question take 630 s
  monkeypatch.setattr(command, 'LINE_SECONDS', 0.0)
  monkeypatch.setattr(command.time, 'monotonic', lambda: now)
  now = 0.0
  with command.progress_of(40) as report:
    for done, now in seconds.items():
      report(done)
  said = capsys.readouterr().err.splitlines()
  assert said[:2] == ['jaxsearch: 1 of 40 questions', 'jaxsearch: 2 of 40 questions, 19 minutes left']
  assert said[-11] == 'jaxsearch: 30 of 40 questions, 5 minutes left'


def record(benchmark, name, em, searches=1, sample=0, golds=('a',)):
  return {'benchmark': benchmark, 'id': name, 'sample': sample, 'em': em, 'f1': em, 'em_f1': em, 'em_substring': em,
          'answer_retrieved': 0, 'searches': searches, 'model_calls': 1, 'tokens_generated': 5, 'prediction': 'a' if em else 'b',
          'golden_answers': list(golds)}


def test_means_are_over_questions_then_over_benchmarks():
  records = [record('nq', '1', 1.0), record('nq', '1', 0.0, sample=1), record('nq', '2', 1.0), record('nq', '2', 1.0, sample=1),
             *(record('popqa', str(i), 0.0) for i in range(20))]
  found = bench.figures(records)
  assert (found['benchmarks']['nq']['em'], found['benchmarks']['nq']['n'], found['macro']['em']) == (0.75, 2, 0.375)
  assert found['benchmarks']['nq']['pass@2'] == 1.0 and 'seconds' not in found['macro']
  assert found['hops'] == {'single-hop': found['macro']}
  found = bench.figures([*records, record('musique', '1', 1.0), record('gsm8k', '1', 0.0)])
  assert {kind: (of['em'], of['n'], of['benchmarks']) for kind, of in found['hops'].items()} == {
    'single-hop': (0.375, 22, 2), 'multi-hop': (1.0, 1, 1)} and found['macro']['em'] == (0.75 + 0 + 1 + 0) / 4


def test_needless_and_missing_searches():
  records = [record('nq', '1', 1.0, searches=2), record('nq', '2', 1.0, searches=0), record('nq', '3', 0.0, searches=0),
             record('nq', '4', 1.0, searches=1), record('nq', '5', 1.0, searches=1), record('nq', '6', 1.0, searches=0)]
  known = {('nq', name): float(name in '12') for name in '12345'}
  own = bench.figures(records, closed_book=known)['benchmarks']['nq']
  assert own['needless_searches'] == 1 / 2 and own['missing_searches'] == pytest.approx(1 / 3)
  assert own['em_closed_book'] == 2 / 5


def test_a_closed_book_result_never_searched(result, tmp_path):
  path = tmp_path / 'r.json'
  path.write_text(json.dumps(result))
  with pytest.raises(DataError, match='this agent searched'):
    bench.read_closed_book(path)
  path.write_text(json.dumps(result | {'manifest': result['manifest'] | {'searched': False}}))
  assert bench.read_closed_book(path)['nq', 'test_0'] == result['predictions'][6]['em']
  path.write_text('[]')
  with pytest.raises(DataError, match='not a result of jaxsearch bench'):
    bench.read_closed_book(path)


def test_golds_are_found_as_whole_words():
  golds = ['New York', 'York', 'the Moor', 'Ada', '1,234', 'a', 'Ada Moor lives', 'in Yor']
  documents = [Document('1', 'Ada Moor', 'lives in New-York.'), Document('2', 'x', 'the moor; 1,234 of them in New York')]
  expected = {gold for gold in golds if any(answer_found([gold], f'{d.title}\n{d.text}') for d in documents)}
  assert bench.found_in(golds, documents) == expected == {'New York', 'York', 'the Moor', 'Ada', '1,234', 'Ada Moor lives'}


def test_numbers_are_matched_as_numbers(tmp_path):
  (tmp_path / 'gsm8k').mkdir()
  (tmp_path / 'gsm8k' / 'test.jsonl').write_text('{"id": "test_0", "question": "6 times 12?", "golden_answers": ["72"]}')
  found = bench.load(quickstart.get_config(), 'gsm8k', str(tmp_path))
  assert found.questions[0].score('It is $72.00') == 1.0 and found.questions[0].metadata['source'] == 'gsm8k'
  assert bench.present(str(tmp_path)) == ['gsm8k']


def test_one_file_with_several_benchmarks(tmp_path):
  rows = [search_r1(source, 0, f'{source}?', ['A']) for source in ('nq', 'hotpotqa', '2wikimultihopqa')]
  parquet(tmp_path / 'test.parquet', rows)
  for name, asked in (('hotpotqa', 'hotpotqa?'), ('2wiki', '2wikimultihopqa?')):
    question, = bench.load(quickstart.get_config(), name, str(tmp_path)).questions
    assert question.question == asked
  with pytest.raises(DataError, match='no question of popqa in it, but of 2wikimultihopqa, hotpotqa, nq'):
    bench.load(quickstart.get_config(), 'popqa', str(tmp_path))


def test_the_world_is_a_benchmark_with_its_own_corpus(folder):
  config = quickstart.get_config()
  both = [bench.load(config, name, str(folder), 2) for name in ('world:test', 'nq')]
  assert bench.corpus_beside(config, both[:1], str(folder)) == ''
  assert bench.corpus_beside(config, both, str(folder)) == f'world+{folder}/wiki_corpus.jsonl'
  assert bench.corpus_beside(config, both[1:], str(folder / 'qa')).endswith('/wiki_corpus.jsonl')
  config.data.corpus = 'mine.jsonl'
  assert bench.corpus_beside(config, both[1:], str(folder)) == ''
