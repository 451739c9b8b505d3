"""SLATE's variance theorem, measured: advantages among siblings against advantages among whole trajectories.

    python benchmarks/variance.py [--questions 60] [--gradients 20] [--plot docs/plots/variance.png]

Theorem 1 of SLATE (arXiv 2602.23440, section 4, proof in A.3) compares, under one additive reward R = r_1 + … + r_T, of which
r_t is the judged reward of action t (eqs. 5 and 6), two estimators with groups of equal size k = G:

  whole       G trajectories of T actions from the question, A_i = R_i - mean(R)
  truncated   k actions from one prefix of t - 1 actions, A_j = r_t,j - mean(r_t)

Neither is divided by a standard deviation. Under three assumptions (the reward of a step and the sum of those that follow do
not covary negatively given the prefix; rewards are independent given the prefix; their variance is alike at all steps)

  E_prefix Var[A_j | prefix]  <=  Var[A_i] / T        (eq. 9; <= Var[A_i] under the first alone, eq. 8)

The group's own mean is part of both, hence the factor 1 - 1/k on both sides (eq. 13); as every A has mean zero its variance is
the mean of its squares. Prefixes are drawn from the policy itself, as the proof has them (eq. 12): each is the beginning of a
whole trajectory, whose own action is then one of the k. SLATE itself goes on with softmax(A / eta), which the theorem leaves
out. Both sides are taken for each question and averaged over questions; the left one is averaged over the steps too, which
makes of eq. 9 just what eq. 18 says, so that only the sum over steps matters and unlike steps do no harm.

The theorem wants trajectories of exactly T actions, but the policy may answer at any of them. An action before the last that
answers is therefore drawn again: actions come from the policy conditioned, at each step, on not answering yet. That is a
policy of its own, which both estimators sample and the theorem applies to as it stands. (Keeping only the trajectories that
happen to have T actions would not do: when a sibling is judged, its final length is unknown.) The last action is free and ends
the trajectory, as with a budget of B = T, where no early-answer bonus is paid. An action that is neither search nor answer is a
step too, and gets the observation that says so. T actions go with questions that need T - 1 searches.

Proposition 2 (A.4): k = G/T actions a step, rounded up and at least 2, give a mean advantage of no more variance than G whole
trajectories (eq. 21: the ratio above times G/k is at most 1), and cost 1/T of their tokens (eq. 23). The tokens are counted.

A.6 says that the policy gradient then has less variance too. For the first `--gradients` questions everything is sampled
twice, at the same weights, and the gradients of eqs. 10 and 11, summed over steps and times k / (k - 1), are computed: half
the squared distance of the two is an unbiased estimate of a gradient's variance (the trace of its covariance), their scalar
product one of the squared length of its mean, the signal. Both are given truncated over whole, with k = G and with the k of
proposition 2. The mean itself is another one (A.7): siblings are credited with the reward of their own step, not with what
follows from it. The score is that of the policy, not of the policy that may not answer; among siblings the difference cancels,
as their advantages sum to 0.

The policy, its search and its judge are those of configs/slate.py. A question where an answer comes up `DRAWS` times in a
row, or whose path does not fit, is left out and counted. The last line is one JSON object: for every T the ratio of the two
variances, its 95 % interval from a bootstrap over questions, whether 1/T lies above it ('holds'), below it ('fails') or in it
('open'), the ratios of single steps, and the mean correlation of the rewards of two steps of a trajectory, which is 0 where
the law with 1/T is exact: in step with each other they raise the variance of whole trajectories, against each other they
lower it. 'proposition_2' and 'gradient' hold what is said above, with intervals and verdicts alike.
"""

import argparse
import copy
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import slate as slate_config
from jaxsearch import registry
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation.agents import load_policy, open_agent
from jaxsearch.methods import actions, slate
from jaxsearch.methods.search_r1 import start
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import Generate, Request
from jaxsearch.training.batch import Batch, make_batch
from jaxsearch.training.step import micro_batch, predicting_states, trained_logprobs
from jaxsearch.trees import grammar
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Node, Role, Stop, Tree

LENGTHS = (2, 3, 4, 5)  # T
DRAWS = 30              # of an action that is not to be an answer
RESAMPLES = 10_000
ROOM = 1024             # tokens of a path: in training 640 do, but chains that go wrong and never answer get longer


def advantage_variance(rewards: np.ndarray) -> np.ndarray:
  """Variance of `r - mean` within groups (SLATE, section 4): the mean of its squares, an estimate of (1 - 1/k) Var[r].

  Args:
    rewards: [..., k], of the members of each group.
  Returns:
    [...].
  """
  return np.square(rewards - rewards.mean(-1, keepdims=True)).mean(-1)


def step_ratios(whole: np.ndarray, siblings: np.ndarray) -> np.ndarray:
  """Truncated over whole-trajectory variance, for each step (the two sides of SLATE's eq. 9 without 1/T).

  Args:
    whole: [questions, k, T], rewards of the steps of k trajectories.
    siblings: [questions, T, k], rewards of k actions from one prefix at each step.
  Returns:
    [T]; both variances are averaged over questions first.
  """
  return advantage_variance(siblings).mean(0) / advantage_variance(whole.sum(-1)).mean()


def interval(whole: np.ndarray, siblings: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES) -> list[float]:
  """The middle 95 % of the mean of `step_ratios` over questions drawn with replacement; arguments as there."""
  truncated, full = advantage_variance(siblings).mean(-1), advantage_variance(whole.sum(-1))
  drawn = rng.integers(len(full), size=(resamples, len(full)))
  return np.quantile(truncated[drawn].mean(-1) / full[drawn].mean(-1), (0.025, 0.975)).tolist()


def step_correlation(whole: np.ndarray) -> float:
  """Mean over pairs of steps of the correlation of their rewards among the trajectories of a question.

  Means are those of each question; products are averaged over questions before they are divided. A step whose reward never
  varies is correlated with none.

  Args:
    whole: [questions, k, T].
  """
  centred = whole - whole.mean(1, keepdims=True)
  covariance = np.einsum('qks,qkt->st', centred, centred)
  spread = np.sqrt(np.diag(covariance))
  scale = np.outer(spread, spread)
  correlation = np.divide(covariance, scale, out=np.zeros_like(covariance), where=scale > 0)
  return float(correlation[np.triu_indices(len(spread), 1)].mean())


def enough(k: int, steps: int) -> int:
  """The k = G/T of proposition 2, for groups of `k` whole trajectories; one alternative alone has no advantage."""
  return max(2, -(-k // steps))


def proposition_2(whole: np.ndarray, siblings: np.ndarray, tokens_whole: np.ndarray, tokens_siblings: np.ndarray,
                  limits: list[float]) -> dict:
  """The two sides of eqs. 21 and 23 at `enough` alternatives.

  Args:
    whole, siblings: as in `step_ratios`.
    tokens_whole, tokens_siblings: of the same shapes, how long each action is.
    limits: the interval of the theorem's ratio.
  """
  groups, steps = whole.shape[1:]
  k = enough(groups, steps)
  low, high = (limit * groups / k for limit in limits)
  return {'k': k, 'variance': round(float(step_ratios(whole, siblings).mean()) * groups / k, 3),
          'interval': [round(low, 3), round(high, 3)], 'bound': verdict(low, high, 1.0),
          'tokens': round(float(tokens_siblings.mean(-1).sum() * k / tokens_whole.sum()), 3)}


def weigh(tree: Tree, k: int, whole: bool) -> None:
  """Puts the weight of its score in the gradient (eq. 10 if `whole`, else eq. 11 with the first k) on every action of a tree.

  That is A / (k - 1), not A / k: as A is taken from a mean that holds the action itself, the mean gradient would be 1 - 1/k of
  what it should be, and groups of unlike size could not be compared.
  """
  for node in tree.nodes(Role.POLICY):
    node.trained = False
  spans, rewards = tree.root.data['spans'], tree.root.data['whole']
  if whole:
    totals = np.tile(rewards.sum(-1), (len(spans), 1))
  else:
    spans, totals = tree.root.data['sibling_spans'], tree.root.data['siblings']
  for nodes, earned in zip(spans, totals):
    for node, advantage in zip(nodes[:k], earned[:k] - earned[:k].mean()):
      node.trained, node.advantages = bool(node.tokens), float(advantage) / (k - 1)


def gradient(tree: Tree, objective_grad: Callable, params: dict, pad_id: int) -> np.ndarray:
  """The gradient estimate of one `weigh`ed tree, as a vector: the sum over its actions of weight times score."""
  tree = copy.deepcopy(tree)
  tree.prune()
  rows = lay_out([tree], ROOM, pad_id=pad_id, how='seq-mean-token-sum')
  batch, total = make_batch(rows, 1), None
  for index in range(int(batch.count)):
    grads = objective_grad(params, micro_batch(batch, index))
    total = grads if total is None else jax.tree.map(jnp.add, total, grads)
  return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(total)])


def objective(params: dict, batch: Batch, config: DecoderConfig) -> jax.Array:
  """The sum of weight * log-probability of one micro-batch, whose gradient is the estimate."""
  logprobs, _ = trained_logprobs(params, predicting_states(config, params, batch), batch, temperature=1.0, chunk=1024)
  return jnp.sum(jnp.where(batch.targets >= 0, (batch.gains - batch.losses) * logprobs, 0))


def noise_and_signal(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
  """Unbiased estimates, from two independent ones, of a gradient's variance and of the squared length of its mean."""
  return float(np.square(first - second).sum() / 2), float(first @ second)


def gradient_figures(pairs: list[tuple[Tree, Tree]], objective_grad: Callable, params: dict, pad_id: int, steps: int, k: int,
                     rng: np.random.Generator) -> dict:
  """Variance and signal of truncated gradients over those of whole ones, from trees grown twice for each question."""
  kinds = {'whole': (k, True), 'truncated': (k, False), 'proposition_2': (enough(k, steps), False)}
  found = {}
  for name, (size, whole) in kinds.items():
    for tree in (tree for pair in pairs for tree in pair):
      weigh(tree, size, whole)
    found[name] = np.array([noise_and_signal(*(gradient(tree, objective_grad, params, pad_id) for tree in pair))
                            for pair in pairs])
  drawn = rng.integers(len(pairs), size=(RESAMPLES, len(pairs)))
  figures = {'questions': len(pairs)}
  for name in ('truncated', 'proposition_2'):
    noise, signal = (found[name].mean(0) / found['whole'].mean(0)).tolist()
    low, high = np.quantile(found[name][drawn, 0].mean(-1) / found['whole'][drawn, 0].mean(-1), (0.025, 0.975)).tolist()
    figures[name] = {'k': kinds[name][0], 'variance': round(noise, 3), 'interval': [round(low, 3), round(high, 3)],
                     'bound': verdict(low, high, 1.0), 'signal': round(signal, 3)}
  return figures


def verdict(low: float, high: float, bound: float) -> str:
  """Whether a quantity with this interval keeps below a bound."""
  return 'holds' if high <= bound else 'fails' if low > bound else 'open'


def grow(question: Question, tree: Tree, *, steps: int, k: int, max_tokens: int, template: str, chat: bool,
         judge: Callable = registry.find('judges', 'world')) -> Generator[Request, Any, None]:
  """Grows `k` whole trajectories of `steps` actions, and `k - 1` siblings of each action of the first of them.

  Leaves rewards at the root, data['whole'] [k, steps] and data['siblings'] [steps, k], and their spans by step, data['spans']
  and data['sibling_spans']. If tree.stop is not Stop.BUDGET there
  are none, and the tree is to be left out: Stop.ANSWERED for want of another action, Stop.CONTEXT_FULL for want of room.
  """
  tree.metrics.update(judge_unreadable=0, answers_refused=0)
  ends, whole, siblings, drawn_by_step = [start(tree, question, template, chat)] * k, [], [], []
  for step in range(1, steps + 1):
    behind = ends + [ends[0]] * (k - 1)
    drawn = yield from draw(behind, step == steps, max_tokens, tree)
    if drawn is None:
      return
    yield from actions.search(drawn, tree)
    rewards = [rewarded(candidate, step, steps, tree, judge) for candidate in drawn]
    drawn_by_step.append([candidate.node for candidate in drawn])
    whole.append(rewards[:k])
    siblings.append([rewards[0], *rewards[k:]])
    ends = [action.node.append(action.observation, Role.OBSERVATION) for action in drawn[:k]] if step < steps else []
  tree.stop = Stop.BUDGET
  tree.root.data.update(whole=np.array(whole).T, siblings=np.array(siblings), spans=[nodes[:k] for nodes in drawn_by_step],
                        sibling_spans=[[nodes[0], *nodes[k:]] for nodes in drawn_by_step])


def draw(behind: list[Node], last: bool, max_tokens: int, tree: Tree) -> Generator[Request, Any, list[actions.Action] | None]:
  """An action behind each node, none of them an answer unless it is the last; None if one cannot be had."""
  drawn: list[actions.Action | None] = [None] * len(behind)
  for _ in range(DRAWS):
    missing = [index for index, candidate in enumerate(drawn) if candidate is None]
    spans = yield [Generate(behind[index], stop=grammar.SEARCH_R1.stops, max_tokens=max_tokens) for index in missing]
    for index, span in zip(missing, spans):
      candidate = actions.read(span)
      if span.stop is Stop.CONTEXT_FULL:
        tree.stop = Stop.CONTEXT_FULL
        return None
      if last or candidate.answer is None:
        drawn[index] = candidate
    refused = drawn.count(None)
    if not refused:
      return drawn
    tree.metrics['answers_refused'] += refused
  tree.stop = Stop.ANSWERED
  return None


def rewarded(candidate: actions.Action, step: int, steps: int, tree: Tree, judge: Callable) -> float:
  """The reward of an action (eqs. 5 and 6); the judge replies at once, so no episode waits for the others."""
  asking = slate.judged([candidate], tree, step, steps, 0.0)
  asked = next(asking)
  try:
    asking.send(judge([ask.item for ask in asked]))
  except StopIteration as end:
    return float(end.value[0])
  raise RuntimeError('a score is asked for once')


def measure(agent, config, params: dict, objective_grad: Callable, steps: int, number: int, gradients: int) -> dict:
  """The figures of trajectories of `steps` actions on the first `number` questions, gradients on the first `gradients`."""
  questions = load_questions(config.data.questions, hops=(steps - 1,), arithmetic=config.data.arithmetic)[:number]
  settings = dict(steps=steps, **{name: config.grow[name] for name in ('k', 'max_tokens', 'template', 'chat')})
  agent = dataclasses.replace(agent, grow=functools.partial(grow, **settings))
  trees, _ = rollout(agent, questions + questions[:gradients], jax.random.key(config.seed))
  trees, again = trees[:len(questions)], trees[len(questions):]
  kept = [tree for tree in trees if tree.stop is Stop.BUDGET]
  pairs = [pair for pair in zip(trees, again) if all(tree.stop is Stop.BUDGET for tree in pair)]
  whole, siblings = (np.stack([tree.root.data[name] for tree in kept]) for name in ('whole', 'siblings'))
  ratios = step_ratios(whole, siblings)
  low, high = interval(whole, siblings, np.random.default_rng(config.seed))
  sizes = lambda name: np.array([[[len(node.tokens) for node in nodes] for nodes in tree.root.data[name]] for tree in kept])
  count = lambda name: sum(int(tree.metrics[name]) for tree in kept)
  return {
    'T': steps, 'one_over_T': round(1 / steps, 3), 'ratio': round(float(ratios.mean()), 3),
    'interval': [round(low, 3), round(high, 3)], 'bound': verdict(low, high, 1 / steps),
    'steps': ratios.round(3).tolist(), 'correlation': round(step_correlation(whole), 3),
    'proposition_2': proposition_2(whole, siblings, sizes('spans'), sizes('sibling_spans'), [low, high]),
    'gradient': gradient_figures(pairs, objective_grad, params, agent.engine.tokenizer.pad_id, steps, config.grow.k,
                                 np.random.default_rng(config.seed)) if pairs else None,
    'variance_whole': round(float(advantage_variance(whole.sum(-1)).mean()), 3),
    'questions': len(kept), 'trajectories': whole.shape[0] * whole.shape[1],
    'left_out': {reason.value: sum(tree.stop is reason for tree in trees) for reason in (Stop.ANSWERED, Stop.CONTEXT_FULL)},
    'groups': siblings.shape[0] * steps, 'answers_refused': count('answers_refused'), 'malformed': count('malformed'),
  }  # fmt: skip


def plot(rows: list[dict], path: str) -> None:
  """Draws the ratios, those of single steps, and 1/T."""
  import matplotlib
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt
  lengths, ratios = np.array([row['T'] for row in rows]), np.array([row['ratio'] for row in rows])
  bars = np.abs(np.array([row['interval'] for row in rows]).T - ratios)
  figure, ax = plt.subplots(figsize=(6, 3.8), layout='constrained')
  fine = np.linspace(lengths[0] - 0.3, lengths[-1] + 0.3, 100)
  ax.plot(fine, 1 / fine, color='#333333', linewidth=1.2, label='bound of the theorem, 1/T')
  single = np.array([(row['T'] + 0.12, value) for row in rows for value in row['steps']])
  ax.plot(*single.T, '.', color='#9cbfe6', label='single steps')
  ax.errorbar(lengths, ratios, bars, fmt='o', color='#1f6fb2', capsize=4, label='measured, 95 % interval')
  ax.set_xticks(lengths)
  ax.set_xlabel('T, actions of a trajectory')
  ax.set_ylabel('truncated / whole-trajectory variance')
  ax.set_ylim(0)
  ax.spines[['top', 'right']].set_visible(False)
  ax.legend(frameon=False, fontsize=9)
  figure.savefig(path, dpi=110)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--questions', type=int, default=60, help='for each T')
  parser.add_argument('--gradients', type=int, default=20, help='of them, those whose gradients are measured; 0 is none')
  parser.add_argument('--plot', default='', help='PNG file to draw the ratios to')
  args = parser.parse_args()
  began = time.perf_counter()
  config = slate_config.get_config()
  config.sampler.length = ROOM
  policy = load_policy(config)
  agent = open_agent(config, policy=policy)
  objective_grad = jax.jit(jax.grad(functools.partial(objective, config=policy.config)))
  rows = []
  for steps in LENGTHS:
    rows.append(measure(agent, config, policy.params, objective_grad, steps, args.questions, args.gradients))
    print(rows[-1], flush=True)
  if args.plot:
    plot(rows, args.plot)
  print(json.dumps({'device': jax.devices()[0].device_kind, 'k': config.grow.k, 'lengths': rows,
                    'seconds': round(time.perf_counter() - began, 1)}))


if __name__ == '__main__':
  main()
