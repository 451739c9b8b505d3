"""Two result files compared by a judge: the pairs, the figures, and the command with both kinds of judge."""

import json

import pytest

from jaxsearch import cli
from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation import judge_pairs
from jaxsearch.evaluation.results import read_predictions
from jaxsearch.rewards.trajectory_judge import NEUTRAL, RUBRICS, TrajectoryPair
from jaxsearch.tools.chat import ChatError
from tests.rewards.test_trajectory_judge import shown, verdict
from tests.tools.serving import server
from tests.training import child


def prediction(name, *texts, question=None, source=''):
  spans = [{'role': 'prompt', 'text': 'the prompt'}, *({'role': 'policy', 'text': text} for text in texts)]
  return {'id': name, 'source': source, 'question': question or f'Question {name}?', 'golden_answers': ['x'],
          'spans': spans}


def by_words(prompts):
  """A judge that gives each trajectory as many points as it has times the word good, and 1 for coherence."""
  count = lambda prompt, place: min(2, shown(prompt, place).count('good'))
  points = [[count(prompt, place) for place in ('first', 'second')] for prompt in prompts]
  return [verdict(first, second, {'coherence': 1}, {'coherence': 1}) for first, second in points]


@pytest.fixture
def files(tmp_path):
  """Good words of a: 2, 1, 0; of b: 0, 1, 1. Each file has a question of its own."""
  for name, goods in (('a', {'1': 2, '2': 1, '3': 0}), ('b', {'3': 1, '2': 1, '1': 0})):
    predictions = [prediction(name)]
    predictions += [prediction(question, *['good'] * n, 'end') for question, n in goods.items()]
    (tmp_path / f'{name}.json').write_text(json.dumps({'em': 0.5, 'predictions': predictions}))
  return str(tmp_path / 'a.json'), str(tmp_path / 'b.json')


@pytest.fixture
def pairs(files):
  return judge_pairs.pair_up(*map(read_predictions, files))


def test_predictions_are_paired_by_the_id_of_their_question(pairs):
  assert list(pairs) == ['1', '2', '3']
  spans = lambda *texts: (('prompt', 'the prompt'), *(('policy', text) for text in texts))
  assert pairs['1'] == TrajectoryPair('Question 1?', spans('good', 'good', 'end'), spans('end'))
  one = [prediction('1')]
  for other, message in (([prediction('2')], 'no question in common'), ([*one, *one], 'several predictions'),
                         ([prediction('1', question='Other?')], "different questions: '1' is 'Question")):
    with pytest.raises(DataError, match=message):
      judge_pairs.pair_up(one, other)


def test_means_and_counts(pairs):
  figures, records = judge_pairs.judge(by_words, pairs, lambda done: None)
  assert figures['density'] == pytest.approx({'a': 1, 'b': 2 / 3, 'win': 1, 'tie': 1, 'loss': 1})
  assert figures['coherence'] == {'a': 1, 'b': 1, 'win': 0, 'tie': 3, 'loss': 0}
  assert figures['overall'] == pytest.approx({
    'a': (5 * 3 / 3 + 1) / 6, 'b': (5 * 2 / 3 + 1) / 6, 'win': 1, 'tie': 1, 'loss': 1})
  assert figures.items() >= dict(unreadable=0, failed=0, neutral=0, n=3).items() and 'average' not in figures
  found = [(record['id'], record['a']['density'], record['b']['density'], record['winner'])
           for record in records]
  assert found == [('1', 2, 0, 'a'), ('2', 1, 1, 'tie'), ('3', 0, 1, 'b')]


def test_counts_are_given_for_each_data_set_and_on_average():
  """Table 9: two pairs of nq, one of hotpotqa; `a` has the better rubrics, but loses one of nq by its
  outcome."""
  sources = {'1': 'nq', '2': 'nq', '3': 'hotpotqa'}
  swap = {'first': 'second', 'second': 'first', 'tie': 'tie'}
  a = [prediction(name, 'good', 'good', source=source) for name, source in sources.items()]
  b = [prediction(name, 'good' if name == '2' else 'end', source=source) for name, source in sources.items()]

  def ask(prompts):
    replies = list(map(json.loads, by_words(prompts)))
    return [json.dumps(reply | {'winner': swap[reply['winner']]} if 'Question 2?' in prompt else reply)
            for prompt, reply in zip(prompts, replies)]

  figures, _ = judge_pairs.judge(ask, judge_pairs.pair_up(a, b), lambda done: None)
  counts = lambda of: (of['win'], of['tie'], of['loss'])
  nq, hotpotqa = (figures['datasets'][name] for name in ('nq', 'hotpotqa'))
  assert counts(nq['density']) == (2, 0, 0) and counts(nq['overall']) == (1, 0, 1)
  assert counts(hotpotqa['density']) == (1, 0, 0) and counts(hotpotqa['coherence']) == (0, 1, 0)
  assert figures['average']['density'] == {'win': 1.5, 'tie': 0, 'loss': 0}
  assert figures['average']['overall'] == {'win': 1, 'tie': 0, 'loss': 0.5}
  assert counts(figures['overall']) == (2, 0, 1) and list(nq) == ['overall', *RUBRICS]


def test_replies_that_are_unreadable_or_missing_are_neutral_and_counted(pairs):
  def ask(prompts):
    first, *rest = by_words(prompts)
    return [first, 'The first, clearly.', *rest[1:3], *[ChatError('http://a', 'refused')] * 2]

  figures, records = judge_pairs.judge(ask, pairs, lambda done: None)
  assert (figures['unreadable'], figures['failed'], figures['neutral'], figures['n']) == (1, 2, 2, 3)
  assert [record['neutral'] for record in records] == [True, False, True]
  assert records[0]['a'] == records[0]['b'] == records[2]['a'] == NEUTRAL and figures['overall']['tie'] == 3
  assert records[0]['replies'][1] == 'The first, clearly.' and records[2]['replies'] == [None, None]


def test_a_judge_that_is_not_there_is_told_at_once(pairs):
  asked, done = [], []
  errors = [ChatError('http://a', f'refused {i}') for i in range(32)]
  fail = lambda prompts: asked.append(prompts) or errors[:len(prompts)]
  many = {str(i): pair for i, pair in enumerate(list(pairs.values()) * 20)}
  with pytest.raises(ChatError, match='refused 0'):
    judge_pairs.judge(fail, many, lambda done: None)
  assert len(asked) == 1
  later = lambda prompts: by_words(prompts) if not done else fail(prompts)
  figures, _ = judge_pairs.judge(later, many, done.append)
  assert done == [16, 32, 48, 60] and figures['failed'] == 2 * 44 and figures['neutral'] == 44


def test_judge_with_a_chat_server(files, tmp_path, capsys):
  flags = ['judge', f'--a={files[0]}', f'--b={files[1]}', '--config.judge.kind=chat',
           '--config.judge.model=m']
  with server((200, {'choices': [{'message': {'content': verdict(2, 0)}}]})) as (url, seen):
    assert cli.main([*flags, f'--config.judge.url={url}/v1', f'--out={tmp_path}/out/f.json']) == 0
  out = capsys.readouterr().out
  printed, written = json.loads(out), json.loads((tmp_path / 'out' / 'f.json').read_text())
  assert out.count('\n') == 1 and len(seen) == 6 and all(body['model'] == 'm' for _, _, body in seen)
  assert printed == {key: value for key, value in written.items() if key not in ('manifest', 'comparisons')}
  assert printed['overall'] == {'a': 1, 'b': 1, 'win': 0, 'tie': 3, 'loss': 0}  # a judge that likes a place
  assert (printed['n'], printed['only_a'], printed['only_b']) == (3, 1, 1)
  assert len(written['comparisons']) == 3 and written['manifest']['config']['judge']['kind'] == 'chat'
  assert all(len(written['manifest']['files'][name]['sha256']) == 64 for name in 'ab')


def test_judge_with_a_model_of_ours(files, tmp_path, capsys):
  """A random one, which says nothing that can be read."""
  child.make_inputs(tmp_path)
  judge = dict(kind='local', chat=False, model=tmp_path / 'model', slots=4, length=1024, max_tokens=8)
  settings = [f'--config.judge.{name}={value}' for name, value in judge.items()]
  assert cli.main(['judge', f'--a={files[0]}', f'--b={files[1]}', *settings]) == 0
  printed = json.loads(capsys.readouterr().out)
  assert (printed['unreadable'], printed['failed'], printed['neutral'], printed['n']) == (6, 0, 3, 3)
