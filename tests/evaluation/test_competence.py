"""Figures of CARL's section 4.4 on trees made by hand, against plain loops; the plot of them."""

import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.evaluation import competence, plots
from jaxsearch.evaluation.figures import record_of
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import Letters

# As if they took trees.
records_of = lambda trees: list(map(record_of, trees))
critic_figures = lambda trees, tiers: competence.critic_figures(records_of(trees), tiers)
use_figures = lambda trees, tiers: competence.use_figures(records_of(trees), tiers)
sign_figures = lambda trees: competence.sign_figures(records_of(trees))
tool_calls = lambda tree: competence.tool_calls(record_of(tree))

GOLDS = ('The Oviedo', '7')
TIERS = {'easy': 2, 'hard': 1}


def grown(calls, values=None, reward=1.0, answer='oviedo', name='hard', golds=GOLDS, commit=True):
  """A finished tree of CARL: `calls` are (raw output, context); `values` one for each segment."""
  tree = Tree(Letters(), Question(name, 'Where is <it>?', golds))
  node, segments = tree.root.append('Where is <it>?', Role.PROMPT), []
  for output, context in calls:
    invoke = node.append(f'I look.\n```python\nsearch("{len(segments)}")\n```', Role.POLICY)
    invoke.data |= {'segment': 'invoke', 'code': 'search(…)', 'output': output}
    assimilate = invoke.append(f'<output>{output}</output>', Role.OBSERVATION).append(
      f'<context>{context}</context>', Role.POLICY)
    assimilate.data |= {'segment': 'assimilate', 'context': context}
    node = invoke.append(f'<context>{context}</context>', Role.CONTEXT)
    segments += [invoke, assimilate]
  if commit:
    segments.append(node.append(f'So \\boxed{{{answer}}}', Role.POLICY))
    segments[-1].data['segment'] = 'commit'
  for i, segment in enumerate(segments if values is not None else ()):
    segment.values = np.linspace(values[i], -9.0, len(segment.tokens))  # the first is of the boundary
    segment.advantages = (values[i + 1] if i + 1 < len(values) else reward) - values[i]
  tree.reward, tree.answer, tree.metrics = reward, answer, {'searches': len(calls)}
  tree.stop = Stop.ANSWERED if commit else Stop.BUDGET
  return tree


def scattered(number=37):
  """Trees with random values that lean towards the reward."""
  rng, trees = np.random.default_rng(0), []
  for i in range(number):
    name = ('easy', 'hard', 'unknown')[i % 3]
    reward = float(rng.random() < (0.8, 0.4, 0.5)[i % 3])
    calls = [('in Oviedo', 'Oviedo')] * rng.integers(0, 3)
    values = np.clip(0.25 + 0.5 * reward + 0.2 * rng.normal(size=2 * len(calls) + 1), 0, 1)
    trees.append(grown(calls, values, reward, name=name))
  return trees


def test_critic_figures_equal_loops():
  trees = scattered()
  figures = critic_figures(trees, TIERS)
  start, reward, tier = np.array(
    [(t.nodes(Role.POLICY)[0].values[0], t.reward, TIERS.get(t.question.id, 0)) for t in trees]).T
  every = np.array([(n.values[0], t.reward) for t in trees for n in t.nodes(Role.POLICY)])
  wins = [(a > b) + 0.5 * (a == b) for a in start[tier == 2] for b in start[tier == 1]]
  which = np.minimum((start * 10).astype(int), 9)
  expected = {
    'auc': np.mean(wins), 'brier': np.mean((start - reward) ** 2),
    'ece': sum(abs((reward - start)[which == b].sum()) for b in range(10)) / len(trees),
    'explained_variance': 1 - np.var(every[:, 1] - every[:, 0]) / np.var(every[:, 1]),
    'value_tier_1': start[tier == 1].mean(), 'value_tier_2': start[tier == 2].mean(),
    'rollouts': len(trees), 'boundary_states': len(every)}
  assert figures == pytest.approx(expected, abs=1e-5)
  assert 0.5 < figures['auc'] < 1 and len(every) > len(trees)


def test_critic_figures_of_trees_without_a_critic_are_undefined():
  trees = [grown([], name='easy'), grown([('x', 'y')])]
  for figures in (critic_figures(trees, TIERS), critic_figures([], {})):
    assert figures.pop('rollouts') == figures.pop('boundary_states') == 0
    assert all(np.isnan(value) for value in figures.values())
  one = critic_figures([*trees, grown([], [0.25], name='easy')], TIERS)
  assert np.isnan([one['auc'], one['explained_variance']]).all() and one['brier'] == pytest.approx(0.75**2)


RIGHT, LOST = ('He died in OVIEDO, Spain.', 'Died in Oviedo.'), ('It is (7).', 'It is 17.')
WRONG = ('Nothing.', 'Oviedo?')


def test_tool_calls_know_what_was_found_and_what_was_kept():
  tree = grown([RIGHT, LOST, WRONG], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
  found = tool_calls(tree)
  assert [call[:2] for call in found] == [(True, True), (True, False), (False, True)]
  values = [(0.1, 0.2, 0.3), (0.3, 0.4, 0.5), (0.5, 0.6, 0.7)]
  np.testing.assert_allclose([call[2:] for call in found], values)
  assert not tool_calls(grown([('yes, it is', 'yes')], golds=('Yes',)))  # stands in any text


def test_sign_figures_follow_table_12():
  trees = [
    grown([RIGHT, LOST, WRONG], [0.3, 0.5, 0.8, 0.9, 0.6, 0.7, 0.2]),  # right up, lost down, failed: not
    grown([RIGHT, LOST], [0.3, 0.2, 0.1, 0.2, 0.4], 0.0),              # both wrong; first invoke wrong too
    grown([RIGHT], [0.3, 0.3, 0.3]),                                   # no change is in no direction
    grown([RIGHT, LOST], [0.3, 0.4, 0.6, 0.8], 0.0, commit=False),     # nothing follows the last assimilate
    grown([RIGHT])]                                                    # no critic
  assert sign_figures(trees) == pytest.approx({
    'extracted_pairs': 4, 'extracted_rate': 2 / 4, 'lost_pairs': 2, 'lost_rate': 1 / 2,
    'sign_accuracy': 3 / 6, 'invoke_pairs': 7, 'invoke_rate': 5 / 7})
  nothing = sign_figures([grown([])])
  assert nothing['extracted_pairs'] == 0
  assert np.isnan([nothing['sign_accuracy'], nothing['invoke_rate']]).all()


def test_use_figures_by_hand():
  trees = [
    grown([], name='easy'), grown([RIGHT, RIGHT], name='easy'), grown([RIGHT], answer='Gijon', name='easy'),
    grown([RIGHT]), grown([], answer='Gijon'), grown([RIGHT], answer=None), grown([RIGHT], answer=' '),
    grown([WRONG, WRONG, WRONG], answer='no idea'), grown([RIGHT], answer='Gijon', name='unknown')]
  policy = [n for tree in trees for n in tree.nodes(Role.POLICY)]
  written = [len(n.tokens) for n in policy if n.data['segment'] == 'assimilate']
  assert use_figures(trees, TIERS) == pytest.approx({
    'tool_rate_tier_1': 4 / 5, 'calls_tier_1': 6 / 5, 'em_tier_1': 1 / 5,
    'tool_rate_tier_2': 2 / 3, 'calls_tier_2': 1.0, 'em_tier_2': 2 / 3,
    'confident_wrong': 2 / 5, 'tokens_per_answer': sum(len(n.tokens) for n in policy) / 9,
    'assimilate_tokens': np.mean(written), 'assimilate_precision': 1.0})
  plain = use_figures([grown([], name='easy')], TIERS)
  assert np.isnan([plain['confident_wrong'], plain['assimilate_tokens']]).all() and plain['em_tier_2'] == 1


def test_the_precision_of_contexts_is_the_share_of_sentences_with_an_answer():
  tree = grown([('x', 'He died in Oviedo. It is far away from the sea.'), ('x', 'Nothing at all.')])
  wrong = grown([('x', 'Nothing at all.')], answer='Gijon')
  assert use_figures([tree, wrong], TIERS)['assimilate_precision'] == pytest.approx((4 / 11 + 0) / 2)


def of_hops(number, *arguments, **named):
  tree = grown(*arguments, **named)
  tree.question.metadata['hops'] = number
  return tree


def test_errors_by_hops_follow_table_7():
  trees = [
    of_hops(2, [RIGHT]), of_hops(2, [], answer='Gijon'), of_hops(2, [RIGHT], answer=None),
    of_hops(3, [WRONG], answer='Gijon'), of_hops(3, [LOST], answer='Gijon'),
    of_hops(3, [LOST, RIGHT], answer='Gijon'), grown([RIGHT], answer='Gijon')]
  records = records_of(trees)
  none = dict.fromkeys(competence.ERRORS, 0)
  assert competence.errors(records) == {
    'all': dict.fromkeys(competence.ERRORS, 1) | {'wrong_commit': 2},
    '2': none | {'no_call': 1, 'no_answer': 1},
    '3': none | {'not_retrieved': 1, 'lost': 1, 'wrong_commit': 1}}
  assert competence.hop_figures(records) == {
    'em_hops_2': 1 / 3, 'n_hops_2': 3, 'em_hops_3': 0.0, 'n_hops_3': 3}


def test_tables_by_the_entity_rule_accept_an_answer_that_contains_a_name_of_several_words():
  trees = [of_hops(hops, [RIGHT], golds=golds, answer=answer, name=name) for hops, golds, answer, name in (
    (2, ('Old Oviedo',), 'in Old Oviedo, Spain', 'easy'), (2, ('Oviedo',), 'in Oviedo, Spain', 'hard'),
    (3, ('Old Oviedo',), 'the old Oviedo!', 'hard'), (3, ('Old Oviedo',), 'Old', 'easy'))]
  strict, loose = (competence.tables(records_of(trees), TIERS, right) for right in ('em', 'em_entity'))
  figures = ('em_tier_1', 'em_tier_2', 'confident_wrong', 'em_hops_2', 'em_hops_3')
  assert [strict[name] for name in figures] == [1 / 2, 0, 1 / 2, 0, 1 / 2]
  assert [loose[name] for name in figures] == [1 / 2] * 5  # a name of one word has to be all
  assert [sum(found['errors']['all'].values()) for found in (strict, loose)] == [3, 2]


def test_tables_of_an_evaluation(tmp_path):
  records = records_of(scattered())
  found = competence.tables(records, TIERS)
  values, outcomes, _ = starts = competence.starts(records, TIERS)
  plots.critic(starts, str(tmp_path / 'plots'))
  assert sum(row['n'] for row in found['reliability']) == len(values) == 37
  for row in found['reliability']:
    inside = np.minimum(values, 0.99) // 0.1 == round(10 * row['from'])
    assert (row['right'], row['value']) == pytest.approx((outcomes[inside].mean(), values[inside].mean()))
  assert {'tool_rate_tier_2', 'auc', 'ece', 'confident_wrong', 'extracted_rate', 'errors'} <= found.keys()
  assert {file.name for file in (tmp_path / 'plots').iterdir()} == {'calibration.png', 'values.png'}
  assert not {'auc', 'reliability', 'tool_rate_tier_1'} & set(competence.tables(records_of([grown([])]), {}))
