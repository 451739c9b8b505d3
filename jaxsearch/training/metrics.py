"""What a run tells: metrics.jsonl, TensorBoard files, the progress bar, and the clocks and counters behind them.

A row of metrics.jsonl is one step. A resumed run drops the rows after its checkpoint, so that no step stands there
twice; TensorBoard does the same by itself (`purge_step`).
"""

import collections
import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping

import jax
from rich import progress

_compilations = 0


def _on_event(event: str, seconds: float, **_) -> None:
  global _compilations
  if event == '/jax/core/compile/backend_compile_duration':
    _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def compilations() -> int:
  """Programs compiled (or fetched from the compilation cache) by this process since this module was imported."""
  return _compilations


class Clock:
  """Times one step: `with clock('generate'): …` adds to the seconds of that phase; counts programs compiled."""

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._started, self._compiled = time.perf_counter(), compilations()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self.seconds[phase] += time.perf_counter() - start

  def row(self, tokens: int) -> dict[str, float]:
    """`seconds_…` of each phase, and of the step so far: its seconds, programs compiled, and `tokens` a second."""
    seconds = time.perf_counter() - self._started
    return {f'seconds_{phase}': value for phase, value in self.seconds.items()} | {
      'seconds': seconds, 'tokens_per_second': tokens / seconds, 'compilations': compilations() - self._compiled}


class MetricsLog:
  """Appends rows to DIR/metrics.jsonl and to the TensorBoard files in DIR/tensorboard."""

  def __init__(self, out: str | pathlib.Path, last_step: int):
    """Rows of steps after `last_step` (0: a new run) are dropped, and so is a line that a killed run left unfinished."""
    from tensorboardX import SummaryWriter  # slow to import
    path = pathlib.Path(out) / 'metrics.jsonl'
    keep_steps(path, last_step)
    self._file = path.open('a')
    self._board = SummaryWriter(str(pathlib.Path(out) / 'tensorboard'), purge_step=last_step + 1)

  def write(self, row: Mapping[str, float]) -> None:
    """Adds a step; the line is on disk when this returns. Values that are not finite become null, as JSON has none."""
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    self._file.write(json.dumps(finite) + '\n')
    self._file.flush()
    for name, value in finite.items():
      if value is not None and name != 'step':
        self._board.add_scalar(name, value, row['step'])

  def close(self) -> None:
    self._file.close()
    self._board.close()


def keep_steps(path: str | pathlib.Path, last_step: int) -> None:
  """Drops the rows after `last_step` from a file of rows, or all of them if that is 0; atomic."""
  path = pathlib.Path(path)
  kept = [row for row in read(path) if row['step'] <= last_step] if last_step else []
  replacement = path.with_suffix('.tmp')
  replacement.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in kept), encoding='utf-8')
  replacement.replace(path)


def read(path: str | pathlib.Path) -> list[dict]:
  """The rows of a metrics.jsonl, [] if there is none; an unfinished last line is left out.

  Raises:
    ValueError: another line is no JSON; names file and line.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = path.read_text(encoding='utf-8').split('\n')
  rows = []
  for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end was never finished
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as error:
      raise ValueError(f'{path}:{number}: not JSON: {error}') from error
  return rows


def to_row(metrics: Mapping) -> dict[str, float]:
  """Numbers of any kind (device scalars included) as int or float."""
  return {name: value if isinstance(value, (int, float)) else value.item() for name, value in metrics.items()}


def mean_of(metrics: list[Mapping[str, float]]) -> dict[str, float]:
  """The metrics of a step from those of its updates: sums of counts, largest maxima, last states, means of the rest.

  The gap to the sampler's log-probabilities is that of the first update: later ones are of a policy that has moved on.
  """
  result = {}
  for name in metrics[0]:
    values = [row[name] for row in metrics]
    if name.startswith('logprob_gap'):
      result[name] = values[0]
    elif name.endswith('_max'):
      result[name] = max(values)
    elif name in ('skipped', 'skipped_in_a_row', 'learning_rate'):
      result[name] = values[-1]
    elif name == 'tokens_trained':
      result[name] = sum(values)
    else:
      result[name] = sum(values) / len(values)
  return result


@contextlib.contextmanager
def progress_bar(total: int, done: int, shown: bool, what: tuple[str, ...]):
  """Yields `show(row)`, which advances the bar by a step and shows the fields `what` of the row, and tokens a second."""
  columns = [progress.TextColumn('step'), progress.MofNCompleteColumn(), progress.BarColumn(bar_width=24),
             progress.TextColumn('{task.fields[figures]}'), progress.TimeElapsedColumn(),
             progress.TextColumn('left'), progress.TimeRemainingColumn()]
  with progress.Progress(*columns, disable=not shown) as bar:
    task = bar.add_task('', total=total, completed=done, figures='')

    def show(row: Mapping[str, float]) -> None:
      figures = [f'{name} {row[name]:.3g}' for name in what if row.get(name) is not None]
      figures.append(f'{row["tokens_per_second"]:,.0f} tokens/s')
      bar.update(task, advance=1, figures=' · '.join(figures))

    yield show
