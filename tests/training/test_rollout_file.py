"""The file of rollouts: what a record holds, what is noted of tools and judges, which questions are kept, cuts."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards import judge
from jaxsearch.sampler.requests import Ask, Generate, Score, Search, ToolFailure
from jaxsearch.training import loop, rollout_file, row_files, run_folder
from jaxsearch.trees.tree import Role, Stop, Tree
from jaxsearch.world import files as world
from tests.methods.driving import FOUND, QUESTION, Letters


def grown(question='Which?', reward=1.0, tokenizer=None, text='so 🙂 é'):
  """A tree of a prompt, a span with all there is, a tool's reply and an alternative."""
  tree = Tree(tokenizer or Tokenizer.load(world.folder()), Question(question, question, ('é',)))
  prompt = tree.root.append(question, Role.PROMPT)
  ids = tree.tokenizer.encode(text)
  node = prompt.append(ids, Role.POLICY, sampler_logprobs=[-0.123456] * len(ids))
  node.advantages, node.stop, node.values = 0.5, 'end', np.linspace(0, 1, len(ids), dtype=np.float32)
  node.data.update(reward=np.float32(0.25), meta=True, code='text')
  node.data['calls'] = [{'tool': 'search', 'query': 'q', 'failure': 'down', 'fault': 'server'}]
  last = node.append('reply', Role.OBSERVATION).append(ids, Role.POLICY, sampler_logprobs=[0.0] * len(ids))
  last.advantages = np.ones(len(ids))
  prompt.append(ids, Role.POLICY).advantages = float('nan')
  tree.answer, tree.stop, tree.reward = 'é', Stop.ANSWERED, reward
  return tree


def test_a_record_has_tokens_credit_and_calls_as_plain_json():
  tree = grown()
  record = json.loads(json.dumps(rollout_file.record(tree, 7), allow_nan=False))
  assert [record[name] for name in ('step', 'em', 'reward', 'stop', 'golden_answers')] == [7, 1, 1, 'answered', ['é']]
  prompt, first, reply, second, other = record['spans']
  nodes = [node for node in tree.walk() if node.tokens]
  assert [span['ids'] for span in record['spans']] == [node.tokens for node in nodes]
  assert first['sampler_logprobs'] == [-0.1235] * len(nodes[1].tokens) and first['advantages'] == 0.5 and first['trained']
  assert first['values'][0] == 0 and first['values'][-1] == 1
  assert first['notes'] == {'reward': 0.25, 'meta': 1} and 'notes' not in second
  assert first['stop'] == 'end' and first['calls'][0]['fault'] == 'server'
  assert second['advantages'] == [1] * len(second['ids']) and not reply['trained'] and 'sampler_logprobs' not in reply
  assert other['advantages'] is None and other['parent'] == 0 and record['tokens'] == 2 * len(first['ids'])


@pytest.mark.parametrize('text', ['so 🙂 é\n ü', '漢字 🙂🙂'])
def test_the_lengths_of_tokens_are_what_a_browser_counts(text):
  span = rollout_file.record(grown(text=text), 1)['spans'][1]
  tokenizer, units, at = Tokenizer.load(world.folder()), text.encode('utf-16-le'), 0
  assert span['text'] == text and 2 * sum(span['lengths']) == len(units)
  for token, length in zip(span['ids'], span['lengths'], strict=True):
    piece = tokenizer.decode([token])
    if '\ufffd' not in piece:  # a token of whole letters
      assert units[2 * at:2 * (at + length)].decode('utf-16-le') == piece
    at += length
  assert 'lengths' not in rollout_file.record(grown(tokenizer=Letters()), 1)['spans'][0]  # no bytes for tokens


def asked_for(grow, replies):
  """The calls noted on the spans of a tree that `grow` grows while it gets these replies."""
  tree = Tree(Letters(), QUESTION)
  growth, replies = grow(QUESTION, tree), list(replies)
  request = next(growth)
  while True:
    reply = replies.pop(0)
    if callable(reply):
      reply = reply(request)
    for asked, one in zip(request, reply) if isinstance(request, list) else [(request, reply)]:
      rollout_file.note_call(tree, asked, one)
    try:
      request = growth.send(reply)
    except StopIteration:
      return [node.data.get('calls', []) for node in tree.walk() if node.tokens]


def test_what_tools_and_services_reply_is_noted_at_the_span_it_is_about():
  def grow(question, tree):
    prompt = tree.root.append('Q', Role.PROMPT)
    first, second = yield [Generate(prompt), Generate(prompt)]
    yield [Search(first, 'who'), Search(second, 'what')]
    yield [Ask('judge', judge.Thinking(question, 'context', 'one'), first), Ask('reader', 'the prompt')]
    yield Score(second, (' 0', ' 1'))

  def write(request):
    return [each.node.append(text, Role.POLICY, sampler_logprobs=[0.0] * len(text))
            for each, text in zip(request, ('one', 'two'))]

  replies = [[list(FOUND), ToolFailure('down', 'server')], [judge.Reasoned(-1, 'It guesses. Score: -1'), 'Ada'],
             [[-0.5, -0.25], None]]
  _, first, second = asked_for(grow, [write, *replies])
  found = [{'id': '1', 'title': 'Title', 'text': 'text', 'score': 0.0}]
  assert first == [
    {'tool': 'search', 'query': 'who', 'documents': found},
    {'tool': 'judge', 'about': 'thinking', 'query': 'one', 'reply': -1, 'reason': 'It guesses. Score: -1'}]
  assert second == [
    {'tool': 'search', 'query': 'what', 'failure': 'down', 'fault': 'server'},
    {'tool': 'reader', 'query': 'the prompt', 'reply': 'Ada'},
    {'tool': 'score', 'query': ' 0 |  1', 'reply': [-0.75, None]}]


def test_the_same_questions_are_kept_whenever_they_come():
  groups = {name: [grown(name)] for name in 'abcdefgh'}
  kept = [group[0].question.id for group in rollout_file.sample(list(groups.values()), 3)]
  again = [group[0].question.id for group in rollout_file.sample([groups[name] for name in reversed('abcdefgh')], 3)]
  assert kept == again and len(kept) == 3
  assert len(rollout_file.sample(list(groups.values()), -1)) == 8 and rollout_file.sample([[], groups['a']], 5) == [groups['a']]


def test_rollouts_after_the_checkpoint_and_a_broken_end_are_cut_and_the_rest_stays(tmp_path):
  for step in (1, 2, 3):
    rollout_file.append(tmp_path, step, [[grown('a'), grown('a', 0.0)], [grown('b')]])
  path = tmp_path / rollout_file.FILE
  whole = path.read_bytes()
  read = list(rollout_file.members(path))
  assert [(records[0]['step'], records[0]['id'], len(records)) for _, _, records in read] == [
    (step, name, size) for step in (1, 2, 3) for name, size in (('a', 2), ('b', 1))]
  assert [start for start, _, _ in read] == [0, *(end for _, end, _ in read[:-1])] and read[-1][1] == len(whole)
  assert len(gzip.decompress(whole).splitlines()) == 9  # any tool reads it
  for cut in (len(whole) - 1, read[4][1] + 5, read[3][1] + 1):
    path.write_bytes(whole[:cut])
    assert list(rollout_file.members(path)) == [member for member in read if member[1] <= cut]
    rollout_file.keep_steps(tmp_path, 2)
    assert path.read_bytes() == whole[:read[3][1]]
  rollout_file.append(tmp_path, 3, [[grown('a'), grown('a', 0.0)], [grown('b')]])
  assert path.read_bytes() == whole  # as if nothing had happened
  rollout_file.keep_steps(tmp_path, 0)
  assert path.read_bytes() == b''


def test_a_run_that_an_alarm_stops_keeps_its_rollouts(config):
  """Two updates a step, so that the trainer's own log-probabilities are there too, if they are recomputed."""
  config.steps, config.rollouts = 3, -1
  config.monitor.update(window=1, entropy_high=0.1, action='stop', patience=2)
  config.train.update(old_logprobs='recompute', mini_batch=5)
  with pytest.raises(run_folder.RunStopped, match='^step 2: entropy_high 8.* > monitor.entropy_high=0.1 for 2 steps'):
    loop.train(config)
  members = rollout_file.members(pathlib.Path(config.out) / rollout_file.FILE)
  records = [record for _, _, records in members for record in records]
  assert [record['step'] for record in records] == [step for step in (1, 2) for _ in range(5 * 2)]
  for span in (span for record in records for span in record['spans'] if span['role'] == 'policy'):
    for name in ('sampler_logprobs', 'old_logprobs', 'ref_logprobs', 'values', 'returns'):
      assert len(span[name]) == len(span['ids'])
    np.testing.assert_allclose(span['old_logprobs'], span['sampler_logprobs'], atol=1e-3)
  calls = [call for record in records for span in record['spans'] for call in span.get('calls', ())]
  assert any(call['documents'] for call in calls)
  rows = row_files.read(pathlib.Path(config.out) / 'metrics.jsonl')
  assert [row['alarms'] for row in rows] == ['entropy_high'] * 2
  rewards = [record['reward'] for record in records if record['step'] == 2]
  assert np.mean(rewards) == pytest.approx(rows[-1]['reward'], abs=1e-4)
