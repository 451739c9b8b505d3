"""Rows of metrics: made from those of updates, written to JSON lines, TensorBoard and trackers."""

import contextlib
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jaxsearch.training import rollouts
from jaxsearch.training.row_files import append, keep_steps

GROUPS = {  # of tags in TensorBoard: a metric is in the first whose pattern its name has
  'time': 'second|compilations|resident',
  'gate': '^gate_',
  'reward': '^reward|^em$|^f1$|groups_alike',
  'loss': 'loss|^kl|entropy|ratio|clip|logprob|grad_norm|learning_rate|skipped|critic|value',
  'sampler': 'token|stop_|tool|calls_|search|service|failure|malformed|tree|rows|padded|segments|steps|'
             'episodes|idle',
  'method': '',
}


@contextlib.contextmanager
def metrics_log(out: str | pathlib.Path, last_step: int,
                loggers: Sequence[Callable[[dict[str, float], int], None]] = (),
                ) -> Iterator[Callable[[str, Iterable[Mapping]], None]]:
  """Yields `write(name, rows)`, which appends rows to the file DIR/name and their numbers to TensorBoard's.

  Each of `loggers` is called with the same numbers by tag, and the step. The lines are on disk when `write`
  returns. Numbers that are not finite become null, as JSON has none. Rows of steps after `last_step` (0: a
  new run) are dropped first, and so is a line that was left unfinished.
  """
  from tensorboardX.event_file_writer import EventsWriter  # slow to import
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.proto.summary_pb2 import Summary
  out = pathlib.Path(out)
  for name in ('metrics.jsonl', 'evaluations.jsonl'):
    keep_steps(out / name, last_step)
  rollouts.keep_steps(out, last_step)
  (out / 'tensorboard').mkdir(exist_ok=True)
  # Not SummaryWriter, whose thread dies of a full disk unseen.
  board = EventsWriter(str(out / 'tensorboard' / 'events'))

  def write(name: str, rows: Iterable[Mapping]) -> None:
    finite = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    rows = [{key: finite(value) for key, value in row.items()} for row in rows]
    append(out / name, rows)
    for row in rows:
      values = {tag(key, row): value for key, value in row.items()
                if isinstance(value, (int, float)) and key not in ('step', 'temperature')}
      board.write_event(Event(step=row['step'], wall_time=time.time(), summary=Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])))
      for log in loggers:
        log(values, row['step'])
    board.flush()

  try:
    restart = SessionLog(status=SessionLog.START)  # hides what is done again
    board.write_event(Event(step=last_step + 1, session_log=restart))
    yield write
  finally:
    with contextlib.suppress(OSError):  # what could not be written has raised in `write`
      board.close()


def tag(name: str, row: Mapping) -> str:
  """Returns the tag of a number in TensorBoard: held_out/em_greedy or held_out/em_at_0.5, else GROUP/NAME."""
  if 'temperature' in row:
    return f'held_out/{name}_' + (f'at_{row["temperature"]:g}' if row['temperature'] else 'greedy')
  return next(group for group, pattern in GROUPS.items() if re.search(pattern, name)) + f'/{name}'


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
    if name in ('skipped', 'skipped_in_a_row', 'learning_rate'):
      return values[-1]
    return sum(values) if name == 'tokens_trained' else sum(values) / len(values)

  return {name: merged(name, [row[name] for row in metrics]) for name in metrics[0]}
