"""Does the work of a step on the devices: readies the sampler, asks the critic, makes the updates.

`compile_first` comes before the first step on an accelerator; `prepare` loads the newest parameters into the
sampler; `assess` writes a critic's values onto the trees; `update` makes all updates of a step.
learner.py opens what they work on.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from jaxsearch.parallel import memory, transfer
from jaxsearch.sampler.driver import Agent
from jaxsearch.training import batch as batches, judging, metrics
from jaxsearch.training.batch import Groups
from jaxsearch.training.learner import Learner, score_passes
from jaxsearch.training.step import by_sequence
from jaxsearch.trees.tree import Tree


def policy_params(learner: Learner) -> dict:
  """Returns the parameters of the policy as it is now, in the compute dtype: what moves is small."""
  with transfer.issuing():
    return learner.policy(learner.base, learner.state.params)


def prepare(learner: Learner, step: int) -> Agent:
  """Returns the agent with the newest parameters; a simulated search hears how far training is."""
  agent = learner.agent
  agent.engine.unload(cache=learner.releases)  # the old go before the new come
  agent.engine.load(transfer.local(policy_params(learner)))  # it takes copies: updates overwrite these
  if hasattr(agent.tools.search, 'set_step'):
    agent.tools.search.set_step(step, learner.config.steps)
  return agent


def compile_first(learner: Learner) -> None:
  """Compiles the sampler's programs, and has the person who waits told how many a first step needs in all."""
  engine, config = prepare(learner, 0).engine, learner.config
  trained = ['score'] * bool(score_passes(config)) + ['train_step']
  critic = [] if learner.values is None else ['score', 'train_step']  # of the same functions
  metrics.await_programs([name for name, _ in engine.programs()] + critic + trained)
  engine.compile_all()


def assess(learner: Learner, trees: Sequence[Tree]) -> dict[str, float]:
  """Has the judge, if any, score the answers and returns its figures; writes the critic's values, if any."""
  figures = judging.judge(learner, trees)
  if learner.values is not None:
    write_values(learner, trees)
  return figures


@memory.named('computing values', memory.UPDATE)
def write_values(learner: Learner, trees: Sequence[Tree]) -> None:
  """Writes the critic's values onto the trained spans."""
  config = learner.config
  packed = batches.pack(trees, learner.mesh, config.train, attention=config.attention,
                        at_most=config.questions_per_step * config.group_size)
  params = learner.state.params if config.critic.shared else learner.state.critic.params
  with transfer.issuing():
    values = learner.values(params, packed.batch)
  batches.note(packed, values, 'values')


@memory.named('updating the policy', memory.UPDATE)
def update(learner: Learner, groups: Groups, step: int, clock: metrics.Clock) -> dict[str, float]:
  """Makes all updates of a step; returns its metrics.

  They are `epochs` passes over the trees, each with an update for every part of about `mini_batch` trees. The
  parts stay the same in all passes, their order does not. A part has trees of all processes, each of which
  lays out its own; its loss is averaged over the part.
  """
  config, rng = learner.config, np.random.default_rng([learner.config.seed, step])
  critic, settings = config.critic, config.train
  clipped = critic.enabled and not critic.shared and critic.value_clip is not None  # then every return counts
  spans = [node for tree in itertools.chain(*groups) for node in tree.walk() if node.trained and node.tokens]
  if critic.enabled and spans and all(node.returns is None for node in spans):
    raise ValueError(f'critic.enabled=True: the credit of method={config.method!r} sets no returns, which '
                     'a critic learns')
  whole = by_sequence(config.loss.kind, config.loss.importance)
  apart = clipped or whole or settings.carry  # carried chains of other parameters had other log-probabilities
  at_most = settings.mini_batch or config.questions_per_step * config.group_size
  parts = [batches.pack(forest, learner.mesh, settings, attention=config.attention, at_most=at_most,
                        share_trained=not apart, sequences=whole, critic=critic.enabled)
           for forest in batches.split(groups, settings.mini_batch, rng)]
  with clock('score'):
    parts = score(learner, parts)
    jax.block_until_ready([part.batch for part in parts])
  with clock('train'):
    results = [learn(learner, parts[i].batch)
               for _ in range(settings.epochs) for i in rng.permutation(len(parts))]
    row = metrics.mean_of([metrics.to_row(result) for result in results])
  rows, tokens = sum(part.rows_of_all for part in parts), sum(part.tokens_of_all for part in parts)
  return row | {'tokens_in_rows': tokens, 'rows': rows, 'updates': len(results),
                'padded_share': 1 - tokens / (rows * settings.row_length)}


def score(learner: Learner, parts: Sequence[batches.Packed]) -> list[batches.Packed]:
  """Puts log-probabilities into the batches: of the policy before all updates, and of the reference.

  Writes them onto the spans too, where rollouts are kept for viewers.
  """
  config, reference, recomputes = learner.config, learner.reference, learner.recomputes
  one_update = config.train.epochs == 1 and not config.train.mini_batch  # its own logprobs are the old ones
  policy = policy_params(learner) if recomputes and not one_update else None

  def scored(part: batches.Packed) -> batches.Packed:
    of = lambda params: None if params is None else learner.score(params, part.batch)
    with transfer.issuing():
      old = of(policy) if recomputes else part.batch.old_logprobs
      batch = dataclasses.replace(part.batch, old_logprobs=old, ref_logprobs=of(reference))
    return dataclasses.replace(part, batch=batch)

  parts = [scored(part) for part in parts]
  for part in parts if config.rollouts else ():
    if policy is not None:
      batches.note(part, part.batch.old_logprobs, 'old_logprobs')
    if reference is not None:
      batches.note(part, part.batch.ref_logprobs, 'ref_logprobs')
  return parts


def learn(learner: Learner, batch: batches.Batch) -> dict[str, jax.Array]:
  """Updates the policy, then the critic, which may move the same backbone; returns their metrics."""
  critic, shared = learner.state.critic, learner.config.critic.shared
  with transfer.issuing():
    policy, result = learner.train_step(dataclasses.replace(learner.state, critic=None), batch, learner.base)
  if critic is not None:
    with transfer.issuing():
      critic = dataclasses.replace(critic, params=policy.params) if shared else critic
      critic, figures = learner.critic_step(critic, batch)
    names = 'loss', 'grad_norm', 'value', 'skipped', 'skipped_in_a_row'
    result |= {f'critic_{name}': figures[name] for name in names}
    if shared:
      policy = dataclasses.replace(policy, params=critic.params)
      critic = dataclasses.replace(critic, params={})
  learner.state = dataclasses.replace(policy, critic=critic)
  return result
