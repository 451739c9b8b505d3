"""One file per system: how its trees grow, what they earn, and which spans are credited with it.

A method is a module with `grow` and `credit`. This is all that the rest relies on:

  grow(question, tree, **config.grow)
      A generator. It appends prompts and observations to nodes and yields requests (sampler/requests.py), one or a list.
      A list is served together and replied to in its order; `children` stand in the order in which they were finished.
      The prompt is `search_r1.start`; random numbers come from `tree.rng`. It sets
        tree.answer   the final answer or None (`em`, `f1` and the predictions of an evaluation)
        tree.stop     a `Stop`: why the episode ended
        tree.metrics  numbers by name. `searches`, `malformed` and `tool_failures` begin at 0, since evaluation and rejection
                      sampling read them; CuSearch reads `found`. A missing one reads as 0, but the row of a step holds the
                      mean of each over the trees that have it: begin your own counts with 0
        node.trained  False keeps a policy span out of the loss
  credit(groups, context, **config.credit)
      `groups` holds the trees of each question of the batch. They are pruned (every leaf is a trained span),
      and trees too long for a training row are left out, so that `groups` may even be empty. It sets
        tree.reward       for the row of metrics; None is left out of its mean
        node.advantages   a number or one per token, on every trained span of a tree or on none: such a tree is not trained on
        node.returns      one per token, where `config.critic.enabled`: spans then come with `node.values`, and `credit` is
                          also called on the single trees of an evaluation
        context.metrics   figures for the row of the step; context.memory is saved with checkpoints, context.rng is seeded
  Optional
      sizes(questions, group_size, context, **config.sizes) -> [int]   trees to grow for each question
      reward(tree) -> float   needed by `jaxsearch critic-warmup` alone
      SERVICES = ('judge', …)   frozen models that `grow` may `Ask`, opened from config.judge …; without one (`jaxsearch eval`)
                                the reply is a `ToolFailure`
      ONE_TREE = True   credit compares nothing between the trees of a question, so group_size=1 is allowed

Settings are keyword-only and have defaults. credit.py holds credit that methods share. Which average (trees/layout.py) fits:

  what is credited                                    credit                                      train.aggregate
  chains against the others of their question         credit_relative                             token-mean, seq-mean-token-mean
  chains, token by token                              credit_with_critic                          token-mean
  a chain with side branches, or a selection          credit_relative                             seq-mean-token-mean
  alternatives for each step of one path              as they grow (slate.py), credit_siblings    step-mean
  segments of a chain                                 advantages.smdp_td (carl.py)                step-mean
  branches of a search, as many as there are          credit_siblings                             span-mean

Advantages with mean 0 make `policy_loss` about 0 in the first update of a step, whatever is learned: watch `grad_norm`, `kl`,
`entropy`, `clip_fraction`, `reward`, and `groups_alike`, the share of groups in which all rewards are equal.
"""

import dataclasses
import importlib
import types
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Context:
  """What a method may know besides the trees.

  Attributes:
    step: number of the training step, from 1; 0 in an evaluation.
    rng: random numbers, a function of the seed and the step.
    memory: what the method keeps from step to step; part of the checkpoint, so it holds only what JSON can.
    metrics: figures of the step, for its row of metrics.jsonl.
  """
  step: int
  rng: np.random.Generator
  memory: dict[str, Any]
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def find_method(name: str) -> types.ModuleType:
  """The module jaxsearch/methods/NAME.py; ValueError if there is none, or if it has no `grow` or no `credit`."""
  try:
    method = importlib.import_module(f'jaxsearch.methods.{name}')
  except ModuleNotFoundError as error:
    if error.name != f'jaxsearch.methods.{name}':
      raise  # the method is there, but something that it imports is not
    raise ValueError(f'method={name!r}: there is no jaxsearch/methods/{name}.py') from error
  if not (hasattr(method, 'grow') and hasattr(method, 'credit')):
    raise ValueError(f'method={name!r}: jaxsearch/methods/{name}.py is no method, it has no grow and credit')
  return method
