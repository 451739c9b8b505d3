"""Monitors of collapse: from the rows of metrics so far to alarms.

The loop calls `watch` once a step. The rest are pure functions of the history: the rows so far, cut down by
`remember`. A run that was killed reads its history from metrics.jsonl, so its alarms are those of a run that
was not.

A figure is averaged over the newest `monitor.window` steps and compared with its threshold: the field of
`config.monitor` that has the alarm's name. Likelihood and length are compared with the run's first `window`
steps; the likelihood falls slowly before a collapse (Deng et al., arXiv:2512.04220).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

FIGURES = ('logprob', 'logprob_gap', 'entropy', 'kl', 'length', 'cut', 'malformed', 'groups_alike_wrong',
           'grad_norm')
Rows = Sequence[Mapping[str, Any]]


def remember(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what the history holds of a row of metrics, without figures that are missing or not finite."""
  get = lambda name: row.get(name, math.nan)
  derived = {'length': get('tokens_generated') / get('trees'), 'malformed': get('stop_malformed_share'),
             'cut': get('stop_budget_share') + get('stop_context_full_share')}
  kept = {name: (row | derived).get(name) for name in ('step', 'alarms', *FIGURES)}
  return {name: value for name, value in kept.items()
          if isinstance(value, str) or (value is not None and math.isfinite(value))}


def find_alarms(history: Rows, limits: ConfigDict) -> dict[str, str]:
  """Returns {alarm: its value and threshold, in words}; none until `limits.window` steps have passed."""
  recent = history[-limits.window:]
  if len(recent) < limits.window:
    return {}
  start, now = ({name: mean(rows, name) for name in FIGURES} for rows in (history[:limits.window], recent))
  values = {name: now[name] for name in FIGURES if name in limits} | {
    'logprob_fall': start['logprob'] - now['logprob'],
    'entropy_low': now['entropy'], 'entropy_high': now['entropy'],
    'length_fall': start['length'] / max(now['length'], 1),
    'length_growth': now['length'] / max(start['length'], 1)}
  beyond = {name: value < limits[name] if name == 'entropy_low' else value > limits[name]
            for name, value in values.items() if limits[name] is not None}
  sign = lambda name: '<' if name == 'entropy_low' else '>'
  return {name: f'{name} {values[name]:.3g} {sign(name)} monitor.{name}={limits[name]:g}'
          for name, alarms in beyond.items() if alarms}


def mean(rows: Rows, name: str) -> float:
  """Averages a figure over the rows that have it; NaN, which is beyond no threshold, if none does."""
  values = [row[name] for row in rows if name in row]
  return statistics.fmean(values) if values else math.nan


def watch(history: list[dict[str, Any]], row: dict[str, Any], config: ConfigDict,
          say: Callable[[str], None]) -> str | None:
  """Writes any `alarms` (names) into a step's row, appends it to the history, says when one begins and ends.

  Returns why the run has to stop, or None.
  """
  limits, step = config.monitor, row['step']
  before = alarms_of(history[-1]) if history else set()
  history.append(remember(row))
  raised = find_alarms(history, limits)
  for name in sorted(raised.keys() - before):
    say(f'step {step}: {raised[name]}, the mean of {limits.window} steps')
  for name in sorted(before - raised.keys()):
    say(f'step {step}: {name} no longer alarms')
  if raised:
    history[-1]['alarms'] = row['alarms'] = ', '.join(raised)
  newest = history[-limits.patience:]
  lasting = [text for name, text in raised.items()
             if len(newest) == limits.patience and all(name in alarms_of(row) for row in newest)]
  if not lasting or limits.action == 'warn':
    return None
  return (f"step {step}: {'; '.join(lasting)} for {limits.patience} steps (monitor.action='stop'); to go on, "
          'resume with other thresholds or another action in config.monitor')


def alarms_of(row: Mapping[str, Any]) -> set[str]:
  """Returns the names of the alarms in a row of the history."""
  return set(row.get('alarms', '').split(', ')) - {''}
