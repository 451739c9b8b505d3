"""Reports a step: figures of its trees and updates, alarms, and rows of them in files and on the terminal.

`summary` sums up the trees over all processes, `mean_of` the updates, `Clock` the time. `watch` looks for
collapse. `open_log` writes rows to JSON lines, TensorBoard and trackers, `step_lines` shows them.

An alarm is a figure whose mean over the newest `monitor.window` steps is beyond its threshold, the field of
`config.monitor` with the alarm's name. Likelihood and length are compared with the run's first `window`
steps; the likelihood falls slowly before a collapse (Deng et al., arXiv:2512.04220). A resumed run reads its
history from metrics.jsonl, so its alarms are those of a run that was never stopped.
"""

import collections
import contextlib
import importlib
import math
import os
import pathlib
import re
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import psutil
from ml_collections import ConfigDict

from jaxsearch.config_check import to_saved
from jaxsearch.files import write_whole
from jaxsearch.parallel import targets, transfer
from jaxsearch.sampler import requests
from jaxsearch.training import checkpoint, rollout_file, row_files
from jaxsearch.training.batch import Groups
from jaxsearch.trees.tree import Role, Stop

GROUPS = {  # of tags in TensorBoard: a metric is in the first whose pattern its name has
  'time': 'second|compilations|resident|goodput|^mfu|device_peak',
  'gate': '^gate_',
  'reward': '^reward|^em$|^f1$|groups_alike|judge',
  'loss': 'loss|^kl|entropy|ratio|clip|logprob|grad_norm|learning_rate|skipped|critic|value',
  'sampler': 'token|stop_|tool|calls_|search|service|failure|malformed|tree|rows|padded|segments|steps|'
             'episodes|idle|repetition|gibberish',
  'method': '',
}
MONITORED = ('logprob', 'logprob_gap', 'entropy', 'kl', 'length', 'cut', 'malformed', 'groups_alike_wrong',
             'grad_norm', 'repetition', 'gibberish', 'judge_gap')
# Of the sampler, those that are summed over processes:
SUMMED = ('tokens_decoded', 'tokens_generated', 'tokens_prefilled', 'tokens_reused', 'episodes', 'segments',
          'pages_evicted', 'requests_failed', 'servers_reloaded')
GIBBERISH = math.log(1e-4)  # of a token's probability: fluent text draws few that are less likely
History = list[dict[str, Any]]  # of every step so far, see `remember`

# Event of a compilation, or of the cache read in its place; the second is the event of such a read alone.
COMPILATION = '/jax/core/compile/backend_compile_duration'
READ = '/jax/compilation_cache/cache_retrieval_time_sec'
_events = collections.Counter()  # of this process since this module was imported
_awaited, _seen = collections.Counter(), collections.Counter()  # programs, by the name of their function
_thread = threading.local()


def await_programs(names: Iterable[str]) -> None:
  """Counts from now on how many of these programs are there: 'compiling 3 of 11'. One name is one program."""
  _seen.clear()
  _awaited.clear()
  _awaited.update(names)


def _count(event: str, seconds: float, fun_name: str = '', **_) -> None:
  """Counts the events of JAX; the person who waits is told of what compiles, not of what the cache has.

  Told of are awaited programs that take a second, and others that take ten.
  """
  _events.update([event])
  if event == READ:
    _thread.read = True
  elif event == COMPILATION:
    read, _thread.read = getattr(_thread, 'read', False), False
    name = fun_name.removeprefix('jit(').removesuffix(')')
    awaited = _seen[name] < _awaited[name]
    _seen[name] += awaited
    if not read and seconds >= (1 if awaited else 10):
      place = f'compiling {_seen.total()} of {_awaited.total()}: ' if awaited else 'compiled '
      checkpoint.say(f'{place}{name}, {seconds:.0f} s')


jax.monitoring.register_event_duration_secs_listener(_count)


class Clock:
  """Times one step: `with clock('generate'): …` adds to the seconds of that phase; counts compilations."""
  _row_before = None  # when it was made

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._started, self._compiled = time.perf_counter(), _events[COMPILATION]
    self._exchanged = transfer.exchanged['bytes']

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self.seconds[phase] += time.perf_counter() - start

  def row(self, tokens: int) -> dict[str, float]:
    """Returns the seconds of each phase and of the step so far, `tokens` a second, compilations, bytes
    exchanged, and the resident size of this process in MiB.

    `goodput` is the share of the time since the row before, saves and evaluations included, in those phases.
    """
    seconds, since = time.perf_counter() - self._started, Clock._row_before or self._started
    Clock._row_before = time.perf_counter()
    return {f'seconds_{phase}': value for phase, value in self.seconds.items()} | {
      'seconds': seconds, 'tokens_per_second': tokens / seconds,
      'goodput': sum(self.seconds.values()) / (Clock._row_before - since),
      'compilations': _events[COMPILATION] - self._compiled,
      'bytes_exchanged': transfer.exchanged['bytes'] - self._exchanged,
      'resident_mib': round(psutil.Process().memory_info().rss / 2**20, 1)}


def credited(groups: Groups) -> Groups:
  """Returns the trees of each group that the method gave credit: what training rows hold."""
  has_credit = lambda tree: any(node.trained and node.advantages is not None for node in tree.walk())
  return [[tree for tree in group if has_credit(tree)] for group in groups]


def summary(groups: Groups, trained: Groups, sampled: Mapping[str, Any]) -> dict[str, Any]:
  """Returns figures of a step's rollouts over all processes, in one exchange between them.

  Means of reward, exact match, `searches` and the method's other notes (`…_per_tree`), shares of stop
  reasons; of the `trained` trees their mean reward, and the tokens that a row for each path would have.
  `repetition` is the share of 4-grams that a span had already, `gibberish` that of very unlikely tokens.
  Tokens that were sampled count with pruned branches, which have cost as much.

  Args:
    groups, trained, sampled: trees of this process, those with credit, and the metrics of its sampler.
  """
  trees, kept = ([tree for group in part for tree in group] for part in (groups, trained))
  right = [[tree.question.score(tree.answer) for tree in group] for group in groups]
  rewards = [[tree.reward for tree in group if tree.reward is not None] for group in groups]
  written = [node.sampler_logprobs or () for tree in trees for node in tree.nodes(Role.POLICY)]
  values = {
    'reward': [reward for group in rewards for reward in group],
    'reward_retained': [tree.reward for tree in kept if tree.reward is not None],
    'groups_alike': [len(set(group)) == 1 for group in rewards if group],  # nothing to compare
    'groups_alike_wrong': [len({tree.reward for tree in group}) == 1 and not any(scores)
                           for group, scores in zip(groups, right) if len(group) > 1],
    'em': [score for scores in right for score in scores],
    'logprob': [logprob for logprobs in written for logprob in logprobs],
    'gibberish': [logprob < GIBBERISH for logprobs in written for logprob in logprobs],
    'tokens_per_tree': [tree.count() for tree in trees],
    'policy_tokens_per_tree': [tree.count(Role.POLICY) for tree in trees],
  }  # fmt: skip
  values |= {f'stop_{reason}_share': [tree.stop == reason for tree in trees] for reason in Stop}
  for name in sorted({name for tree in trees for name in tree.metrics}):
    key = name if name == 'searches' else f'{name}_per_tree'
    values[key] = [tree.metrics[name] for tree in trees if name in tree.metrics]
  means = {name: (float(np.sum(numbers, dtype=np.float64)), len(numbers)) for name, numbers in values.items()}
  means['repetition'] = repeated([node.tokens for tree in trees for node in tree.nodes(Role.POLICY)])
  on_paths = sum(leaf.length for tree in kept for leaf in tree.leaves())
  counts = {'trees': len(trees), 'tokens_on_paths': on_paths}
  counts |= {name: count for name, count in sampled.items()
             if name in SUMMED or name.startswith(('calls_', 'stop_'))}
  everywhere = transfer.gather_objects((means, counts, requests.add_failures([sampled])))
  row = dict(sampled) | requests.add_failures(failures for *_, failures in everywhere)
  for name in dict.fromkeys(name for _, part, _ in everywhere for name in part):
    row[name] = sum(part.get(name, 0) for _, part, _ in everywhere)
  empty = {'groups_alike': 1.0, 'logprob': math.nan}  # where there are no values
  for name in dict.fromkeys(name for part, *_ in everywhere for name in part):
    total, count = map(sum, zip(*(part[name] for part, *_ in everywhere if name in part)))
    row[name] = total / count if count else empty.get(name, 0.0)
  return row


def repeated(spans: Iterable[list[int]], n: int = 4) -> tuple[int, int]:
  """Counts the n-grams of spans that occurred before in the same span, and all of them."""
  sizes = [(len(set(zip(*(span[i:] for i in range(n))))), max(len(span) - n + 1, 0)) for span in spans]
  return sum(size - unique for unique, size in sizes), sum(size for _, size in sizes)


def to_row(metrics: Mapping) -> dict[str, float]:
  """Turns numbers of any kind (device scalars included) into int or float."""
  return {name: value if isinstance(value, (int, float)) else value.item() for name, value in metrics.items()}


def mean_of(metrics: list[Mapping[str, float]]) -> dict[str, float]:
  """Merges the metrics of a step's updates: sums of counts, largest maxima, last states, means of the rest.

  The gap to the sampler's log-probabilities is that of the first update: later ones are of a policy that
  moved on.
  """
  def merged(name: str, values: list[float]) -> float:
    if name.startswith('logprob_gap'):
      return values[0]
    if name.endswith('_max'):
      return max(values)
    if name.removeprefix('critic_') in ('skipped', 'skipped_in_a_row', 'learning_rate'):
      return values[-1]
    return sum(values) if name == 'tokens_trained' else sum(values) / len(values)

  return {name: merged(name, [row[name] for row in metrics]) for name in metrics[0]}


def device_figures(row: Mapping, tokens: int, parameters: int) -> dict[str, float]:
  """Returns tokens a second of rollout and update; on accelerators also peak memory and the update's MFU.

  MFU counts 6 FLOPs a parameter and token (Kaplan et al. 2020): no attention, nothing that is recomputed.

  Args:
    tokens: that the updates of the step computed on.
    parameters: of the policy.
  """
  rate, device = tokens / row['seconds_train'], jax.local_devices()[0]
  figures = {'tokens_per_second_rollout': row['tokens_generated'] / row['seconds_rollout'],
             'tokens_per_second_update': rate}
  if kind := targets.KINDS.get(device.device_kind):
    figures['mfu'] = 6 * parameters * rate / (jax.device_count() * targets.DEVICES[kind].flops)
  if stats := device.memory_stats():
    figures['device_peak_gib'] = round(stats['peak_bytes_in_use'] / 2**30, 2)
  return figures


def remember(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what the history holds of a row of metrics, without figures that are missing or not finite."""
  get = lambda name: row.get(name, math.nan)
  length = row.get('policy_tokens_per_tree', get('tokens_generated') / get('trees'))  # older rows have none
  derived = {'length': length, 'malformed': get('stop_malformed_share'),
             'cut': get('stop_budget_share') + get('stop_context_full_share')}
  kept = {name: (row | derived).get(name) for name in ('failed_steps_in_a_row', 'alarms', *MONITORED)}
  return {name: value for name, value in kept.items()
          if isinstance(value, str) or (value is not None and math.isfinite(value))}


def find_alarms(history: History, limits: ConfigDict) -> dict[str, str]:
  """Returns {alarm: its value and threshold, in words}; none until `limits.window` steps have passed."""
  recent = history[-limits.window:]
  if len(recent) < limits.window:
    return {}

  def means(rows: History) -> dict[str, float]:  # NaN, which is beyond no threshold, where no row has one
    of_rows = {name: [row[name] for row in rows if name in row] for name in MONITORED}
    return {name: statistics.fmean(values) if values else math.nan for name, values in of_rows.items()}

  start, now = means(history[:limits.window]), means(recent)
  values = {name: now[name] for name in MONITORED if name in limits} | {
    'logprob_fall': start['logprob'] - now['logprob'],
    'entropy_low': now['entropy'], 'entropy_high': now['entropy'],
    'length_fall': start['length'] / max(now['length'], 1),
    'length_growth': now['length'] / max(start['length'], 1)}
  raised = {}
  for name, value in values.items():
    limit, low = limits[name], name == 'entropy_low'
    if limit is not None and (value < limit if low else value > limit):
      raised[name] = f'{name} {value:.3g} {"<" if low else ">"} monitor.{name}={limit:g}'
  return raised


def watch(history: History, row: dict[str, Any], config: ConfigDict, say: Callable[[str], None]) -> str:
  """Appends a step's row to the history, with any alarms in both, and says when one begins and ends.

  Returns why the run has to stop, or ''.
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
  newest = [alarms_of(row) for row in history[-limits.patience:]]
  lasting = set.intersection(*newest) if len(newest) == limits.patience else ()
  if not lasting or limits.action == 'warn':
    return ''
  reasons = '; '.join(text for name, text in raised.items() if name in lasting)
  return (f"step {step}: {reasons} for {limits.patience} steps (monitor.action='stop'); to go on, "
          'resume with other thresholds or another action in config.monitor')


def alarms_of(row: Mapping[str, Any]) -> set[str]:
  """Returns the names of the alarms in a row of the history."""
  return set(row.get('alarms', '').split(', ')) - {''}


@contextlib.contextmanager
def open_log(out: pathlib.Path, last_step: int,
             config: ConfigDict) -> Iterator[Callable[[str, Iterable[Mapping]], None]]:
  """Yields `write(name, rows)`, which appends rows to the file DIR/name and their numbers to TensorBoard's.

  The trackers of `config.log` (Weights & Biases as `wandb`, Trackio: installed modules with `init`, whose
  result has `log` and `finish`) get the same numbers by tag. The lines are on disk when `write` returns.
  Numbers that are not finite become null. Rows of steps after `last_step` (0: a new run) are dropped first,
  and so is a line that was left unfinished.
  """
  from tensorboardX.event_file_writer import EventsWriter  # slow to import
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.proto.summary_pb2 import Summary
  for name in ('metrics.jsonl', 'evaluations.jsonl'):
    row_files.keep_steps(out / name, last_step)
  rollout_file.keep_steps(out, last_step)
  (out / 'tensorboard').mkdir(exist_ok=True)
  trackers = [_open_tracker(name, out.resolve(), config) for name in config.log]
  # Not SummaryWriter, whose thread dies of a full disk unseen.
  board = EventsWriter(str(out / 'tensorboard' / 'events'))

  def write(name: str, rows: Iterable[Mapping]) -> None:
    finite = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    rows = [{key: finite(value) for key, value in row.items()} for row in rows]
    row_files.append(out / name, rows)
    for row in rows:
      values = {tag(key, row): value for key, value in row.items()
                if isinstance(value, (int, float)) and key not in ('step', 'temperature')}
      board.write_event(Event(step=row['step'], wall_time=time.time(), summary=Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])))
      for tracker in trackers:
        tracker.log(values, step=row['step'])
    board.flush()

  try:
    restart = SessionLog(status=SessionLog.START)  # hides what is done again
    board.write_event(Event(step=last_step + 1, session_log=restart))
    yield write
  finally:
    with contextlib.suppress(OSError):  # what could not be written has raised in `write`
      board.close()
    for tracker in trackers:
      tracker.finish()


def _open_tracker(name: str, out: pathlib.Path, config: ConfigDict):
  """Opens the run of a service; a run that is resumed in the folder `out` is resumed there too."""
  path = out / 'tracked_as'  # a new run in the place of one that was deleted is another for the service
  if not path.exists():
    write_whole(path, f'{out.name}-{uuid.uuid4().hex[:8]}')
  label = path.read_text(encoding='utf-8')  # trackio knows it
  identity = {'id': label} if name == 'wandb' else {}
  os.environ.setdefault('WANDB__DISABLE_META', 'true')  # else it keeps the command line, with its secrets
  try:
    return importlib.import_module(name).init(
      project='jaxsearch', name=label, config=to_saved(config), resume='allow', **identity)
  except Exception as error:
    if type(error).__name__ != 'UsageError':
      raise
    raise ValueError(f'log={name!r}: {error}') from error  # wandb without a key


def tag(name: str, row: Mapping) -> str:
  """Returns the tag of a number in TensorBoard: held_out/em_greedy or held_out/em_at_0.5, else GROUP/NAME."""
  if 'temperature' in row:
    return f'held_out/{name}_' + (f'at_{row["temperature"]:g}' if row['temperature'] else 'greedy')
  return next(group for group, pattern in GROUPS.items() if re.search(pattern, name)) + f'/{name}'


def step_lines(total: int, shown: tuple[str, ...], say: Callable[[str], None]) -> Callable[[Mapping], None]:
  """Returns `show(row)`: a line a step, with the time left at the pace of the last ten."""
  ends = collections.deque(maxlen=11)

  def show(row: Mapping) -> None:
    ends.append(time.monotonic())
    pace = (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
    figures = [f'{pace * (total - row["step"]):.0f} s left'] if pace else []
    figures += [f'{name} {row[name]:.3g}' for name in shown if row.get(name) is not None]
    figures += [f'{row["searches_failed"]} searches failed'] if row.get('searches_failed') else []
    say(', '.join([f'step {row["step"]}/{total}', *figures]))

  return show
