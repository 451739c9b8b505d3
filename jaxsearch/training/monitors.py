"""Monitors of collapse: from the rows of metrics so far to alarms, and to the checkpoint that is worth going back to.

The loop calls `watch` once a step. The rest are pure functions of the history: the rows so far, cut down by `remember`. A run
that was killed reads its history from metrics.jsonl, so its alarms and rollbacks are those of a run that was not.

A figure is averaged over the newest `monitor.window` steps since the last rollback, and compared with its threshold: the field
of `config.monitor` that has the alarm's name. Likelihood and length are compared with the run's first `window` steps; the
likelihood falls slowly before a collapse (Deng et al., arXiv:2512.04220).
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ml_collections

FIGURES = ('logprob', 'logprob_gap', 'entropy', 'kl', 'length', 'cut', 'malformed', 'groups_alike_wrong', 'grad_norm')
Rows = Sequence[Mapping[str, Any]]


def remember(row: Mapping[str, Any]) -> dict[str, Any]:
  """What the history holds of a row of metrics, without figures that are missing or not finite."""
  get = lambda name: row.get(name, math.nan)
  derived = {'length': get('tokens_generated') / get('trees'), 'malformed': get('stop_malformed_share'),
             'cut': get('stop_budget_share') + get('stop_context_full_share')}
  kept = {name: (row | derived).get(name) for name in ('step', 'reward', 'alarms', 'rolled_back_to', *FIGURES)}
  return {name: value for name, value in kept.items()
          if isinstance(value, str) or (value is not None and math.isfinite(value))}


def find_alarms(history: Rows, limits: ml_collections.ConfigDict) -> dict[str, str]:
  """{alarm: its value and threshold, in words}; none until `limits.window` steps have passed since the start or a rollback."""
  recent = since_rollback(history)[-limits.window:]
  if len(recent) < limits.window:
    return {}
  start, now = ({name: mean(rows, name) for name in FIGURES} for rows in (history[:limits.window], recent))
  values = {name: now[name] for name in FIGURES if name in limits} | {
    'logprob_fall': start['logprob'] - now['logprob'], 'entropy_low': now['entropy'], 'entropy_high': now['entropy'],
    'length_fall': start['length'] / max(now['length'], 1), 'length_growth': now['length'] / max(start['length'], 1)}
  beyond = {name: value < limits[name] if name == 'entropy_low' else value > limits[name]
            for name, value in values.items() if limits[name] is not None}
  return {name: f'{name} {values[name]:.3g} {"<" if name == "entropy_low" else ">"} monitor.{name}={limits[name]:g}'
          for name, found in beyond.items() if found}


def mean(rows: Rows, name: str) -> float:
  """The mean of a figure over the rows that have it; NaN, which is beyond no threshold, if none does."""
  values = [row[name] for row in rows if name in row]
  return statistics.fmean(values) if values else math.nan


def since_rollback(history: Rows) -> Rows:
  """The rows after the last rollback: those of the policy as it is now."""
  back = max((index for index, row in enumerate(history) if 'rolled_back_to' in row), default=-1)
  return history[back + 1:]


def rate(history: Rows, config: ml_collections.ConfigDict) -> dict[int, float]:
  """{step: rating} of the checkpoints that `checkpoint_every` asks for: the mean reward of the `monitor.window` steps after it.

  A step's own reward is that of the parameters before its update, so only the steps after a checkpoint say what it is worth.
  The rating is infinite until they have passed. A checkpoint is left out if a rollback came before.
  """
  found, window = {}, config.monitor.window
  for index, row in enumerate(history):
    after = history[index + 1:index + 1 + window]
    if row['step'] % config.checkpoint_every == 0 and not any('rolled_back_to' in one for one in after[:window - 1]):
      found[row['step']] = mean(after, 'reward') if len(after) == window else math.inf
  return found


def best(history: Rows, config: ml_collections.ConfigDict, saved: Iterable[int]) -> int | None:
  """The checkpoint with the highest finite rating among those saved, of equals the newest; None if none is rated yet."""
  rated = rate(history, config)
  known = [(rated[step], step) for step in saved if math.isfinite(rated.get(step, math.nan))]
  return max(known)[1] if known else None


def worth_keeping(history: Rows, config: ml_collections.ConfigDict, saved: Iterable[int]) -> set[int]:
  """The checkpoints that a rollback may need: the best, and those too young to be rated; none unless action='rollback'."""
  if config.monitor.action != 'rollback':
    return set()
  young = {step for step, rating in rate(history, config).items() if rating == math.inf}
  return young | {best(history, config, saved)} - {None}


def watch(history: list[dict[str, Any]], row: dict[str, Any], config: ml_collections.ConfigDict, saved: Collection[int],
          say: Callable[[str], None]) -> str | None:
  """Writes what the monitors find into a step's row, and appends it to the history; says when an alarm begins and ends.

  The row gets the text `alarms` (names) if there are any; with action='rollback' the count `rollbacks` so far, and
  `rolled_back_to`, a step, if parameters and optimizer are to go back to that checkpoint now.

  Args:
    saved: steps of the checkpoints there are.
  Returns:
    Why the run has to stop, or None.
  """
  limits, step, stop = config.monitor, row['step'], None
  before = {name for one in since_rollback(history)[-1:] for name in one.get('alarms', '').split(', ') if name}
  history.append(remember(row))
  found = find_alarms(history, limits)
  for name in sorted(found.keys() - before):
    say(f'step {step}: {found[name]}, the mean of {limits.window} steps')
  for name in sorted(before - found.keys()):
    say(f'step {step}: {name} no longer alarms')
  if found:
    history[-1]['alarms'] = row['alarms'] = ', '.join(found)
  newest = since_rollback(history)[-limits.patience:]
  lasting = [text for name, text in found.items()
             if len(newest) == limits.patience and all(name in one.get('alarms', '').split(', ') for one in newest)]
  rollbacks = sum('rolled_back_to' in one for one in history)
  if lasting and limits.action != 'warn':
    why = f'step {step}: {"; ".join(lasting)} for {limits.patience} steps'
    target = best(history, config, saved)
    if limits.action == 'stop':
      stop = f"{why} (monitor.action='stop')"
    elif target is None:
      stop = f'{why}, and no checkpoint to go back to has {limits.window} steps behind it yet'
    elif rollbacks == limits.max_rollbacks:
      stop = f'{why}, after monitor.max_rollbacks={rollbacks}'
    else:
      history[-1]['rolled_back_to'] = row['rolled_back_to'] = target
      rollbacks += 1
      say(f'{why}: back to the parameters and optimizer of step {target}, rollback {rollbacks} of {limits.max_rollbacks}')
  if limits.action == 'rollback':
    row['rollbacks'] = rollbacks
  return stop and f'{stop}; to go on, resume with other thresholds or another action in config.monitor'
