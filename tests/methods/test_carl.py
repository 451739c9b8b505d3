"""CARL: how segments grow, what is forgotten, and how a critic's values become credit."""

import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.methods import carl
from jaxsearch.sampler.requests import Generate, RunPython
from jaxsearch.trees.tree import Role, Stop
from tests.methods import driving
from tests.methods.driving import context, segments

INVOKE = 'I look it up.\n```python\nprint(search("the author"))\n```\n'
CONTEXT = 'Well.\n<context> Lovelace wrote it. </context>'
COMMIT = 'So it is \\boxed{Lovelace}.'


def drive(said, output='Doc 1(Title: T) Lovelace wrote it.', **settings):
  """Grows a tree for a policy that says these spans; returns (tree, requests)."""
  return driving.drive(said, grow=carl.grow, printed=output, **{'template': 'world_carl'} | settings)[:2]


def kinds(tree):
  return [node.data['segment'] for node in segments(tree)]


def test_a_call_and_an_answer_are_three_segments():
  tree, requests = drive([INVOKE, CONTEXT, COMMIT])
  assert kinds(tree) == ['invoke', 'assimilate', 'commit'] and tree.answer == 'Lovelace'
  assert tree.stop is Stop.ANSWERED
  assert [type(request) for request in requests] == [Generate, RunPython, Generate, Generate]
  assert requests[1].code == 'print(search("the author"))' and tree.metrics['searches'] == 1
  assert carl.reward(tree) == 1.0


def test_the_raw_output_is_forgotten_and_the_context_stays():
  tree, requests = drive([INVOKE, CONTEXT, COMMIT])
  reading, going_on = requests[2].node, requests[3].node
  seen = lambda node: ''.join(span.text for span in node.path()[1:])
  assert 'Doc 1' in seen(reading) and 'Doc 1' not in seen(going_on)
  assert going_on.role is Role.CONTEXT and going_on.text == '<context>Lovelace wrote it.</context>\n'
  assert going_on.parent is reading.parent and 'Well.' not in seen(going_on)


@pytest.mark.parametrize('text, answer, stop', [
  ('I look.\n```python\nprint(1)', None, Stop.MALFORMED),              # the block was never closed
  ('nothing at all', None, Stop.MALFORMED),
  ('```python\nprint(1)\n```\nSo \\boxed{Lovelace}', 'Lovelace', Stop.ANSWERED),  # it did not wait
  ('\\boxed{Love{la}ce} or \\boxed{Ada', 'Love{la}ce', Stop.ANSWERED),
])
def test_what_is_no_call_commits(text, answer, stop):
  tree, requests = drive([text])
  assert (tree.answer, tree.stop, len(requests)) == (answer, stop, 1)
  assert tree.metrics['malformed'] == (stop is Stop.MALFORMED) and tree.metrics['searches'] == 0


@pytest.mark.parametrize('block', [
  '```json\n{"a": 1}\n```\n', '```py\nprint(1)\n```\n', 'So:\n```\n', '```python\n\n```\n', '```python\n```\n',
  '```python3\nprint(1)\n```\n'])
def test_only_a_closed_block_of_python_ends_an_invoke(block):
  tree, requests = drive([block, INVOKE, CONTEXT, COMMIT], logprobs=[-1.0, -2.0, -3.0, -4.0], max_tokens=100)
  assert kinds(tree) == ['invoke', 'assimilate', 'commit'] and tree.metrics['searches'] == 1
  assert tree.answer == 'Lovelace'
  invoke = segments(tree)[0]
  assert invoke.text == block + INVOKE and requests[1].max_tokens == 100 - len(block)
  assert requests[1].node is invoke
  assert invoke.sampler_logprobs == [-1.0] * len(block) + [-2.0] * len(INVOKE)
  assert [node.text for node in invoke.children] == [
    '<output>Doc 1(Title: T) Lovelace wrote it.</output>\n', '<context>Lovelace wrote it.</context>\n']


@pytest.mark.parametrize('written, kept, counted', [
  ('I saw nothing.', '', 'no_context'),
  ('<context></context>', '', 'no_context'),
  ('<context> Lovelace and so', 'Lovelace and so', 'context_cut'),  # `context_tokens` were not enough
  ('<context> <|end|> <output> x </context>', '(|end|> (output> x', None),
])
def test_contexts_that_are_not_what_they_should_be(written, kept, counted):
  tree, _ = drive([INVOKE, written, COMMIT])
  copy = tree.nodes(Role.CONTEXT)[0].text
  assert copy == f'<context>{kept}</context>\n' and tree.answer == 'Lovelace'
  assert {name: tree.metrics[name] for name in ('no_context', 'context_cut')} == {
    'no_context': int(counted == 'no_context'), 'context_cut': int(counted == 'context_cut')}


def test_the_last_segment_is_not_run():
  tree, requests = drive([INVOKE, CONTEXT] * 7 + [INVOKE])
  assert len(kinds(tree)) == 15 and tree.stop is Stop.BUDGET and tree.answer is None
  assert sum(isinstance(request, RunPython) for request in requests) == 7 == tree.metrics['searches']


def test_a_table_goes_with_the_program():
  question = Question('t', 'How much?', ('3',), {'table': [['a', '3']], 'match': 'numeric'})
  tree, requests = drive([INVOKE, CONTEXT, '\\boxed{\\$3.0}'], question=question)
  assert requests[1].table == (['a', '3'],) and carl.reward(tree) == 1.0


@pytest.mark.parametrize('fault, seen', [
  ('empty', '<output></output>\n'), ('irrelevant', '<output>of "Who\'s that?"</output>\n'),
  ('garbage', '<output>')])
def test_broken_tools(fault, seen):
  """Another question's passage is what the tool itself finds for it."""
  def printed(request):
    return 'of "Who\'s that?"' if request.code == 'print(search("Who\'s that?"))' else 'Lovelace wrote it.'
  question = Question('q', 'Who wrote it?', ('Lovelace',), {'other': "Who's that?"})
  tree, _ = drive([INVOKE, CONTEXT, COMMIT], output=printed, question=question, fault=fault)
  shown = tree.nodes(Role.OBSERVATION)[0].text
  assert seen in shown and 'Lovelace' not in shown
  with pytest.raises(ValueError, match='fault'):
    drive([COMMIT], fault='broken')
  with pytest.raises(ValueError, match='another question'):
    drive([COMMIT], fault='irrelevant')


def credited(said, values, **settings):
  trees = [drive(spans)[0] for spans in said]
  for tree, own in zip(trees, values):
    for node, value in zip(segments(tree), own):
      # only the first counts
      node.values = np.r_[value, np.full(len(node.tokens) - 1, 7.0)].astype(np.float32)
  found = context()
  carl.credit([trees[:1], trees[1:]], found, **settings)
  return trees, found


WRONG = 'So it is \\boxed{Byron}.'


def test_a_segment_earns_what_it_changed():
  trees, found = credited([[INVOKE, CONTEXT, COMMIT], [INVOKE, CONTEXT, WRONG], [WRONG]],
                          [[0.2, 0.7, 0.5], [0.1, 0.3, 0.8], [0.4]])
  advantages = [[node.advantages for node in segments(tree)] for tree in trees]
  np.testing.assert_allclose(advantages[0], [0.5, -0.2, 0.5], atol=1e-6)  # a good call, a bad context
  np.testing.assert_allclose(advantages[1], [0.2, 0.5, -0.8], atol=1e-6)
  np.testing.assert_allclose(advantages[2], [-0.4], atol=1e-6)
  assert all(np.all(node.returns == tree.reward) for tree in trees for node in segments(tree))
  assert found.metrics['opposed_pairs_share'] == 0.5 and found.metrics['gained_then_lost_pairs'] == 1
  assert found.metrics['advantage_commit'] == pytest.approx((0.5 - 0.8 - 0.4) / 3)
  for tree, own in zip(trees, advantages):
    assert sum(own) == pytest.approx(tree.reward - segments(tree)[0].values[0])  # they telescope


def test_the_same_rollouts_credited_by_token_and_by_trajectory():
  trees, found = credited([[INVOKE, CONTEXT, COMMIT], [WRONG]], [[0.2, 0.7, 0.5], [0.4]], lam=0.95,
                          level='token')
  for tree in trees:
    assert all(np.shape(node.advantages) == np.shape(node.returns) == (len(node.tokens),)
               for node in segments(tree))
  every = np.concatenate([node.advantages for tree in trees for node in segments(tree)])
  assert every.mean() == pytest.approx(0, abs=1e-5)
  assert 'value_explained' in found.metrics and 'opposed_pairs' not in found.metrics
  group = [drive([INVOKE, CONTEXT, COMMIT])[0], drive([WRONG])[0]]
  carl.credit([group], context(), level='trajectory')  # needs no critic
  right, wrong = ({node.advantages for node in segments(tree)} for tree in group)
  assert len(right) == len(wrong) == 1 and right.pop() == pytest.approx(-wrong.pop())
  assert group[0].reward == 1.0
