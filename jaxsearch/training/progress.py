"""How long a step takes and how far a run is: a clock, and lines or a bar for the person who watches."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import psutil
from rich import progress
from rich.console import Console

from jaxsearch.parallel import mesh as meshes

# Of a program, or its read from the compilation cache.
COMPILATION = '/jax/core/compile/backend_compile_duration'
_events = collections.Counter()  # of this process since this module was imported
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _events.update([event]))


class Clock:
  """Times one step: `with clock('generate'): …` adds to the seconds of that phase; counts compilations."""

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._started, self._compiled = time.perf_counter(), _events[COMPILATION]
    self._exchanged = meshes.exchanged['bytes']

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self.seconds[phase] += time.perf_counter() - start

  def row(self, tokens: int) -> dict[str, float]:
    """Returns `seconds_…` of each phase, and of the step so far: its seconds, programs compiled, and `tokens`
    a second; and the resident size of this process, in MiB."""
    seconds = time.perf_counter() - self._started
    return {f'seconds_{phase}': value for phase, value in self.seconds.items()} | {
      'seconds': seconds, 'tokens_per_second': tokens / seconds,
      'compilations': _events[COMPILATION] - self._compiled,
      'bytes_exchanged': meshes.exchanged['bytes'] - self._exchanged,
      'resident_mib': round(psutil.Process().memory_info().rss / 2**20, 1)}


def time_left(total: int, window: int | None = None) -> Callable[[int], float | None]:
  """Returns `left(done)`: seconds until all are done at the pace of the last `window`; None before there is
  one.

  What is done by the first call is left out: until then programs are compiled, and slots are filled. So is,
  unless there is nothing else, what was done while programs were compiled.
  """
  before, paces = None, {False: collections.deque(maxlen=window), True: collections.deque(maxlen=window)}

  def left(done: int) -> float | None:
    nonlocal before
    now = done, time.monotonic(), _events[COMPILATION]
    if before:
      more, seconds, compiled = (new - old for new, old in zip(now, before))
      paces[compiled > 0].append((more, seconds))
    before = now
    more, seconds = map(sum, zip(*(paces[False] or paces[True] or [(0, 0.0)])))
    return seconds / more * (total - done) if more else None

  return left


@contextlib.contextmanager
def progress_bar(total: int, done: int, shown: tuple[str, ...],
                 console: Console) -> Iterator[Callable[[Mapping], None]]:
  """Yields `show(row)`, which advances the bar by a step and shows fields of the row, and tokens a second."""
  columns = [progress.TextColumn('step'), progress.MofNCompleteColumn(), progress.BarColumn(bar_width=24),
             progress.TextColumn('{task.fields[figures]}'), progress.TimeElapsedColumn(),
             progress.TextColumn('left'), progress.TimeRemainingColumn()]
  with progress.Progress(*columns, console=console) as bar:
    task = bar.add_task('', total=total, completed=done, figures='')
    yield lambda row: bar.update(task, advance=1, figures=' · '.join(
      [*figures(row, shown), f'{row["tokens_per_second"]:,.0f} tokens/s']))


def plain_lines(total: int, shown: tuple[str, ...], say: Callable[[str], None]) -> Callable[[Mapping], None]:
  """Returns `show(row)` for no terminal: a line a step, with the time left at the pace of the last ten."""
  left = time_left(total, window=10)

  def show(row: Mapping) -> None:
    seconds = left(row['step'])
    pace = [] if seconds is None else [f'{seconds:.0f} s left']
    failed = [f'{row["searches_failed"]} searches failed'] if row.get('searches_failed') else []
    say(', '.join([f'step {row["step"]}/{total}', *pace, *figures(row, shown), *failed]))

  return show


def figures(row: Mapping, shown: tuple[str, ...]) -> list[str]:
  """Returns the fields `shown` of a row in words, as far as it has them."""
  return [f'{name} {row[name]:.3g}' for name in shown if row.get(name) is not None]
