"""BrowseComp-Plus on a miniature in its formats; policy and judge are scripted, behind chat servers."""

import base64
import hashlib
import itertools
import json

import numpy as np
import pytest

from jaxsearch import cli
from jaxsearch.data import browsecomp_plus as published
from jaxsearch.data.benchmarks import read_questions
from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation.browsecomp_plus import summary as summary_of, verdict
from jaxsearch.evaluation.calibration import root_mean_square_error
from jaxsearch.rewards.match import matches
from tests.tools.serving import server

PASSWORD = 'miniature'
TEXTS = {'11': 'Zoë lives in Nordhavn.', '12': 'Nordhavn lies on the Sound.',
         '13': 'The mayor of Nordhavn is Bo.', '21': 'Kiel has a canal.',
         '22': 'The canal of Kiel was opened in 1895.', '31': 'Ships are old.',
         '32': 'Ships float.', '41': 'An opera house stands in Oslo.'}
ROWS = [('1', 'Who is mayor where Zoë lives?', 'Bo', ['11', '13']),
        ('2', 'When was the canal opened?', '1895', ['22']),
        ('3', 'What is older than ships?', 'rafts', ['31', '32']),
        ('4', 'Where does an opera stand?', 'Oslo', ['41'])]
STATED = 'Explanation: it says so [{}].\nExact Answer: {}\n{}'
SAID = [[('search', {'query': 'Zoë Nordhavn'}), ('open', {'document': 13})],
        STATED.format(13, 'Bo', 'Confidence: 80%'),
        [('search', {'query': ['canal', 'Kiel']})], STATED.format(21, '1900', 'Confidence: 30%'),
        [('search', {'query': 'ships'})], [('search', {'query': 'rafts'})],
        STATED.format(41, 'Oslo', '')]
JUDGED = ['**extracted_final_answer:** Bo\n**reasoning:** equal\n**correct:** yes\n**confidence:** 80%',
          'extracted_final_answer: 1900\nreasoning: another year\ncorrect: no\nconfidence: 30',
          'I cannot say.']


def encrypted(value):
  """What the authors' data holds in place of a text, a list or an object."""
  if isinstance(value, str):
    key = hashlib.sha256(PASSWORD.encode()).digest()
    return base64.b64encode(bytes(a ^ b for a, b in zip(value.encode(), itertools.cycle(key)))).decode()
  if isinstance(value, list):
    return list(map(encrypted, value))
  return {name: encrypted(each) for name, each in value.items()}


def row(number, query, answer, evidence):
  documents = lambda ids: [{'docid': one, 'text': TEXTS[one]} for one in ids]
  return {'query_id': number} | encrypted({
    'query': query, 'answer': answer, 'gold_docs': documents(evidence[-1:]),
    'evidence_docs': documents(evidence), 'negative_docs': documents(['32'])})


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setenv(published.KEY, PASSWORD)
  lines = lambda name, of: (tmp_path / name).write_text('\n'.join(map(json.dumps, of)))
  lines('browsecomp_plus.jsonl', [row(*each) for each in ROWS])
  lines('corpus.jsonl', [{'docid': name, 'text': text, 'url': 'http://x'} for name, text in TEXTS.items()])
  return tmp_path


@pytest.mark.parametrize('plain, secret', [
  ('Paris', 'EPcWvRE='),
  ('Zoë lives at 12 Long Street, Nordhavn', 'Gvmnf0Iqt/VjQZSw2RvTfqPgUTGt+Aqk0cUwPEQsK2Qy8gy1FCg=')])
def test_texts_are_decrypted(plain, secret):
  assert encrypted(plain) == secret and published.decrypt(secret, PASSWORD) == plain


def test_questions_have_their_evidence_encrypted_or_not(folder, monkeypatch):
  path = folder / 'browsecomp_plus.jsonl'
  questions = read_questions('browsecomp_plus', path)
  assert [(one.id, one.question, *one.golden_answers, one.metadata['evidence']) for one in questions] == ROWS
  (folder / 'plain.jsonl').write_text('\n'.join(json.dumps({
    'query_id': number, 'query': query, 'answer': answer,
    'evidence_docs': [{'docid': one} for one in evidence]})
    for number, query, answer, evidence in ROWS))
  assert read_questions('browsecomp_plus', folder / 'plain.jsonl') == questions
  pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  parquet.write_table(pyarrow.Table.from_pylist([row(*each) for each in ROWS]), folder / 'q.parquet')
  assert read_questions('browsecomp_plus', folder / 'q.parquet') == questions
  (folder / 'qrel_evidence.txt').write_text('1 Q0 12 1\n1 Q0 13 1\n')
  changed = read_questions('browsecomp_plus', path)
  assert [one.metadata['evidence'] for one in changed] == [['12', '13'], *(each[3] for each in ROWS[1:])]
  (folder / 'qrel_evidence.txt').write_text('1 Q0 12 1\n\n1 12 1\n')
  with pytest.raises(DataError, match="qrel_evidence.txt:3: not a line 'id Q0 docid 1': '1 12 1'"):
    read_questions('browsecomp_plus', path)
  (folder / 'qrel_evidence.txt').unlink()
  monkeypatch.setenv(published.KEY, 'another')
  with pytest.raises(DataError, match=f'browsecomp_plus.jsonl:1: .*{published.KEY} is not the password'):
    read_questions('browsecomp_plus', path)
  monkeypatch.setenv(published.KEY, '')
  with pytest.raises(DataError, match=f'browsecomp_plus.jsonl:1: .*encrypted: set {published.KEY}'):
    read_questions('browsecomp_plus', path)


def reply(said):
  message = {'content': said} if isinstance(said, str) else {'content': None, 'tool_calls': [
    {'id': 'x', 'type': 'function', 'function': {'name': name, 'arguments': json.dumps(arguments)}}
    for name, arguments in said]}
  return 200, {'choices': [{'message': message, 'finish_reason': 'stop'}]}


def test_bench_answers_judges_and_writes_run_files(folder, capsys):
  assert cli.main(['index', '--corpus', f'{folder}/corpus.jsonl', '--out', f'{folder}/index']) == 0
  arguments = ['bench', '--config=browsecomp_plus', '--config.model=world-tiny', f'--folder={folder}',
               '--benchmarks=browsecomp_plus', f'--config.search.index={folder}/index', '--model=mini',
               f'--out={folder}/out.json', f'--runs={folder}/runs', '--config.search.topk=2',
               '--config.sampler.slots=1', '--config.grow.max_turns=1']
  replies = [reply(JUDGED[0]), (400, {}), reply(JUDGED[2]), reply(JUDGED[1])]
  with server(*map(reply, SAID)) as (policy, sent), server(*replies) as (judge, asked):
    arguments += [f'--url={policy}', f'--config.judge.url={judge}', '--config.judge.model=grader',
                  '--config.judge.concurrency=1']
    assert cli.main(arguments) == 3 and 'chat at' in capsys.readouterr().err  # the judge failed once
    assert cli.main(arguments) == 0
    assert len(asked) == 4 and 'Right answer: Bo' in asked[0][2]['messages'][0]['content']
  capsys.readouterr()
  first, *turns = sent[1][2]['messages']
  assert first['role'] == 'user' and [tool['function']['name'] for tool in sent[1][2]['tools']] == ['search', 'open']
  assert [turn['role'] for turn in turns] == ['assistant', 'tool', 'tool']
  assert [call['id'] for call in turns[0]['tool_calls']] == [turn['tool_call_id'] for turn in turns[1:]]
  assert turns[2]['content'] == '13, lines 1 to 1 of 1\nThe mayor of Nordhavn is Bo.'
  result = json.loads((folder / 'out.json').read_text())
  figures, summary = result['benchmarks']['browsecomp_plus'], result['browsecomp_plus']
  assert not any('judge' in line for line in result['manifest']['ignored'])
  # Searches found 11 and 12 or 13; 21 and 22; 31 and 32; the last asked for nothing.
  recalls = [record['evidence_recall'] for record in result['predictions']]
  assert recalls[1:] == [1.0, 1.0, 0.0] and recalls[0] >= 0.5
  assert figures['evidence_recall'] == np.mean(recalls) and figures['judged'] == 0.25
  assert figures['em'] == 0.5  # the judge's reply to the last could not be read
  assert summary['Accuracy (%)'] == 25.0 and summary['Recall (%)'] == 100 * np.mean(recalls)
  assert summary['avg_tool_stats'] == {'search': 1.0, 'open': 0.25} and summary['Calibration Error (%)'] == 0.0
  assert summary['LLM'] == 'mini'
  assert [one['correct'] for one in summary['per_query_metrics']] == [True, False, False, False]
  runs = [json.loads((folder / f'runs/run_{number}_0.json').read_text()) for number in '1234']
  assert [run['status'] == 'completed' for run in runs] == [True, True, False, True]
  assert runs[1]['retrieved_docids'] == ['21', '22'] and runs[1]['tool_call_counts'] == {'search': 2}
  types = [[one['type'] for one in run['result']] for run in runs]
  assert types[0] == ['reasoning', 'tool_call', 'tool_call', 'reasoning', 'output_text']
  assert types[2][-1] == 'reasoning' and runs[0]['result'][2]['output'].startswith('13, lines 1 to 1 of 1\n')
  hits = json.loads(runs[1]['result'][1]['output'])
  assert {hit['docid']: hit['snippet'] for hit in hits} == {name: TEXTS[name] for name in ('21', '22')}
  assert runs[0]['result'][-1]['output'].splitlines()[1:] == ['Exact Answer: Bo', 'Confidence: 80%']


def test_retrieval_alone_is_scored_without_a_judge(folder, capsys):
  """A baseline: the question as the query, BM25, the shipped policy."""
  arguments = ['bench', '--config=prompted/rag', '--benchmarks=browsecomp_plus', f'--folder={folder}',
               f'--out={folder}/rag.json', '--config.search.topk=2']
  assert cli.main(arguments) == 0
  capsys.readouterr()
  result = json.loads((folder / 'rag.json').read_text())
  assert result['manifest']['corpus']['name'] == f'{folder}/corpus.jsonl'
  assert result['browsecomp_plus'].keys().isdisjoint({'Accuracy (%)', 'Calibration Error (%)'})
  recalls = [one['recall'] for one in result['browsecomp_plus']['per_query_metrics']]
  assert recalls[1:] == [100.0, 50.0, 100.0]  # 'is' is rarer than 'ships'


@pytest.mark.parametrize('text, judged, confidence', [
  ('**correct**: Yes\n**confidence**: 250%', 1.0, 100.0), ('correct: no\nconfidence: 12.5', 0.0, 12.5),
  ('[correct_answer]: yes\nreasoning: x', 0.0, None), ('correct: yes', 1.0, None)])
def test_a_verdict_is_read_bold_or_not(text, judged, confidence):
  read = verdict(text)
  assert (read['judged'], read['confidence']) == (judged, confidence)


def test_the_calibration_error_is_theirs_and_the_whole_one():
  """100 answers of 20 %, 40 right, and 150 of 80 %, 90 right: sqrt(0.4 * 0.2^2 + 0.6 * 0.2^2) = 0.2."""
  said = [0.2] * 100 + [0.8] * 150
  right = [1.0] * 40 + [0.0] * 60 + [1.0] * 90 + [0.0] * 60
  mixed = np.random.default_rng(0).permutation(250)
  order = np.array(said)[mixed], np.array(right)[mixed]
  assert root_mean_square_error(*order) == pytest.approx(0.2)
  assert root_mean_square_error(*order, last=False) == pytest.approx(0.1265, abs=1e-4)
  assert root_mean_square_error(said[:99], right[:99]) == 0.0
  assert root_mean_square_error(said[:100], right[:100], last=False) == 0.0


@pytest.mark.parametrize('response, right', [
  ('Explanation: x [1].\n**Exact Answer:** Paris\nConfidence: 9%', 1),
  ('Exact Answer: Lyon\nExact answer: Paris', 1), ('Paris', 1), ('Explanation: Paris', 0),
  ('Exact Answer: Lyon\nParis', 0), (None, 0)])
def test_a_stated_answer_is_matched(response, right):
  assert matches(response, ['Paris'], 'stated') == right


def test_a_summary_has_their_calibration_error_and_the_whole_one():
  said = [(20, number < 40) for number in range(100)] + [(80, number < 90) for number in range(150)]
  found = summary_of([{
    'id': str(number), 'stop': 'answered', 'prediction': 'x', 'spans': [], 'retrieved': [], 'evidence_recall': 1.0,
    'confidence': confidence, 'judged': float(right)} for number, (confidence, right) in enumerate(said)])
  assert [found[f'Calibration Error{more} (%)'] for more in ('', ' with the last bin')] == [12.65, 20.0]
