"""One file per method: how its trees grow, what they earn, and which spans are credited with it.

A method is a module with two functions. Their settings are keyword-only, with defaults. credit.py holds shared credit.
Methods without `credit`, such as those in prompted/, are for evaluation only.

  grow(question, tree, **config.grow)        a generator: appends prompts and observations, yields requests (sampler/requests.py)
  credit(groups, context, **config.credit)   `groups` holds the trees of each question of the batch

The contract, word for word as in CONTRIBUTING.md (a test compares them):

  tree.answer      `grow` sets it: the final answer, or None
  tree.stop        `grow` sets it: a `Stop` (answered, budget, context_full, malformed, tool_failed, deadline)
  tree.metrics     numbers by name. `searches`, `malformed` and `tool_failures` start at 0 and are read by evaluation and
                   rejection sampling. They count over the whole tree (SLATE counts `searches` along its path). `searches`
                   counts the searches that were served, failed ones included; a search in the last span is not served and not
                   counted. CuSearch reads `found`. A step's row has the mean of each over trees, named `NAME_per_tree`
                   (`searches` keeps its name). A missing metric reads as 0, but the mean covers only the trees that set it,
                   so initialise your own counters to 0
  tree.question    `tree.question.score(answer)` is 1 or 0 by the rule of the question's data set. Use `exact_match` only where
                   a paper means it literally
  tree.rng, context.rng  take random numbers from these only, in `grow` and in `credit`, so that runs stay reproducible
  Generate         always replies with a node. Without room in the context or past the deadline the node is empty; `node.stop`
                   says so, and pruning removes it
  order            replies come in the order of the requests. `tree.nodes(role)` and `walk()` go depth first. `children` stand
                   in the order in which they were added; for a list of requests, that is the order in which they finished
  node.trained     True for policy spans; set it to False to keep one out of the loss. A policy span that you append yourself
                   needs `logprobs`
  node.data        your notes on a node, kept until `credit`. Texts, numbers, lists and dicts of them let a killed run keep its
                   finished rollouts; with other notes it grows them again. Four names are taken: 'documents', 'calls' (what
                   tools were asked, for `jaxsearch view`), 'segment' (the report's label of the span) and 'reward' (earned at
                   this span, read by `credit_with_critic`)
  before credit    trees are pruned: nodes that carry no loss and have no descendant that does are removed, so every leaf is a
                   trained span. Trees longer than a training row are left out, so `groups` may be empty
  tree.reward      `credit` sets it, for the log; None is left out of the mean
  node.advantages  `credit` sets one number, or one per token, on all trained, non-empty spans of a tree. A tree on which no
                   span has any is not trained on
  node.values, node.returns  with `config.critic.enabled`, `credit` receives spans with `values` set and must set `returns`,
                   one per token. Evaluations then call `credit` too, on groups of one tree
  context          `context.metrics`: figures for the step's row of metrics; a whole number is a count, any other a mean.
                   `context.memory`: what you keep between steps, saved with checkpoints (JSON), the same in every process.
                   `context.step`: from 1; 0 in an evaluation. With several processes `groups` are those of this one; a method
                   that compares across questions asks `context.gather` for those of all
  sizes(questions, group_size, context, …)  optional: the number of trees to grow for each question of the whole batch, the same
                   in every process
  reward(tree)     optional: needed only by `jaxsearch critic-warmup`
  SERVICES = ('judge',)  optional: the frozen models that `grow` asks, 'judge', 'reader' or 'refiner', each opened from the config
                   group of its name. `jaxsearch eval` opens them only for methods without `credit`; in others the reply to
                   `Ask` is a `ToolFailure` there
  ONE_TREE = True  optional: `credit` still learns from a single tree of a question, so `group_size=1` is allowed

config.train.aggregate says how the loss is averaged (trees/layout.py); the second list shows which average fits which credit:

  token-mean           every trained token alike
  seq-mean-token-mean  every tree alike (all its branches are one sequence), and in it every trained token
  seq-mean-token-sum   the sum over a tree's trained tokens, then the mean over trees
  span-mean            every trained span alike, and in it every token
  step-mean            the mean over a span's tokens, the mean over the trained siblings of a step, the sum over the steps of a
                       tree, the mean over trees

  chains against the others of their question            credit_relative                          token-mean, seq-mean-token-mean
  chains, token by token                                 credit_with_critic                       token-mean
  chains with side branches; a selection of chains       credit_relative                          seq-mean-token-mean
  several chains per tree, against all of their question credit_groups                            token-mean
  k alternatives for each step of one path               credit_siblings (slate.py: as they grow) step-mean
  segments of a chain                                    advantages.smdp_td (carl.py)             step-mean
  branches of a search, as many as there are             credit_siblings                          span-mean
  any other groups of spans                              credit_groups                            span-mean

Advantages have mean 0 over a group, so `policy_loss` is near 0 in the first update of a step when spans are alike in length;
it does not measure learning. Watch `grad_norm`, `kl`, `entropy`, `clip_fraction` and `reward`. `groups_alike` is the share of
groups in which all trees have the same `tree.reward`; if you compare something else, count your own in `context.metrics`.
"""

import collections
import dataclasses
import importlib
import numbers
import pkgutil
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsearch.parallel import mesh as meshes


@dataclasses.dataclass(frozen=True)
class Context:
  """What a method may know besides the trees.

  Attributes:
    step: number of the training step, from 1; 0 in an evaluation.
    rng: random numbers, a function of the seed and the step.
    memory: what the method keeps from step to step; part of the checkpoint, so it holds only what JSON can.
    metrics: figures of the step, for its row of metrics.jsonl. With several processes each has its own groups: a whole number is
      a count and is added up over them, any other is a mean and is averaged by their numbers of trees.
  """
  step: int
  rng: np.random.Generator
  memory: dict[str, Any]
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def gather(self, of_groups: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """What all processes say of their groups, in the order of the batch, and which of these this process said.

    For methods that compare across questions. An item should be a few numbers: it goes to every process. All processes must
    call it equally often, those without groups too.
    """
    return meshes.gather_items(of_groups)

  def of_all(self, trees: int) -> dict[str, float]:
    """`metrics` of all processes; `trees` is how many this one has."""
    found = collections.defaultdict(list)
    for metrics, number in meshes.gather_objects((self.metrics, trees)):
      for name, value in metrics.items():
        found[name].append((value, number))

    def joined(values, weights):
      if len(values) == 1 or not any(weights):
        return values[0]
      if all(isinstance(value, numbers.Integral) for value in values):
        return sum(values)
      return float(np.average(values, weights=weights))

    return {name: joined(*zip(*pairs)) for name, pairs in found.items()}


def find_method(name: str) -> types.ModuleType:
  """The module jaxsearch/methods/NAME.py ('prompted.cot' is prompted/cot.py); ValueError without one, or if it has no `grow`."""
  file = f'jaxsearch/methods/{name.replace(".", "/")}.py'
  try:
    method = importlib.import_module(f'jaxsearch.methods.{name}')
  except ModuleNotFoundError as error:
    if not f'jaxsearch.methods.{name}.'.startswith(f'{error.name}.'):
      raise  # the method is there, but something that it imports is not
    raise ValueError(f'method={name!r}: there is no {file}') from error
  if not hasattr(method, 'grow'):
    raise ValueError(f'method={name!r}: {file} is no method, it has no grow')
  return method


def known_methods() -> list[str]:
  """The names of all methods."""
  files = (file.name.removeprefix(f'{__name__}.') for file in pkgutil.walk_packages(__path__, f'{__name__}.'))
  return sorted(name for name in files if hasattr(importlib.import_module(f'{__name__}.{name}'), 'grow'))
