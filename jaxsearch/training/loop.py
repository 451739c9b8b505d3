"""Reinforcement learning, a step at a time: draw questions, grow trees, score, credit, update, report.

`train` is `jaxsearch train`. What differs from method to method is found by name in jaxsearch/methods.

Every random number is a function of the seed and the step, and the data order is saved: a resumed run equals
one that was never stopped, to the bit.

With `config.train.async_steps=1` the rollouts of step n + 1 run while step n is trained, with the parameters
that step n begins with. Step 1 and step 2 have the initial ones. All that needs other processes is done by
the main thread, so their order is the same in every process.
"""

import dataclasses
import shutil
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxsearch import config_check, setup
from jaxsearch.data.questions import QuestionBatches
from jaxsearch.methods import Context, find_method
from jaxsearch.models import hub
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.sampler import requests
from jaxsearch.sampler.driver import Agent
from jaxsearch.tools.http_client import MAY_PASS
from jaxsearch.training import growing, metrics
from jaxsearch.training.learner import Learner, make_learner
from jaxsearch.training.refill import refill
from jaxsearch.training.run_folder import RunFolder, RunStopped
from jaxsearch.training.update import assess, compile_first, prepare, update, write_values
from jaxsearch.trees.tree import Tree

# (agent, config, step, assess) -> rows of evaluations.jsonl; `assess` writes a critic's values onto trees,
# None without one
Assess = Callable[[Sequence[Tree]], None]
Evaluate = Callable[[Agent, ConfigDict, int, Assess | None], Iterable[dict]]


def train(config: ConfigDict, evaluate: Evaluate | None = None) -> dict[str, float]:
  """Trains until `config.steps`, or resumes the run in `config.out`; returns the last row of metrics.

  Args:
    evaluate: answers held-out questions, needed if `config.eval.every` is set: `evaluation.answers.held_out`.
  """
  meshes.start_distributed(**config.distributed)
  config_check.check(config)
  method, row = find_method(config.method), {}
  loaded = setup.load_questions(config, config.data.questions)[:config.data.number or None]
  questions = QuestionBatches(loaded, config.questions_per_step, seed=config.seed)
  if any(state != questions.get_state() for state in transfer.gather_objects(questions.get_state())):
    raise ValueError(f'data.questions={config.data.questions!r} is not the same file on all hosts')
  with RunFolder(config, shown=('reward', 'em', 'searches')) as run:
    setup.check_room(config, setup.load_tokenizer(config), loaded, run.say)
    learner = make_learner(config)
    if jax.process_index() == 0:
      for left in setup.weights_folder(config).glob('????????-*'):  # by a killed process, for servers
        shutil.rmtree(left, ignore_errors=True)
    ahead, carried = resume(run, learner, questions)
    run.start()
    history = [metrics.remember(row) for row in run.read('metrics.jsonl')]
    if jax.default_backend() != 'cpu':  # where programs are few
      compile_first(learner)
    if run.wants_evaluation(run.last_step) and not run.is_evaluated(run.last_step):
      evaluate_policy(run, learner, method, run.last_step, evaluate)
    current = None  # `ahead` is the rollout of the step after, with `async_steps`
    run.callback(lambda: [rollout.abandon() for rollout in (current, ahead) if rollout])
    for step in run.steps():
      clock, before = metrics.Clock(), row
      with clock('generate'):
        current = ahead or growing.begin(learner, method, questions, step, carried)
        groups, ahead, carried = refill(learner, method, current, questions), None, current.carried()
        position = questions.get_state()
        if learner.releases:
          learner.agent.engine.unload(cache=True)
        if config.train.async_steps and step < config.steps:
          ahead = growing.begin(learner, method, questions, step + 1, carried)
      with clock('score'):
        judged = assess(learner, [tree for group in groups for tree in group])
      sampled, last = current.sampled, requests.JUDGEMENTS.last
      if last in judged:
        sampled[last] = judged.pop(last)
      current.context.metrics.update(judged)
      with clock('reward'):
        method.credit(groups, current.context, **config.credit)
      trained = metrics.credited(groups)
      row = {'step': step} | metrics.summary(groups, trained, sampled)
      row |= current.context.of_all(sum(map(len, groups)))
      row |= count_failed_steps(run, row, before, history)
      row |= update(learner, trained, step, clock)
      run.write_rollouts(step, groups)
      if ahead:
        with clock('generate'):
          ahead.groups()
      size = sum(x.size for x in jax.tree.leaves(learner.base or learner.state.params))
      row |= clock.row(row['tokens_generated'])
      row |= metrics.device_figures(row, row['tokens_in_rows'] * config.train.epochs, size)
      stop = metrics.watch(history, row, config, run.say)
      run.finish_step(step, row, learner.state, lambda: state_of(learner, position, ahead, carried))
      if run.wants_evaluation(step):  # after the save, which a preemption leaves little time for
        evaluate_policy(run, learner, method, step, evaluate)
      if stop:
        raise RunStopped(stop)
  return row


def state_of(learner: Learner, position: dict, ahead: growing.Growing | None,
             carried: Sequence[growing.Asked]) -> dict:
  """Returns what `resume` needs beside the parameters, as JSON; all processes must call it."""
  carried = transfer.gather_objects(list(map(growing.to_json, ahead.carried() if ahead else carried)))
  return {'memory': learner.memory, 'questions': position, 'following': ahead and ahead.state(),
          'carried': [record for records in carried for record in records],
          'reference': learner.fingerprint, 'decoder': dataclasses.asdict(learner.model_config)}


def resume(run: RunFolder, learner: Learner,
           questions: QuestionBatches) -> tuple[growing.Growing | None, list[growing.Asked]]:
  """Puts everything back to where the run's newest checkpoint was made, if there is one.

  Returns (the rollout that was one step ahead, or None; the questions that go on in the next step).
  Raises ValueError if the run has another config, or began with another model than `config.model` names now.
  """
  def check(host: dict) -> None:
    hub.check_base(host, learner.fingerprint, learner.config.model)
    if 'memory' not in host:
      raise ValueError(f'{learner.config.out} holds a run of `jaxsearch sft`: set another out')

  learner.state, host = run.restore(learner.state, check)
  if host is None:
    return None, []
  learner.memory = host['memory']
  questions.set_state(host['questions'])
  carried = growing.from_json(host.get('carried', []), learner.config, learner.agent, questions)
  saved = host['following']
  ahead = growing.restore(saved, learner, questions, carried) if saved else None
  if ahead:
    next(questions)  # it has them
  return ahead, carried


def count_failed_steps(run: RunFolder, row: dict[str, Any], before: dict[str, Any],
                       history: metrics.History) -> dict[str, int]:
  """Says what mostly failed in a step; returns the steps in a row in which any such calls mostly did.

  `RunFolder.finish_step` holds them against `search.max_failed_steps`. `before` is the row before, if it is
  of this process: what it said is not repeated.
  """
  failed, most = 0, run.config.search.max_failed_steps
  kinds = requests.SEARCHES, requests.SERVICES, requests.JUDGEMENTS  # without them no reward says anything
  # Of all tools those whose server is gone; the policy's own mistakes do not count.
  gone = sum(row.get(f'{requests.TOOLS.failed}_{fault}', 0) for fault in MAY_PASS)
  if any(requests.mostly_failed(row, kind) for kind in kinds) or 2 * gone > row.get(requests.TOOLS.asked, 0):
    failed = 1 + (history[-1].get('failed_steps_in_a_row', 0) if history else 0)
  if message := requests.failing(row, before):
    limit = f'; the run stops after {most}' if most else ''
    run.say(f'step {row["step"]}: {message}' + (f' ({failed} steps in a row{limit})' if failed > 1 else ''))
  return {'failed_steps_in_a_row': failed}


def evaluate_policy(run: RunFolder, learner: Learner, method: types.ModuleType, step: int,
                    evaluate: Evaluate) -> None:
  """Evaluates after a step, with the newest parameters, and says it if most searches failed."""
  config, agent = learner.config, prepare(learner, 0)  # step 0: without the noise of a curriculum

  def judged_by_critic(trees: Sequence[Tree]) -> None:
    """Writes values, advantages and outcomes onto finished trees."""
    for tree in trees:
      tree.prune()
    groups = [[tree] for tree in trees if tree.count()]
    write_values(learner, [tree for tree, in groups])
    method.credit(groups, Context(0, np.random.default_rng(0), {}), **config.credit)
    for tree in trees:
      tree.reward = tree.question.score(tree.answer)

  agent = setup.make_agent(config, agent.engine, agent.tools, **config.eval.grow)
  rows = list(evaluate(agent, config, step, None if learner.values is None else judged_by_critic))
  for row in rows:
    if message := requests.failing(row):
      run.say(f'evaluation after step {step}, temperature {row["temperature"]:g}: {message}')
  run.write_evaluation(rows)
