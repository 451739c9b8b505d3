"""Search-R2's rollout: what is kept, cut, regenerated and credited, and what the sampler computes for it."""

import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.methods import Context, refiner, search_r2
from jaxsearch.sampler.requests import Ask, Generate, Score, ToolFailure
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods import driving
from tests.methods.driving import QUESTION, Letters, context

ONE, TWO = '<think>a</think><search> one </search>', '<think>b</think><search> two </search>'
RIGHT, WRONG = '<answer> Lovelace </answer>', '<answer> Byron </answer>'
ACCEPT, REVISE = -0.1, -5.0  # log-probability of ' 0'


def drive(said, margins=(), useful=1, **settings):
  """Grows a tree; `said` are the generated spans in order; `margins` are for each review the log-probability
  of ' 0', or (that of ' 0', the step that all others give way to).

  `useful` is what the judge replies, or a function of what it is asked.
  """
  margins = list(margins)

  def scored(request):
    margin, steps = margins.pop(0), len(request.continuations) - 1
    if margin is None:
      return [None] * (steps + 1)
    margin, flawed = margin if isinstance(margin, tuple) else (margin, None)
    return [[margin, 0.0]] + [[-2.0 if flawed in (None, step) else -60.0, 0.0]
                              for step in range(1, steps + 1)]

  def asked(request):
    if request.service == 'refiner':
      return scored(request.item)
    return useful(request.item) if callable(useful) else useful

  tree, requests, _ = driving.drive(
    said, grow=search_r2.grow, review='world', scored=scored, asked=asked,
    found=lambda request: [Document('1', request.query, f'about {request.query}')], **settings)
  assert not margins
  return tree, requests


def path_texts(node):
  return [span.text for span in node.path() if span.role is Role.POLICY]


def kept_leaf(tree):
  """The end of the chain whose every step is trained."""
  return next(leaf for leaf in tree.leaves() if all(n.trained for n in leaf.path() if n.role is Role.POLICY)
              and leaf.trained)


def test_an_accepted_draft_is_the_chain_with_its_review():
  tree, requests = drive([ONE, RIGHT], [ACCEPT])
  score = next(request for request in requests if isinstance(request, Score))
  assert score.continuations == (' 0', ' 1', ' 2') and score.node.text == '\nFlawed step, 0 to 2:'
  assert path_texts(score.node) == [ONE, RIGHT]
  review = score.node.children[0]
  assert review.text == ' 0' and review.trained and review.sampler_logprobs == [ACCEPT, 0.0]
  assert review.data['meta']
  assert tree.answer == 'Lovelace' and tree.metrics['revised'] == 0
  assert search_r2.reward(tree) == 2.0     # one collection, useful


@pytest.mark.parametrize('flawed, rest, kept',
                         [(1, [TWO, RIGHT], []), (2, [RIGHT], [ONE]), (3, [RIGHT], [ONE, TWO])])
def test_a_rejected_draft_is_cut_before_its_flawed_step(flawed, rest, kept):
  tree, requests = drive([ONE, TWO, WRONG, *rest], [(REVISE, flawed)], useful=0)
  generated = [request for request in requests if isinstance(request, Generate)]
  # the revision goes on behind the kept prefix
  assert path_texts(generated[3].node) == kept
  cut = [node for node in tree.nodes(Role.POLICY) if not node.trained]
  assert [node.text for node in cut] == [ONE, TWO, WRONG][flawed - 1:]
  trained = [node.text for node in tree.nodes(Role.POLICY) if node.trained]
  assert sorted(trained) == sorted([*kept, f' {flawed}', *rest])
  assert tree.answer == 'Lovelace' and tree.metrics['revised'] == 1
  assert tree.metrics['em_draft'] == 0 and tree.metrics['em_kept'] == 1
  assert search_r2.reward(tree) == 1.0


def test_after_a_rejection_the_trimmer_draws_from_the_steps_alone():
  """' 0' is likelier than either step, though not than both; it is never drawn, and the steps are drawn by
  their odds."""
  chances = np.array([-0.9, -1.0, -2.0])
  drawn = []
  for seed in range(300):
    tree = Tree(Letters(), QUESTION, np.random.default_rng(seed))
    seen = tree.root.append('Q', Role.PROMPT).append(ONE, Role.POLICY).append('seen', Role.OBSERVATION)
    leaf = seen.append(WRONG, Role.POLICY)
    review = refiner.review(tree, leaf, threshold=0.0, refiner='policy', random_share=0.0, template='world')
    next(review)
    with pytest.raises(StopIteration) as stopped:
      review.send([[chance, 0.0] for chance in chances])
    flawed, cuts = stopped.value.value
    written = leaf.children[0].children[0]
    assert written.text == f' {flawed}' and written.sampler_logprobs == [chances[flawed], 0.0]
    assert written.trained
    drawn.append(flawed)
  odds = np.exp(chances[1:]) / np.exp(chances[1:]).sum()
  np.testing.assert_allclose(cuts, odds)
  assert set(drawn) == {1, 2}
  assert np.mean(np.array(drawn) == 1) == pytest.approx(odds[0], abs=4 * np.sqrt(odds.prod() / 300))


def test_the_actor_has_as_many_spans_as_turns():
  """Algorithm 2: a search in the last of B spans is not served."""
  tree, requests = drive([ONE, TWO], max_turns=2, max_revisions=0)
  assert tree.stop is Stop.BUDGET and sum(isinstance(request, Generate) for request in requests) == 2
  assert tree.metrics['searches'] == 1
  with pytest.raises(ValueError, match='grow.max_turns=0'):
    drive([], max_turns=0)


def test_a_response_has_so_many_tokens_in_all():
  room = len(ONE) + 10
  tree, requests = drive([ONE, TWO[:10]], max_response=room, max_tokens=60, max_revisions=0)
  assert tree.stop is Stop.BUDGET and [request.max_tokens
                                       for request in requests if isinstance(request, Generate)] == [
    min(60, room), 10]
  # the kept step counts
  tree, requests = drive([ONE, WRONG, RIGHT], [(REVISE, 2)], max_response=room + 100, max_tokens=500)
  assert [r.max_tokens for r in requests if isinstance(r, Generate)] == [room + 100, 110, 110]


def test_revisions_are_limited():
  tree, _ = drive([WRONG, ONE, WRONG, RIGHT], [REVISE, (REVISE, 2)], max_revisions=2)
  assert tree.metrics['revised'] == 2 and tree.answer == 'Lovelace'
  kept = [n.text for n in kept_leaf(tree).path() if n.role is Role.POLICY]
  assert kept == [ONE, RIGHT]
  tree, requests = drive([ONE, WRONG], max_revisions=0)
  assert not any(isinstance(request, (Score, Ask)) for request in requests)
  tree, _ = drive([ONE, RIGHT], [None])        # no room for the review
  assert tree.answer == 'Lovelace' and tree.metrics['revised'] == 0


def test_the_process_reward_is_gated_by_the_answer():
  for said, useful, expected in (([ONE, TWO, RIGHT], 1, 1.5), ([ONE, WRONG], 1, 0.0), ([RIGHT], 1, 1.0),
                                 ([ONE, RIGHT], None, 1.0), ([ONE, RIGHT], ToolFailure('down'), 1.0)):
    tree, requests = drive(said, [ACCEPT], useful=useful)
    assert search_r2.reward(tree) == expected
    asked = [request for request in requests if isinstance(request, Ask)]
    assert len(asked) == (expected > 0 and len(said) > 1)
    assert tree.metrics['judge_unreadable'] == (bool(asked) and not isinstance(useful, int))
  tree, requests = drive([ONE, TWO, RIGHT], [ACCEPT])
  collections = next(request for request in requests if isinstance(request, Ask)).item.collections
  assert ['one' in collections[0], 'two' in collections[1], len(collections)] == [True, True, 2]
  assert not any(isinstance(r, Ask) for r in drive([ONE, RIGHT], [ACCEPT], process=False)[1])


def test_a_trace_without_a_number_of_the_judge_gets_the_mean_of_the_others():
  """Of those that were judged: a wrong one and one without a search were not."""
  said = [[ONE, RIGHT], [ONE, TWO, RIGHT], [ONE, TWO, RIGHT], [RIGHT], [ONE, WRONG]]
  trees = [drive(own, [ACCEPT], useful=useful)[0]
           for own, useful in zip(said, (ToolFailure('down'), 1, 2, 1, 1))]
  search_r2.credit([trees], context())
  assert [tree.reward for tree in trees] == [1 + (1 / 2 + 2 / 2) / 2, 1.5, 2.0, 1.0, 0.0]
  assert [tree.metrics['judge_unreadable'] for tree in trees] == [1, 0, 0, 0, 0]
  alone = drive([ONE, RIGHT], [ACCEPT], useful=None)[0], drive([ONE, WRONG], [ACCEPT])[0]
  search_r2.credit([alone], context())
  assert [tree.reward for tree in alone] == [1.0, 0.0]
  unsearched = [drive(said, [ACCEPT])[0] for said in ([RIGHT], [WRONG], [ONE, TWO, RIGHT])]
  search_r2.credit([unsearched], context(), process_unsearched=0.5)  # eq. 16 divides by M = 0
  assert [tree.reward for tree in unsearched] == [1.5, 0, 1.5]


def test_tokens_beside_the_kept_chain_are_counted():
  """A token is a byte here: of the cut-off steps and of what the reviewer wrote."""
  for said, margins, extra, settings in (
      ([ONE, RIGHT], [], '', dict(max_revisions=0)),
      ([ONE, RIGHT], [ACCEPT], ' 0', {}),
      ([ONE, TWO, WRONG, RIGHT], [(REVISE, 2)], TWO + WRONG + ' 2', {}),
      ([WRONG, ONE, WRONG, RIGHT], [REVISE, (REVISE, 2)], WRONG + ' 1' + WRONG + ' 2', dict(max_revisions=2)),
      # what probing grew is gone
      ([ONE, WRONG, WRONG, RIGHT, RIGHT], [(REVISE, 2)], WRONG + ' 2', dict(probe=1.1))):
    tree, _ = drive(said, margins, **settings)
    assert tree.metrics['tokens_extra'] == len(extra), said


def test_credit_goes_to_the_kept_chain_and_the_reviews():
  groups = [[drive([ONE, WRONG, RIGHT], [(REVISE, 2)])[0], drive([ONE, WRONG], [ACCEPT])[0]]]
  search_r2.credit(groups, context())
  rewards = np.array([2.0, 0.0])
  for tree, expected in zip(groups[0], (rewards - 1) / (rewards.std(ddof=1) + 1e-6)):
    for node in tree.nodes(Role.POLICY):
      if node.trained:
        assert node.advantages == pytest.approx(expected, abs=1e-5)
  assert [node.text for node in groups[0][0].nodes(Role.POLICY) if not node.trained] == [WRONG]
  search_r2.credit(groups, context(), joint=False)
  assert not any(node.trained for tree in groups[0]
                 for node in tree.nodes(Role.POLICY) if node.data.get('meta'))


def test_a_random_refiner_needs_no_review():
  tree, requests = drive([ONE, WRONG, RIGHT, ], refiner='random', random_share=1.0, max_turns=3, seed=1)
  assert tree.metrics['revised'] == 1 and not any(isinstance(request, Score) for request in requests)
  tree, drawn = Tree(Letters(), QUESTION, np.random.default_rng(0)), []
  leaf = tree.root.append('Q', Role.PROMPT).append(ONE, Role.POLICY).append(TWO, Role.POLICY).append(WRONG, Role.POLICY)
  for _ in range(2000):
    with pytest.raises(StopIteration) as ended:
      next(refiner.review(tree, leaf, threshold=0.0, refiner='random', random_share=0.4, template='world'))
    drawn.append(ended.value.value[0])
  np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 2000, [0.6, *[0.4 / 3] * 3], atol=0.04)


def test_a_frozen_refiner_is_asked_and_not_trained():
  tree, requests = drive([ONE, WRONG, RIGHT], [(REVISE, 2)], refiner='frozen')
  asked = next(request for request in requests if isinstance(request, Ask))
  assert asked.service == 'refiner' and asked.item.continuations == (' 0', ' 1', ' 2')
  assert path_texts(asked.item.node) == [ONE, WRONG]
  assert not any(isinstance(request, Score) for request in requests)
  assert tree.answer == 'Lovelace'
  assert [node.text for node in tree.nodes(Role.POLICY) if node.trained] == [ONE, RIGHT]
  tree.prune()
  # neither the review nor what was cut is in the rows
  assert [node.text for node in tree.nodes(Role.POLICY)] == [ONE, RIGHT]
  with pytest.raises(ValueError, match="grow.refiner='frozen': there is no refiner"):
    driving.drive([ONE, WRONG], grow=search_r2.grow, review='world', refiner='frozen',
                  asked=ToolFailure('there is no refiner'))


def test_what_probing_estimates():
  """Regenerated from the first step the chain fails again, from the second it is right; the tree stays as it
  was."""
  tree, requests = drive([ONE, WRONG, WRONG, RIGHT, RIGHT], [REVISE], probe=1.1, seed=3)
  found = tree.root.data['probe']
  assert found['judged'] == [[0, 0, 1], [0, 0, 0], [1, 1, 1]]  # of the draft, and of the two chains
  assert found['accept'] == 0.0
  np.testing.assert_allclose(found['cuts'], [0.5, 0.5])
  assert tree.metrics['revised'] == 1 and len(tree.leaves()) == 2 and tree.answer == 'Lovelace'
  assert sum(isinstance(request, Ask) for request in requests) == 1 + (search_r2.reward(tree) == 2)
  tree, _ = drive([ONE, WRONG, WRONG, RIGHT, RIGHT], [(REVISE, 2)], probe=1.1, process=False)
  assert tree.root.data['probe']['judged'] == [[0, 0, 1], [0, 0, 1], [1, 0, 1]]


def test_the_gain_of_a_step_is_logged(monkeypatch):
  trees = [drive([ONE, WRONG, WRONG, RIGHT, RIGHT], [(REVISE, 2)], probe=1.1)[0],
           drive([WRONG, RIGHT], [ACCEPT], probe=1.1)[0]]
  own = context()
  search_r2.credit([trees], own)
  assert own.metrics['gain_measured'] == 1.0 and own.metrics['v_inter'] == 0.5 and own.metrics['probed'] == 2
  assert own.metrics['gain_predicted'] == pytest.approx(1.0)
  gathered = []  # and alike if each tree is another process's
  monkeypatch.setattr(Context, 'gather', lambda _, probes: (gathered.extend(probes) or gathered, []))
  for tree in trees:
    search_r2.credit([[tree]], last := context())
  assert last.metrics == own.metrics | {'probed': 1}
