"""A soak: hours of training in the embedded world, and whether anything grows that should not.

    source launch/environment.sh
    python benchmarks/soak.py --minutes 120 [--config quickstart] [--config.FIELD=VALUE ...]
    python benchmarks/soak.py --analyse DIR   (of any run of one process, also of one that still runs)

Trains in a process of its own, in small steps with evaluations and checkpoints, and writes a line every ten
seconds to `soak.jsonl` in the run folder: resident size, open files, threads, and the number and bytes of the
files. After the minutes the run is stopped with SIGTERM. The last line is one JSON object; `grows` names what
grew, and `flat` says that nothing did:

  resident_mib   Rows of the first step after each save, after the first quarter of the run: a save gives
                 free memory back, then every step adds the holes it leaves. Their slope is that of one line
                 through the medians of parts, each a 24th of the run. A step that compiles adds the size of
                 its programs, so the line has a new intercept after each such step, and the first part after
                 it is left out. The limit is 2 % an hour of the sampled size (without the pages
                 of files) for the upper end of the 95 % interval of the slope, and for half the interval: a
                 soak that is too noisy to tell is not flat.
  fds, threads   The minimum of open files in the last quarter must not exceed that of the second; the median
                 of threads may exceed it by a tenth: pools come and go with every save, what is never closed
                 stays.
  files          metrics.jsonl, evaluations.jsonl, rollouts.jsonl.gz and tensorboard grow with the steps, the
                 first two by at most a tenth more a row at the end than before; there are at most
                 `keep_checkpoints` checkpoints and the one that is being written; no other file grows.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import psutil
from scipy import stats

from jaxsearch.training import row_files

# A save leaves 0.14 MiB behind in orbax 0.12.8 with tensorstore 0.1.86 (strings of its JSON), so not one
# every ten seconds.
SMALL = ('steps=1000000', 'progress=False', 'questions_per_step=4', 'eval.every=40', 'eval.number=16',
         'checkpoint_every=25')
EVERY = 10  # seconds
PARTS = 24
LIMIT = 0.02  # of the resident size, an hour
ROWS = ('metrics.jsonl', 'evaluations.jsonl')


def soak(config: str, changes: list[str], minutes: float, run: pathlib.Path) -> None:
  """Trains for so many minutes and samples the process; SystemExit if a run is there, or ends before."""
  if (run / 'metrics.jsonl').exists():
    raise SystemExit(f'{run} holds a run already: choose another --out')
  fields = [f'--config.{change}' for change in (*SMALL, f'out={run}')]
  command = [sys.executable, '-m', 'jaxsearch.cli', 'train', '--config', config]
  process = subprocess.Popen([*command, *fields, *changes])
  end = time.monotonic() + 60 * minutes
  try:
    while time.monotonic() < end:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EVERY)
        break
      if run.exists():
        row_files.append(run / 'soak.jsonl', [sample(psutil.Process(process.pid), run)])
  finally:
    process.send_signal(signal.SIGTERM)
    status = process.wait()
  if status != 128 + signal.SIGTERM:
    raise SystemExit(f'the run ended by itself, with status {status}')


def sample(process: psutil.Process, run: pathlib.Path) -> dict:
  """Measures what a process holds, and {kind: [number, bytes]} of the files of its run."""
  files = collections.defaultdict(lambda: [0, 0])
  for folder, _, names in os.walk(run):  # passes over folders that are deleted meanwhile
    for path in (pathlib.Path(folder, name) for name in names):
      kind = path.relative_to(run).parts[0]
      with contextlib.suppress(FileNotFoundError):  # renamed or deleted since it was listed
        size = path.stat().st_size
        if kind != 'soak.jsonl':
          files[kind][0] += 1
          files[kind][1] += size
  steps = [path.name.split('.')[0] for path in (run / 'checkpoints').glob('*')]
  with process.oneshot():
    memory = process.memory_info()
    return {'resident_mib': round((memory.rss - memory.shared) / 2**20, 1), 'fds': process.num_fds(),
            'threads': process.num_threads(), 'files': files, 'checkpoints': sum(map(str.isdecimal, steps))}


def slope(values: np.ndarray, stretches: np.ndarray) -> tuple[float, float, float]:
  """Returns (slope, low, high) of lines through the medians of parts: MiB per value, with the 95 % interval.

  Sizes of neighbouring steps are alike: the interval of a line through all of them would be far too narrow.

  Args:
    values: [N] MiB, of three quarters of a run: PARTS parts are 4/3 N long.
    stretches: [N] which of them have a height in common, never falling. The first part of each is left out.
  Raises SystemExit where too few parts are left.
  """
  size, parts = max(4 * len(values) // (3 * PARTS), 1), []
  for number in np.unique(stretches):
    places = np.flatnonzero(stretches == number)
    parts += [(number, places[i:i + size]) for i in range(size, len(places) - size + 1, size)]
  heights = np.array([number for number, _ in parts])
  free = len(parts) - len(set(heights)) - 1
  if free < PARTS // 4:
    raise SystemExit(f'{len(parts)} parts in {len(set(heights))} stretches without a compilation are too few')
  within = lambda x: x - np.array([x[heights == number].mean() for number in heights])
  times = within(np.array([places.mean() for _, places in parts]))
  medians = within(np.array([np.median(values[places]) for _, places in parts]))
  slope = times @ medians / (times @ times)
  error = (np.sum((medians - slope * times)**2) / free / (times @ times))**0.5
  half = stats.t.ppf(0.975, free) * error
  return slope, slope - half, slope + half


def quarters(rows: list) -> tuple[list, list]:
  """Returns the second and the last quarter of rows."""
  return tuple(rows[len(rows) * part // 4:len(rows) * (part + 1) // 4] for part in (1, 3))


def analyse(run: pathlib.Path) -> dict:
  """Returns the figures of a run folder; open files, threads and other files only where it was sampled."""
  rows, samples = row_files.read(run / 'metrics.jsonl'), row_files.read(run / 'soak.jsonl')
  config = json.loads((run / 'config.json').read_text())
  figures, grows = memory_of(run, rows, samples, config['checkpoint_every'])
  figures['bytes_per_step'] = written = {}
  for name in ROWS:
    sizes = [len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in row_files.read(run / name)]
    written[name] = round(sum(sizes) / len(rows))
    early, late = quarters(sizes)
    if early and statistics.mean(late) > 1.1 * statistics.mean(early):
      grows.append(name)
  for name, pattern in (('tensorboard', 'tensorboard/*'), ('rollouts.jsonl.gz', 'rollouts.jsonl.gz')):
    written[name] = round(sum(path.stat().st_size for path in run.glob(pattern)) / len(rows))
  if samples:
    early, late = quarters(samples)
    for name, typical, slack in (('fds', min, 1), ('threads', statistics.median, 1.1)):
      quarter, end = (typical(row[name] for row in part) for part in (early, late))
      figures[name] = {'quarter': quarter, 'end': end}
      grows += [name] * (end > quarter * slack)
    most, files = max(row['checkpoints'] for row in samples), samples[-1]['files']
    figures['checkpoints'] = {'most': most, 'mib': round(files.get('checkpoints', [0, 0])[1] / 2**20, 1)}
    grows += ['checkpoints'] * (most > config['keep_checkpoints'] + 1)
    figures['peak_mib'] = max(row['resident_mib'] for row in samples)
    others = [kind for kind in files if kind not in (*written, 'checkpoints')]
    figures['other_files'] = {kind: files[kind][1] for kind in others}
    grows += [kind for kind in others if files[kind] != early[0]['files'].get(kind)]
  return figures | {'grows': grows, 'flat': not grows}


def memory_of(run: pathlib.Path, rows: list[dict], samples: list[dict], every: int) -> tuple[dict, list[str]]:
  """Returns the figures of resident memory of a run that saves `every` so many steps, and if it grows."""
  after = [place for place, row in enumerate(rows) if row['step'] % every == 1 % every]
  if len(after) < PARTS:
    raise SystemExit(f'{run}: {len(after)} saves are too few to tell, {PARTS} are needed')
  # Written last, and first.
  hours = ((run / 'metrics.jsonl').stat().st_mtime - (run / 'config.json').stat().st_mtime) / 3600
  resident = [rows[place]['resident_mib'] for place in after]
  compiling = np.cumsum([row.get('compilations', 0) > 0 for row in rows])[after]
  medians = [round(float(np.median(part)), 1) for part in np.array_split(resident, PARTS)]
  first = len(resident) // 4
  found = slope(np.array(resident[first:]), compiling[first:])
  an_hour, low, high = (float(len(resident) / hours * value) for value in found)
  limit = LIMIT * float(np.median([row['resident_mib'] for row in samples or rows]))
  return {
    'steps': len(rows), 'compilations_late': int(compiling[-1] - compiling[first]),
    'minutes': round(60 * hours, 1),
    'resident_mib': {'quarter': medians[PARTS // 4], 'half': medians[PARTS // 2], 'end': medians[-1]},
    'mib_per_hour': round(an_hour, 1), 'interval': [round(low, 1), round(high, 1)],
    'limit_mib_per_hour': round(limit, 1)}, ['resident_mib'] * (max(high, high - an_hour) > limit)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--minutes', type=float, default=120)
  parser.add_argument('--config', default='quickstart')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('runs/soak'))
  parser.add_argument('--analyse', type=pathlib.Path, metavar='DIR', help='train nothing; figures of a run')
  args, changes = parser.parse_known_args()
  if not args.analyse:
    soak(args.config, changes, args.minutes, args.out)
  print(json.dumps(analyse(args.analyse or args.out)))


if __name__ == '__main__':
  main()
