"""Reinforcement learning, a step at a time: draw questions, grow trees, score, credit, update, report.

`train` is `jaxsearch train`. What differs from method to method is found by name in jaxsearch/methods.

Every random number is a function of the seed and the step, and the data order is saved: a resumed run equals
one that was never stopped, to the bit.

With `config.train.async_steps=1` the rollouts of step n + 1 run, on a thread of their own, while step n is
trained, with the parameters that step n begins with. Step 1 and step 2 have the initial ones. All that needs
other processes is done by the main thread, so their order is the same in every process.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxsearch import config_check, setup
from jaxsearch.data.questions import QuestionBatches
from jaxsearch.methods import Context, find_method
from jaxsearch.models import hub
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import requests
from jaxsearch.sampler.driver import Agent
from jaxsearch.training import growing, monitors, progress, runs
from jaxsearch.training.growing import Groups
from jaxsearch.training.learner import Learner, assess, make_learner, prepare, releases, update
from jaxsearch.trees.tree import Role, Stop, Tree

# (agent, config, step, assess) -> rows of evaluations.jsonl; `assess` writes a critic's values onto trees,
# None without one
Assess = Callable[[Sequence[Tree]], None]
Evaluate = Callable[[Agent, ConfigDict, int, Assess | None], Iterable[dict]]


def train(config: ConfigDict, evaluate: Evaluate | None = None) -> dict[str, float]:
  """Trains until `config.steps`, or resumes the run in `config.out`; returns the last row of metrics.

  Args:
    evaluate: answers held-out questions, needed if `config.eval.every` is set; see `evaluation.answers.held_out`.
  """
  meshes.start_distributed(**config.distributed)
  config_check.check(config)
  if config.eval.every and evaluate is None:
    raise ValueError(f'eval.every={config.eval.every}: train was not given an evaluation')
  method, row = find_method(config.method), {}
  loaded = setup.load_questions(config, config.data.questions)[:config.data.number or None]
  questions = QuestionBatches(loaded, config.questions_per_step, seed=config.seed)
  with runs.RunFolder(config, shown=('reward', 'em', 'searches')) as run:
    setup.check_room(config, setup.load_tokenizer(config), loaded, run.say)
    learner = make_learner(config)
    saved = resume(run, learner, questions)
    run.start()
    history = [monitors.remember(row) for row in run.rows()]
    if run.last_step == 0 and run.wants_evaluation(0):
      evaluate_policy(run, learner, method, 0, evaluate)
    ahead = None  # the rollout of the step after, with `async_steps`
    run.callback(lambda: ahead and ahead.abandon())
    for step in run.steps():
      clock = progress.Clock()
      with clock('generate'):
        current = ahead or begin(learner, method, questions, step, saved)
        groups, sampled = grow(learner, current)
        ahead, position = None, questions.get_state()
        if config.train.async_steps and step < config.steps:
          ahead = begin(learner, method, questions, step + 1)
          ahead.start()
      row = sampled | report_failures(run, learner, step, sampled, row)
      with clock('score'):
        assess(learner, [tree for group in groups for tree in group])
      with clock('reward'):
        method.credit(groups, current.context, **config.credit)
      trained = credited(groups)
      row |= summary(groups, trained) | current.context.of_all(sum(map(len, groups)))
      row |= update(learner, trained, step, clock)
      run.write_rollouts(step, groups)
      if ahead:
        with clock('generate'):
          ahead.wait()
      row |= {'step': step} | clock.row(row['tokens_generated'])
      if run.wants_evaluation(step):
        evaluate_policy(run, learner, method, step, evaluate)
      stop = monitors.watch(history, row, config, run.say)
      run.finish_step(step, row, learner.state, lambda: state_of(learner, position, ahead))
      if stop:
        raise runs.RunStopped(stop)
  return row


def state_of(learner: Learner, position: dict, ahead: growing.Growing | None) -> dict:
  """Returns what `resume` needs beside the parameters, as JSON; all processes must call it."""
  return {'memory': learner.memory, 'key': jax.random.key_data(learner.key).tolist(), 'questions': position,
          'following': ahead and ahead.state(), 'failed_steps': learner.failed_steps,
          'reference': learner.fingerprint, 'decoder': dataclasses.asdict(learner.model_config)}


def resume(run: runs.RunFolder, learner: Learner, questions: QuestionBatches) -> dict | None:
  """Puts everything back to where the run's newest checkpoint was made, if there is one.

  Returns the rollouts that were one step ahead, if the checkpoint has any: see `growing.restore`.
  Raises ValueError if the run has another config, or began with another model than `config.model` names now.
  """
  check = lambda host: hub.check_base(host, learner.fingerprint, learner.config.model)
  learner.state, host = run.restore(learner.state, check)
  if host is None:
    return None
  learner.memory, learner.failed_steps = host['memory'], host['failed_steps']
  learner.key = jax.random.wrap_key_data(np.asarray(host['key'], np.uint32))
  questions.set_state(host['questions'])
  return host['following']


def begin(learner: Learner, method: types.ModuleType, questions: QuestionBatches, step: int,
          saved: dict | None = None) -> growing.Growing:
  """Prepares the rollout of a step on the next questions; takes the trees that a checkpoint `saved` for it,
  if any."""
  config, asked = learner.config, next(questions)
  context = Context(step, np.random.default_rng([config.seed, step]), learner.memory)
  if saved and saved['step'] == step:
    return growing.restore(saved, config, learner.agent.engine.tokenizer, asked, context)
  return growing.begin(config, method, prepare(learner, step), learner.key, asked, context)


def grow(learner: Learner, current: growing.Growing) -> tuple[Groups, dict[str, float]]:
  """Returns the trees of this process, pruned, and metrics of its sampler.

  Tokens generated (decoded) and prefilled are those of all processes, pruned branches included: they have
  cost as much.
  """
  trees, row = current.wait()
  row['seconds_rollout'] = row['seconds']  # one step ahead most of them while the step before was trained
  row['tokens_generated'] = row['tokens_decoded']
  costs = meshes.gather_objects({name: row[name] for name in ('tokens_generated', 'tokens_prefilled')})
  row |= {name: sum(cost[name] for cost in costs) for name in costs[0]}
  for tree in trees:
    tree.prune()
  if releases(learner.config, jax.default_backend()):
    learner.agent.engine.unload(cache=True)
  return growing.groups_of(current, trees), row


def report_failures(run: runs.RunFolder, learner: Learner, step: int, sampled: dict,
                    before: dict) -> dict[str, int]:
  """Says at once what mostly failed in the rollout of a step, and counts the steps in a row whose searches
  did.

  Args:
    sampled: the metrics of this process's rollout; those of all processes are looked at together.
    before: the row of the step before.
  Returns:
    What was asked and failed in all processes, and `failed_steps_in_a_row`, which `RunFolder.finish_step`
    holds against `config.search.max_failed_steps`.
  """
  everywhere, told = runs.failures_of_all(sampled), meshes.gather_objects(requests.failing(sampled, before))
  learner.failed_steps = learner.failed_steps + 1 if requests.mostly_failed(everywhere) else 0
  if message := next(filter(None, told), None):
    count, most = learner.failed_steps, learner.config.search.max_failed_steps
    limit = f'; the run stops after {most}' if most else ''
    run.say(f'step {step}: {message}' + (f' ({count} steps in a row{limit})' if count > 1 else ''))
  return everywhere | {'failed_steps_in_a_row': learner.failed_steps}


def evaluate_policy(run: runs.RunFolder, learner: Learner, method: types.ModuleType, step: int,
                    evaluate: Evaluate) -> None:
  """Evaluates after a step, with the newest parameters, and says it if most searches failed."""
  config, agent = learner.config, prepare(learner, 0)  # step 0: without the noise of a curriculum

  def judged_by_critic(trees: Sequence[Tree]) -> None:
    """Writes values, advantages and outcomes onto finished trees."""
    for tree in trees:
      tree.prune()
    groups = [[tree] for tree in trees if tree.count()]
    assess(learner, [tree for tree, in groups])
    method.credit(groups, Context(0, np.random.default_rng(0), {}), **config.credit)
    for tree in trees:
      tree.reward = tree.question.score(tree.answer)

  agent = setup.make_agent(config, agent.engine, agent.tools, **config.eval.grow)
  rows = list(evaluate(agent, config, step, None if learner.values is None else judged_by_critic))
  for row in rows:
    if message := requests.failing(row):
      run.say(f'evaluation after step {step}, temperature {row["temperature"]:g}: {message}')
  run.write_evaluation(rows)


def credited(groups: Groups) -> Groups:
  """Returns the trees of each group that the method gave credit: what training rows hold."""
  has_credit = lambda tree: any(node.trained and node.advantages is not None for node in tree.walk())
  return [[tree for tree in group if has_credit(tree)] for group in groups]


def summary(groups: Groups, trained: Groups) -> dict[str, float]:
  """Averages rewards and metrics over the trees of all processes.

  Means of reward, exact match, `searches` and the method's other notes (`…_per_tree`), shares of stop
  reasons; and of the `trained` trees their mean reward, and the tokens that a row for each path would have.
  """
  trees = [tree for group in groups for tree in group]
  kept = [tree for group in trained for tree in group]
  written = [node for tree in trees for node in tree.nodes(Role.POLICY)]
  right = [[tree.question.score(tree.answer) for tree in group] for group in groups]
  rewards = [[tree.reward for tree in group if tree.reward is not None] for group in groups]
  values = {
    'reward': [reward for group in rewards for reward in group],
    'reward_retained': [tree.reward for tree in kept],
    'groups_alike': [len(set(group)) == 1 for group in rewards if group],  # nothing to compare
    'groups_alike_wrong': [len({tree.reward for tree in group}) == 1 and not any(scores)
                           for group, scores in zip(groups, right) if len(group) > 1],
    'em': [score for scores in right for score in scores],
    'logprob': [logprob for node in written for logprob in node.sampler_logprobs or ()],
    'tokens_per_tree': [tree.count() for tree in trees],
  }  # fmt: skip
  values |= {f'stop_{reason}_share': [tree.stop == reason for tree in trees] for reason in Stop}
  for name in sorted({name for tree in trees for name in tree.metrics}):
    key = name if name == 'searches' else f'{name}_per_tree'
    values[key] = [tree.metrics[name] for tree in trees if name in tree.metrics]
  sums = {name: (float(np.sum(numbers, dtype=np.float64)), len(numbers)) for name, numbers in values.items()}
  on_paths = sum(leaf.length for tree in kept for leaf in tree.leaves())
  sums |= {'trees': (len(trees), -1), 'tokens_on_paths': (on_paths, -1)}  # -1: sums, not means
  gathered = meshes.gather_objects(sums)
  empty = {'groups_alike': 1.0, 'logprob': math.nan}  # where there are no values
  row = {}
  for name in dict.fromkeys(name for part in gathered for name in part):
    total, count = map(sum, zip(*(part[name] for part in gathered if name in part)))
    row[name] = total if count < 0 else total / count if count else empty.get(name, 0.0)
  return row
