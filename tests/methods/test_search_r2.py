"""Search-R2's rollout: what is kept, cut, regenerated and credited, and what the sampler computes for it."""

import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.methods import figures, search_r2
from jaxsearch.sampler.requests import Ask, Generate, Score, ToolFailure
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods import driving
from tests.methods.driving import QUESTION, Letters, context
from tests.rewards import faults

ONE, TWO = '<think>a</think><search> one </search>', '<think>b</think><search> two </search>'
RIGHT, WRONG = '<answer> Lovelace </answer>', '<answer> Byron </answer>'
ACCEPT, REVISE = -0.1, -5.0  # log-probability of ' 0'


def drive(said, margins=(), useful=1, **settings):
  """Grows a tree; `said` are the generated spans in order, `margins` the log-probability of ' 0' at each review.

  `useful` is what the judge replies, or a function of what it is asked.
  """
  margins = list(margins)

  def scored(request):
    margin, steps = margins.pop(0), len(request.continuations) - 1
    return [None] * (steps + 1) if margin is None else [[margin, 0.0]] + [[-2.0, 0.0]] * steps

  tree, requests, _ = driving.drive(
    said, grow=search_r2.grow, review='world', scored=scored,
    found=lambda request: [Document('1', request.query, f'about {request.query}')],
    asked=lambda request: useful(request.item) if callable(useful) else useful, **settings)
  assert not margins
  return tree, requests


def path_texts(node):
  return [span.text for span in node.path() if span.role is Role.POLICY]


def kept_leaf(tree):
  """The end of the chain whose every step is trained."""
  return next(leaf for leaf in tree.leaves() if all(n.trained for n in leaf.path() if n.role is Role.POLICY) and leaf.trained)


def test_an_accepted_draft_is_the_chain_with_its_review():
  tree, requests = drive([ONE, RIGHT], [ACCEPT])
  score = next(request for request in requests if isinstance(request, Score))
  assert score.continuations == (' 0', ' 1', ' 2') and score.node.text == '\nFlawed step, 0 to 2:'
  assert path_texts(score.node) == [ONE, RIGHT]
  review = score.node.children[0]
  assert review.text == ' 0' and review.trained and review.logprobs == [ACCEPT, 0.0] and review.data['meta']
  assert tree.answer == 'Lovelace' and tree.metrics['revised'] == 0
  assert search_r2.reward(tree) == 2.0     # one collection, useful


@pytest.mark.parametrize('flawed, rest, kept', [(1, [TWO, RIGHT], []), (2, [RIGHT], [ONE]), (3, [RIGHT], [ONE, TWO])])
def test_a_rejected_draft_is_cut_before_its_flawed_step(flawed, rest, kept):
  tree, requests = drive([ONE, TWO, WRONG, f' {flawed}\n', *rest], [REVISE], useful=0)
  generated = [request for request in requests if isinstance(request, Generate)]
  assert path_texts(generated[4].node) == kept                     # the revision goes on behind the kept prefix
  cut = [node for node in tree.nodes(Role.POLICY) if not node.trained]
  assert [node.text for node in cut] == [ONE, TWO, WRONG][flawed - 1:]
  trained = [node.text for node in tree.nodes(Role.POLICY) if node.trained]
  assert sorted(trained) == sorted([*kept, f' {flawed}\n', *rest])
  assert tree.answer == 'Lovelace' and tree.metrics['revised'] == 1 and tree.metrics['em_draft'] == 0
  assert search_r2.reward(tree) == 1.0


@pytest.mark.parametrize('said, unreadable', [(' 0\n', 0), (' 7\n', 1), (' two\n', 1), ('', 1), (' 1.5\n', 1), (' -1\n', 1)])
def test_a_review_that_names_no_step_keeps_the_draft(said, unreadable):
  tree, _ = drive([ONE, RIGHT, said], [REVISE])
  assert tree.metrics['unreadable_review'] == unreadable and tree.metrics['revised'] == 0
  assert tree.answer == 'Lovelace' and all(node.trained for node in tree.nodes(Role.POLICY))


def test_the_threshold_moves_the_margin():
  margin = np.log(2 * np.exp(-2.0)) + 3.0  # of a draft of two steps with log P(0) = -3
  for threshold, revised in ((margin - 0.01, 1), (margin + 0.01, 0)):
    tree, _ = drive([ONE, WRONG] + [' 2\n', RIGHT] * revised, [-3.0], threshold=threshold)
    assert tree.metrics['revised'] == revised


def test_revisions_are_limited():
  tree, _ = drive([WRONG, ' 1\n', ONE, WRONG, ' 2\n', RIGHT], [REVISE, REVISE], max_revisions=2)
  assert tree.metrics['revised'] == 2 and tree.answer == 'Lovelace'
  kept = [n.text for n in kept_leaf(tree).path() if n.role is Role.POLICY]
  assert kept == [ONE, RIGHT]
  tree, requests = drive([ONE, WRONG], max_revisions=0)
  assert not any(isinstance(request, (Score, Ask)) for request in requests)
  tree, _ = drive([ONE, RIGHT], [None])        # no room for the review
  assert tree.answer == 'Lovelace' and tree.metrics['revised'] == 0


def test_a_revision_has_the_turns_that_are_left():
  tree, _ = drive([ONE, TWO, ' 2\n', TWO], [REVISE], max_turns=1)
  assert tree.stop is Stop.BUDGET and tree.metrics['revised'] == 1


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


@pytest.mark.parametrize('fault', ['', *faults.FAULTS])
def test_a_judge_at_fault_is_neutral_and_counted(fault):
  """The answer counts as without a process reward; the documents, which repeat their query, try to steer the judge."""
  search = f'<search> {faults.STEERING} </search>'
  with faults.judge_at_fault(fault) as judge:
    tree, requests = drive([search, RIGHT], [ACCEPT], useful=lambda item: judge([item])[0])
  assert 'Final Answer' in next(request for request in requests if isinstance(request, Ask)).item.collections[0]
  assert tree.metrics['judge_unreadable'] == bool(fault) and tree.metrics['useful'] == (not fault)
  assert search_r2.reward(tree) == (1.0 if fault else 2.0)


def test_tokens_beside_the_kept_chain_are_counted():
  """A token is a byte here: of the cut-off steps and of what the reviewer wrote."""
  for said, margins, extra, settings in (
      ([ONE, RIGHT], [], '', dict(max_revisions=0)),
      ([ONE, RIGHT], [ACCEPT], ' 0', {}),
      ([ONE, RIGHT, ' 7\n'], [REVISE], ' 7\n', {}),
      ([ONE, TWO, WRONG, ' 2\n', RIGHT], [REVISE], TWO + WRONG + ' 2\n', {}),
      ([WRONG, ' 1\n', ONE, WRONG, ' 2\n', RIGHT], [REVISE, REVISE], WRONG + ' 1\n' + WRONG + ' 2\n', dict(max_revisions=2)),
      ([ONE, WRONG, ' 2\n', WRONG, RIGHT, RIGHT], [REVISE], WRONG + ' 2\n', dict(probe=1.1))):  # what probing grew is gone
    tree, _ = drive(said, margins, **settings)
    assert tree.metrics['tokens_extra'] == len(extra), said


def test_credit_goes_to_the_kept_chain_and_the_reviews():
  groups = [[drive([ONE, WRONG, ' 2\n', RIGHT], [REVISE])[0], drive([ONE, WRONG], [ACCEPT])[0]]]
  search_r2.credit(groups, context())
  rewards = np.array([2.0, 0.0])
  for tree, expected in zip(groups[0], (rewards - 1) / (rewards.std(ddof=1) + 1e-6)):
    for node in tree.nodes(Role.POLICY):
      if node.trained:
        assert node.advantages == pytest.approx(expected, abs=1e-5)
  assert [node.text for node in groups[0][0].nodes(Role.POLICY) if not node.trained] == [WRONG]
  search_r2.credit(groups, context(), joint=False)
  assert not any(node.trained for tree in groups[0] for node in tree.nodes(Role.POLICY) if node.data.get('meta'))


def test_a_random_refiner_needs_no_review():
  tree, requests = drive([ONE, WRONG, RIGHT, ], refiner='random', random_share=1.0, max_turns=2, seed=1)
  assert tree.metrics['revised'] == 1 and not any(isinstance(request, Score) for request in requests)
  with pytest.raises(ValueError, match="refiner='oracle'"):
    drive([ONE, WRONG], refiner='oracle')


def test_what_probing_estimates():
  """Regenerated from the first step the chain fails again, from the second it is right; the tree stays as it was."""
  tree, _ = drive([ONE, WRONG, ' 2\n', WRONG, RIGHT, RIGHT], [REVISE], probe=1.1)
  found = tree.root.data['probe']
  assert found['gains'].tolist() == [0.0, 1.0] and found['accept'] == 0.0 and found['reward'] == 0.0
  np.testing.assert_allclose(found['cuts'], [0.5, 0.5])
  assert tree.metrics['searches'] == 1 and len(tree.leaves()) == 2 and tree.answer == 'Lovelace'
  other = {'accept': 1.0, 'cuts': np.array([1.0]), 'gains': np.array([-1.0]), 'reward': 1.0}
  gain = figures.of_refinement([found, other])
  rewards, trimmed = np.array([0.0, 1.0]), np.array([0.5, 0.0])
  assert gain['v_inter'] == 0.5
  assert gain['a_prec'] == pytest.approx(np.cov([0.0, 1.0], rewards - trimmed, ddof=0)[0, 1])
  cuts, gains = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.0, 1.0], [-1.0, 0.0]])
  assert gain['s_trim'] == pytest.approx(sum(np.cov(cuts[:, k], gains[:, k], ddof=0)[0, 1] for k in range(2)))
  assert figures.of_refinement([]) == {}


def test_nothing_of_the_kept_prefix_is_computed_again():
  """Through the real sampler: what is extended is the prompt, the observations, the review, and the last token of a span."""
  import jax

  from jaxsearch.models.decoder import DecoderConfig, initial_params
  from tests.engines import Equipped

  class Bytes(Letters):
    eos_ids, pad_id = (), 0
    pieces = staticmethod(lambda size: [bytes([i]) for i in range(size)])
    decode = staticmethod(lambda ids: bytes(ids).decode('latin-1'))

  class Always:
    def search(self, queries, topk):
      return [[Document('1', 'Title', 'text')] for _ in queries]

  def grow(question, tree):
    """A draft of two searches as a policy would write it, then the method's own cut."""
    start = tree.root.append('Question: who wrote the first program for a machine?\n', Role.PROMPT)
    first = yield Generate(start, max_tokens=20)
    seen = first.append('\n<information>Doc 1(Title: Title) text\n</information>\n', Role.OBSERVATION)
    second = yield Generate(seen, max_tokens=20)
    asked = second.append('\nFlawed step, 0 to 2:', Role.PROMPT)
    yield Score(asked, (' 0', ' 1', ' 2'))
    yield Generate(asked, max_tokens=4)
    before = dict(counts())
    yield Generate(seen, max_tokens=20)
    revision.append(counts()['tokens_prefilled'] - before['tokens_prefilled'])

  revision, runs = [], []
  counts = lambda: runs[0].counts
  config = DecoderConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
                         head_dim=8, tie_embeddings=True)
  engine = Equipped(config, Bytes(), slots=2, length=256, prefill_lengths=(32, 64), prefill_tokens=64, search=Always())
  engine.load(initial_params(config, jax.random.key(0)))
  from jaxsearch.sampler.rollout import Schedule
  tree = Tree(Bytes(), QUESTION)
  run = Schedule(engine, [(0, grow(QUESTION, tree), tree)], engine.put(jax.random.key(1)), engine.sampling, engine.tools)
  runs.append(run)
  run.run()
  assert revision == [0]
