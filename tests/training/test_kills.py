"""kill -9 at random instants of a training run and of the warm-up of a critic: both end as if nothing had happened, to the bit.

    JAXSEARCH_KILL_SEED=1 python -m pytest -m slow -s tests/training/test_kills.py        (seed 0 if not set)

The instants are drawn from the time line of an uninterrupted run: some in every phase, the others anywhere. Each is printed with
the phase that it hit. What a phase is, and how a process says in which it is, see `child.mark_phases`.
"""

import collections
import json
import os
import pathlib
import time
from typing import NamedTuple

import numpy as np
import pytest

from jaxsearch.training import row_files
from tests.training import test_run
from tests.training.test_run import comparable, finish, saved_arrays

inputs, start = test_run.inputs, test_run.start  # fixtures
SEED = int(os.environ.get('JAXSEARCH_KILL_SEED', '0'))
PNG_END = b'IEND\xaeB`\x82'
ENDS = {'report.html': b'</html>', 'learning_curve.png': PNG_END, 'calibration.png': PNG_END, 'config.json': b'}'}


class Mark(NamedTuple):
  """A phase began: its name, the step (or the number of rollouts written), and when, in seconds of the monotonic clock."""
  phase: str
  number: int
  at: float


class Instant(NamedTuple):
  """Where to kill: in the phase that is at `place` of the time line, after this share of its duration."""
  place: int
  share: float


def marks(out: pathlib.Path, after: int = 0) -> list[Mark]:
  """What the processes of a run said, but for the first `after` lines."""
  path = pathlib.Path(f'{out}.marks')
  lines = path.read_text().splitlines()[after:] if path.exists() else []
  return [Mark(phase, int(number), int(at) / 1e9) for phase, number, at in map(str.split, lines)]


def draw(line: list[Mark], wanted: dict[str, int], anywhere: int, rng: np.random.Generator) -> list[Instant]:
  """As many instants in each phase as wanted, early and late ones, and some anywhere, in the order of the time line; those in
  `start` at any turn."""
  instants = []
  for phase, number in wanted.items():
    places = [place for place, mark in enumerate(line) if mark.phase == phase]
    instants += [Instant(int(place), 0.9 * rng.uniform(i, i + 1) / number)
                 for i, place in enumerate(rng.choice(places, number, replace=len(places) < number))]
  begins = [mark.at for mark in line]
  for moment in rng.uniform(begins[0], begins[-1], anywhere):
    place = int(np.searchsorted(begins, moment)) - 1
    instants.append(Instant(place, (moment - begins[place]) / (begins[place + 1] - begins[place])))
  starts, instants = ([one for one in sorted(instants) if (one.place == 0) == first] for first in (True, False))
  for instant in starts:
    instants.insert(rng.integers(len(instants) + 1), instant)
  return instants


def kill(begin, out: pathlib.Path, line: list[Mark], instant: Instant) -> tuple[Mark, float]:
  """Starts the run and kills it at an instant; returns the last mark before the kill, and the seconds since then.

  The kill comes when the phase ends, at the latest. A phase that does not come any more, since an earlier kill came late, is
  replaced by the next one that does. Half the share is tried where the process had ended before.
  """
  places = {mark[:2]: place for place, mark in enumerate(line)}
  process, before = begin(), len(marks(out))
  while process.poll() is None:
    own = marks(out, before)
    first = next((i for i, mark in enumerate(own) if places.get(mark[:2], -1) >= instant.place), None)
    if first is not None:
      place = places[own[first][:2]]
      deadline = own[first].at + instant.share * (line[min(place + 1, len(line) - 1)].at - line[place].at)
      if first + 1 < len(own) or time.monotonic() >= deadline:
        process.kill()
        at = time.monotonic()
        break
    time.sleep(0.001)
  code, errors = finish(process, 1200)
  if code == -9:
    last = marks(out)[-1]
    return last, at - last.at
  assert code == 0, errors[-3000:]
  return kill(begin, out, line, Instant(instant.place, instant.share / 2))


def steps_saved(out: pathlib.Path) -> list[int]:
  return sorted(int(path.name) for path in out.glob('checkpoints/*') if path.name.isdecimal())


def break_often(begin, out: pathlib.Path, line: list[Mark], wanted: dict[str, int], anywhere: int) -> None:
  """Kills a run at drawn instants, then lets it end. No kill may take a checkpoint away, or leave a file half written."""
  instants = draw(line, wanted, anywhere, np.random.default_rng(SEED))
  hit, newest = collections.Counter(), 0
  print(f'\n{out.name}: seed {SEED}, {len(instants)} kills\nin phase           seconds aimed at          newest checkpoint')
  for instant in instants:
    last, since = kill(begin, out, line, instant)
    hit[last.phase] += 1
    saved, aimed = steps_saved(out), line[instant.place]
    assert max(saved, default=0) >= newest
    newest = max(saved, default=0)
    print(f'{last.phase:<12}{last.number:>4}{since:>9.3f}  {aimed.phase:<12}{aimed.number:>4}  {newest or "none"}', flush=True)
    for name, end in ENDS.items():
      assert not (out / name).exists() or (out / name).read_bytes().rstrip().endswith(end), name
  assert not {phase for phase in wanted if not hit[phase]}, f'{dict(hit)}: a phase was not hit, try another seed'
  code, errors = finish(begin(), 1200)
  assert code == 0, errors[-3000:]


def assert_alike(whole: pathlib.Path, other: pathlib.Path, files: tuple[str, ...]) -> None:
  """Parameters, optimizer and host state of the newest checkpoint, the rows of metrics but for times, and whole files."""
  assert steps_saved(whole) == steps_saved(other)
  newest = steps_saved(whole)[-1]
  expected, found = saved_arrays(whole, newest), saved_arrays(other, newest)
  assert expected.keys() == found.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  hosts = [json.loads((run / 'checkpoints' / str(newest) / 'host' / 'metadata').read_text()) for run in (whole, other)]
  for host in hosts:
    del host['config']['out'], host['checksum']  # which counts the former in
  assert hosts[0] == hosts[1]
  rows, others = (list(map(comparable, row_files.read(run / 'metrics.jsonl'))) for run in (whole, other))
  assert rows == others and len({row['loss'] for row in rows}) == newest  # the steps are not all alike
  for name in files:
    assert (whole / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('command, changes, wanted, anywhere, files', [
  ('train', ('steps=10', 'eval.every=3'),
   dict(start=2, generation=3, update=3, evaluation=3, save=3, report=2), 4, ('evaluations.jsonl',)),
  ('train', ('steps=10', 'eval.every=3', 'train.async_steps=1'),
   dict(start=1, generation=2, update=5, evaluation=2, row=2, save=3), 5, ('evaluations.jsonl',)),
  ('critic-warmup', ('critic_warmup.min_updates=8', 'critic_warmup.check_every=2'),
   dict(start=1, rollouts=4, update=2, evaluation=2, save=2, report=2), 7,
   ('closed_book.jsonl', 'tiers.jsonl', 'rollouts.jsonl', 'calibration.png')),
])
def test_a_run_that_is_killed_again_and_again(start, tmp_path, command, changes, wanted, anywhere, files):
  whole, again, broken = tmp_path / 'whole', tmp_path / 'again', tmp_path / 'broken'
  for out in (whole, again):  # the first fills the compilation cache; the second has the times, and must be like it
    code, errors = finish(start(command, out, '--marks', *changes), 1200)
    assert code == 0, errors[-3000:]
  assert_alike(whole, again, files)
  break_often(lambda: start(command, broken, '--marks', *changes), broken, marks(again), wanted, anywhere)
  assert_alike(whole, broken, files)
