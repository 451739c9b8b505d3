"""SLATE with frozen weights: how noisy the gradients of its 2 x 2 are, and where they point.

    python -m studies.slate [--size small] [--policy start] [--lengths 3,4,5]

{whole chains, truncated steps} x {judge, EM}, all from one tree a question, grown by the policy as it is. A
chain has at most T actions; the questions need T - 1 searches. At each step k = 5 siblings are drawn and a
chain is completed from each; one of them, each with the same chance, goes on, so prefixes are the policy's
(SLATE's softmax is left out, as in the theorem). The siblings of the first step with their completions are
the whole chains.

  whole, judge       every action of a chain is credited with the sum of its judged rewards (eqs. 5 and 6
                     without bonus)
  whole, EM          with the exact match of its answer: Search-R1
  truncated, judge   a sibling is credited with its own judged reward: SLATE
  truncated, EM      with the exact match of the chain completed from it, so that a search does not earn 0

Each relative to the k of its question or step, divided by their deviation or not; the gradient is the sum
over actions of A / k times their score (eqs. 10 and 11). A chain that answers early has no later steps. No
question is dropped.

Gradients are random projections, see gradients.py. Over 64 mini-batches: the squared length of the mean
gradient ("signal") and the trace of the covariance ("noise"), the latter scaled to mini-batches of as many
decoded and prefilled tokens as the whole chains of 16 questions cost; completions cost too. `direction` is
the cosine of the mean to the gradient of expected EM, measured on other questions with 8 chains each; `own`
that of a mini-batch to its mean; `towards` that of a mini-batch to the gradient of expected EM, the product
of both. For intervals both sets of mini-batches are resampled, with the same draws for all estimators.

The policy is the world's after a few steps of Search-R1, which the study trains first; `--policy start` takes
the one that ships.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs import slate as slate_config
from jaxsearch import registry
from jaxsearch.advantages import truncated_step
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation.verdicts import Estimate
from jaxsearch.methods import slate
from jaxsearch.methods.actions import NO_ROOM, Action, read, search
from jaxsearch.methods.search_r1 import start
from jaxsearch.rewards.judge import erring
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees.tree import Role, Tree
from studies import common
from studies.gradients import Sketches, brief, cut, estimate, figures, moments, resamples

K, CHAINS = 5, 8              # siblings of a step; chains of a question for the gradient of expected EM
BATCH = 16                    # questions whose whole chains are the budget of a mini-batch
ROOM = 1024                   # tokens of a path
FACTOR, COSINE = 1.25, 0.05   # smallest differences that matter: of noise over signal, and of cosines
JUDGES = {'judge': {}} | {f'judge, {kind} {share:.0%}': {kind: share} for kind in ('errors', 'lenient')
                          for share in (0.1, 0.2, 0.3)}
SIZES = {'full': {'blocks': 64, 'questions': 2, 'reference': 4},  # see measure
         'small': {'blocks': 4, 'questions': 1, 'reference': 1}}

STEPS = 6  # of the training of the policy
TRAINING = ('--config=configs/search_r1_grpo.py', '--config.data.hops=(2,3,4)',
            '--config.data.arithmetic=False', '--config.questions_per_step=24', f'--config.steps={STEPS}',
            '--config.eval.every=0')


# Trees and what they earn.

def grow(question: Question, tree: Tree, *, steps: int, k: int, max_tokens: int, template: str, chat: bool,
         whole: bool = False, judges: Sequence[Callable] = ()) -> Growth[None]:
  """Grows k siblings for each step, and a chain from each; `whole` stops after the first step.

  data['groups'] at the root holds the chains of each step, lists of nodes that begin with the siblings. The
  last node of a chain has its data['em']; siblings and whole chains have data['rewards'], one a judge.
  """
  node, groups = start(tree, question, template, chat), []
  for step in range(1, steps + 1):
    spans = yield [Generate(node, stop=tree.grammar.stops, max_tokens=max_tokens)] * k
    siblings = [read(span) for span in spans]
    yield from search(siblings, tree)
    chains = yield from slate.completed(siblings, tree, steps - step, max_tokens)
    for chain in chains:
      chain[-1].node.data['em'] = question.score(chain[-1].answer)
      for action in chain if step == 1 else chain[:1]:
        action.node.data['rewards'] = rewards(action, tree, judges)
    groups.append([[action.node for action in chain] for chain in chains])
    goes_on = siblings[tree.rng.integers(k)]
    if whole or step == steps or goes_on.answer is not None or goes_on.node.stop in NO_ROOM:
      break
    node = goes_on.node.children[0]
  tree.root.data['groups'] = groups


def rewards(action: Action, tree: Tree, judges: Sequence[Callable]) -> list[float]:
  """Returns what each judge gives an action by eqs. 5 and 6, without the bonus for early answers."""
  # The thought, and the search or the answer if there is one.
  items = [ask.item for ask in next(slate.judged([action], tree, 1, 1, 0.0))]
  return [sum(judge(items)) - (len(items) == 1) for judge in judges]


class Earned(NamedTuple):
  """What Q trees earned by R rewards, the last of which is EM; a step that was not reached is all 0."""
  steps: np.ndarray   # [Q,T,R,k] of siblings
  whole: np.ndarray   # [Q,R,k] of whole chains
  taken: np.ndarray   # [Q,T] whether the step was reached


def earned(trees: Sequence[Tree], steps: int, judges: int) -> Earned:
  """Reads what trees of at most `steps` actions earned."""
  k = len(trees[0].root.data['groups'][0])
  of = Earned(np.zeros((len(trees), steps, judges + 1, k)), np.zeros((len(trees), judges + 1, k)),
              np.zeros((len(trees), steps), bool))
  for q, tree in enumerate(trees):
    for t, chains in enumerate(tree.root.data['groups']):
      of.taken[q, t] = True
      for j, chain in enumerate(chains):
        of.steps[q, t, :, j] = [*chain[0].data['rewards'], chain[-1].data['em']]
        if t == 0:
          summed = np.sum([node.data['rewards'] for node in chain], axis=0)
          of.whole[q, :, j] = [*summed, chain[-1].data['em']]
  return of


class Scores(NamedTuple):
  """Sketched gradients of log-probabilities of the actions of Q trees."""
  siblings: np.ndarray  # [Q,T,k,width]
  rests: np.ndarray     # [Q,k,width], of the whole chains without their first actions


def scores(trees: Sequence[Tree], steps: int, sketches: Sketches) -> Scores:
  """Computes the scores of trees of at most `steps` actions."""
  k = len(trees[0].root.data['groups'][0])
  spans = [[[chain[0]] for chain in chains] for tree in trees for chains in tree.root.data['groups']]
  places = [(q, t) for q, tree in enumerate(trees) for t in range(len(tree.root.data['groups']))]
  siblings = np.zeros((len(trees), steps, k, sketches.width), np.float32)
  found = sketches([span for group in spans for span in group])
  siblings[tuple(zip(*places))] = found.reshape(-1, k, sketches.width)
  rests = sketches([chain[1:] for tree in trees for chain in tree.root.data['groups'][0]])
  return Scores(siblings, rests.reshape(len(trees), k, -1))


def expected_em(trees: Sequence[Tree], sketches: Sketches) -> np.ndarray:
  """Returns the gradient [Q,width] of the expected EM of every question, from its whole chains alone."""
  groups = [tree.root.data['groups'][0] for tree in trees]
  em = np.array([[chain[-1].data['em'] for chain in chains] for chains in groups])
  weights = np.asarray(truncated_step(em, normalize_std=False)) / em.shape[1]
  of_chains = sketches([chain if weight else [] for chains, of in zip(groups, weights)
                        for chain, weight in zip(chains, of)])
  return np.einsum('qk,qkw->qw', weights, of_chains.reshape(*em.shape, -1))


class Estimator(NamedTuple):
  """How actions are credited, and so what a gradient is an estimate of."""
  whole: bool
  reward: str           # a judge, 'EM', or 'shuffled' (EM of another chain)
  divided: bool = False
  k: int = K

  def __str__(self):
    return ', '.join([('truncated', 'whole')[self.whole], self.reward, *['divided'] * self.divided,
                      *[f'k = {self.k}'] * (self.k != K)])


def cost(tree: Tree, of: Estimator) -> int:
  """Counts the tokens that an estimator needs of a tree: those on the paths to its last spans, each once."""
  groups = tree.root.data['groups'][:1 if of.whole else None]
  completed = of.whole or of.reward == 'EM'
  ends = [chain[-1 if completed else 0] for chains in groups for chain in chains[:of.k]]
  return sum(len(node.tokens) for node in {node for end in ends for node in end.path()})


def read_rewards(of: Estimator, earned: Earned) -> np.ndarray:
  """Returns what each chain [Q,k] or sibling [Q,T,k] is compared by."""
  reward = list(JUDGES).index(of.reward) if of.reward in JUDGES else -1
  return (earned.whole if of.whole else earned.steps)[..., reward, :of.k]


def alike(of: Estimator, earned: Earned) -> float:
  """Returns the share of groups whose members earned all the same, so that nothing is learnt from them."""
  same = np.ptp(read_rewards(of, earned), axis=-1) == 0
  return same.mean() if of.whole else same[earned.taken].mean()


def gradients(of: Estimator, scores: Scores, earned: Earned) -> np.ndarray:
  """Returns the gradient [Q,width] of every question."""
  values = read_rewards(of, earned)
  if of.reward == 'shuffled':
    values = np.random.default_rng(0).permuted(values, axis=-1)
  weights = np.asarray(truncated_step(values, normalize_std=of.divided)) / of.k
  if of.whole:
    return np.einsum('qk,qkw->qw', weights, scores.siblings[:, 0] + scores.rests, optimize=True)
  return np.einsum('qtk,qtkw->qw', weights, scores.siblings[:, :, :of.k], optimize=True)


def theorem(of: Earned, reward: int, weights: np.ndarray) -> dict[str, list]:
  """Returns the ratio of advantage variances, truncated over whole: the two sides of eq. 9 without 1/T.

  Over all T steps, of which those after an answer have no variance, and over the steps that were reached.
  """
  spread = lambda values: np.square(values - values.mean(-1, keepdims=True)).mean(-1)
  total = lambda values: weights @ cut(values[:, None], weights.shape[1])[:, 0]
  ratio = total(spread(of.steps[:, :, reward]).mean(1)) / total(spread(of.whole[:, reward]))
  ratios = {'all steps': ratio, 'steps reached': ratio * weights.sum(1) / total(of.taken.mean(1))}
  return {name: brief(estimate(of)) for name, of in ratios.items()}


# Parts and tables.

ROWS = [Estimator(whole, reward, divided) for divided in (False, True) for reward in (*JUDGES, 'EM')
        for whole in (True, False)]


def fewer(steps: int) -> list[int]:
  """Returns the k = G/T of proposition 2, rounded up; with 1, which has nothing to compare, also 2."""
  k = math.ceil(K / steps)
  return [k] if k > 1 else [k, 2]


def trained() -> str:
  """Returns the folder of the policy, trained first if it is not there."""
  folder = pathlib.Path('runs/studies/slate_policy')
  if not (folder / 'checkpoints' / str(STEPS)).is_dir():
    command = [sys.executable, '-m', 'jaxsearch.cli', 'train', *TRAINING, f'--config.out={folder}']
    subprocess.run(command, check=True, stdout=sys.stderr)
  return str(folder)


@np.errstate(divide='ignore', invalid='ignore')  # draws without a value are NaN
def measure(steps: int, policy: str, blocks: int, questions: int, reference: int) -> dict[str, Any]:
  """Returns the row of chains of at most `steps` actions.

  Args:
    policy: 'trained' or 'start'.
    blocks: mini-batches.
    questions, reference: of each, the latter for the gradient of expected EM.
  """
  config = slate_config.get_config()
  config.sampler.length = ROOM
  need = blocks * (questions + reference)
  # Few paths have four hops; T = 5 takes comparisons of two paths, which may be guessed.
  asked = (common.paths('world:rl', (steps - 1,)) if steps < 5 else
           load_questions('world:rl', hops=(steps - 1,), arithmetic=False))[:need]
  if len(asked) < need:
    raise ValueError(f'there are {len(asked)} questions of {steps - 1} hops, not {need}')
  bed = common.open_bed(config, asked[:blocks * questions], '' if policy == 'start' else trained())
  others = dataclasses.replace(bed, questions=asked[blocks * questions:])
  settings = {name: config.grow[name] for name in ('max_tokens', 'template', 'chat')} | {'steps': steps}
  judges = [erring(registry.find('judges', 'world'), **wrong) for wrong in JUDGES.values()]
  own = functools.partial(grow, k=K, judges=judges, **settings)
  trees = [tree for tree, in common.grow(bed, 0, own=own)]
  own = functools.partial(grow, k=CHAINS, whole=True, **settings)
  far = [tree for tree, in common.grow(others, 1, own=own)]
  sketches = Sketches(bed.policy.config, bed.policy.params)
  target, of_trees = cut(expected_em(far, sketches), blocks), scores(trees, steps, sketches)
  of_rewards = earned(trees, steps, len(judges))
  rng = np.random.default_rng(0)
  weights, target_weights = resamples(blocks, rng), resamples(blocks, rng)
  tokens = functools.cache(lambda of: float(np.mean([cost(tree, of) for tree in trees])))
  smaller = [Estimator(False, reward, k=k) for k in fewer(steps) for reward in ('judge', 'EM')]

  def drawn(of: Estimator) -> dict[str, np.ndarray]:
    scale = questions * tokens(of) / (BATCH * tokens(ROWS[0]))
    of_blocks = cut(gradients(of, of_trees, of_rewards), blocks)
    return figures(of_blocks, scale, target, weights, target_weights)

  every = {str(of): drawn(of) for of in (*ROWS, *smaller, Estimator(True, 'shuffled'))}
  chains = [chain for tree in trees for chain in tree.root.data['groups'][0]]
  nodes = [node for tree in trees for node in tree.nodes(Role.POLICY)]
  signal, noise = moments(target, target_weights)
  briefly = lambda of: {name: brief(estimate(values)) for name, values in of.items()}
  return {
    'T': steps, 'questions': len(trees), 'em': float(of_rewards.whole[:, -1].mean()),
    'actions': float(np.mean([len(chain) for chain in chains])),
    'steps': float(of_rewards.taken.sum(1).mean()), 'spans': len(nodes),
    'no_room': sum(node.stop in NO_ROOM for node in nodes),
    'malformed': sum(tree.metrics['malformed'] for tree in trees),
    'alike': {str(of): float(alike(of, of_rewards)) for of in ROWS if not of.divided},
    'tokens': {str(of): tokens(of) for of in (*ROWS, *smaller) if not of.divided},
    'own_of_target': brief(estimate(np.sqrt(np.maximum(signal, 0) / (signal + noise)))),
    'theorem': {reward: theorem(of_rewards, place, weights) for reward, place in (('judge', 0), ('EM', -1))},
    'figures': {name: briefly(of) for name, of in every.items()},
    'contrasts': briefly(contrasts(every, steps, tokens)),
  }  # fmt: skip


def contrasts(every: Mapping[str, Mapping[str, np.ndarray]], steps: int,
              tokens: Callable[[Estimator], float]) -> dict[str, np.ndarray]:
  """Returns the draws of every contrast of two estimators; above 0 is in favour of the first.

  'quieter' is the logarithm of the factor between noise over signal, 'closer' the difference of `towards`.
  """
  of = lambda figure, estimator: every[str(estimator)][figure]
  quieter = lambda a, b: np.log(of('noise over signal', b) / of('noise over signal', a))
  found = {}
  for divided in (False, True):
    for name, a, b in (('truncation, judge', (False, 'judge'), (True, 'judge')),
                       ('truncation, EM', (False, 'EM'), (True, 'EM')),
                       ('judge, truncated', (False, 'judge'), (False, 'EM')),
                       ('judge, whole', (True, 'judge'), (True, 'EM')),
                       ('SLATE, Search-R1', (False, 'judge'), (True, 'EM'))):
      a, b, name = Estimator(*a, divided), Estimator(*b, divided), name + ', divided' * divided
      found |= {f'{name}: quieter': quieter(a, b), f'{name}: closer': of('towards', a) - of('towards', b)}
  for reward, k in itertools.product(('judge', 'EM'), fewer(steps)):  # as many questions, whatever they cost
    a, b = Estimator(False, reward, k=k), Estimator(True, reward)
    found[f'proposition 2, {reward}, k = {k}: quieter'] = quieter(a, b) + np.log(tokens(a) / tokens(b))
  return found


def primary(steps: int) -> dict[str, float]:
  """Returns the margins of the primary contrasts of the plan."""
  return {'truncation, judge: quieter': math.log(FACTOR), 'truncation, judge: closer': COSINE,
          f'proposition 2, judge, k = {fewer(steps)[0]}: quieter': math.log(FACTOR)}


def bounded(ratio: Sequence[float | None], bound: float) -> str:
  """Says whether theorem 1 holds: the interval of a ratio lies below its bound, above, or on both sides."""
  low, high = (math.nan if x is None else x for x in ratio[1:3])
  return 'holds' if high <= bound else 'does not hold' if low > bound else 'undecided'


def study(settings: argparse.Namespace, path: pathlib.Path) -> str:
  """Returns the tables of the study; a row of its file is a T."""
  lengths = [int(steps) for steps in settings.lengths.split(',')]
  size = {name: getattr(settings, name) for name in SIZES['full']}
  parts = {f'{settings.policy}, T = {steps}': functools.partial(measure, steps, settings.policy, **size)
           for steps in lengths}
  rows = common.measured(path, parts)
  read = lambda of: Estimate(*(math.nan if x is None and i < 3 else x for i, x in enumerate(of)))
  shown = lambda of: '?' if of is None or of[0] is None else '{:.3g} [{}, {}]'.format(
    of[0], *('?' if x is None else f'{x:.3g}' for x in of[1:3]))
  figures = ('noise over signal', 'own', 'direction', 'towards')
  name_of = lambda part, name: f'{part}, {name}'
  tables = [
    [{'chains': part} | {name: row[name] for name in (
      'questions', 'em', 'actions', 'steps', 'spans', 'malformed', 'no_room')} | {
        'own of the gradient of EM': shown(row['own_of_target'])} for part, row in rows.items()],
    [{'estimator': name_of(part, name), 'tokens': row['tokens'].get(name.replace(', divided', '')),
      'alike': row['alike'].get(name.replace(', divided', ''))} | {
        figure: shown(of[figure]) for figure in figures}
     for part, row in rows.items() for name, of in row['figures'].items()],
    common.decide({name_of(part, name): (read(of), primary(row['T']).get(name)) for part, row in rows.items()
                   for name, of in row['contrasts'].items()}),
    [{'advantage variance': name_of(part, reward), '1/T': 1 / row['T']} | {
      name: shown(of) for name, of in row['theorem'][reward].items()} | {
        'verdict': bounded(row['theorem'][reward]['steps reached'], 1 / row['T'])}
     for part, row in rows.items() for reward in row['theorem']],
  ]
  return '\n\n'.join(map(common.table, tables))


if __name__ == '__main__':
  common.main('slate', study, SIZES, policy='trained', lengths='3,4,5')
