"""A soak: hours of training in the embedded world, and whether anything grows that should not.

    source launch/environment.sh && python benchmarks/soak.py --minutes 120 [--config quickstart] [--config.FIELD=VALUE ...]
    python benchmarks/soak.py --analyse DIR        (the folder of any run of one process, also of one that still runs)

Trains in a process of its own, in small steps with evaluations and checkpoints, and writes a line every ten seconds to
`soak.jsonl` in the run folder: resident size, open files, threads, and the number and bytes of the files. After the minutes the
run is stopped with SIGTERM. The last line is one JSON object; `grows` names what grew, and `flat` says that nothing did:

  resident_mib   Which rows: those of the first step after each save, behind the first quarter of the run. A save gives free
                 memory back, then every step adds the holes it leaves, so only steps at the same distance can be compared.
                 The slope: one line through the medians of parts, each a 24th of the run. A step that compiles lifts what
                 follows by the size of its programs, so the height of the line is free after each such step, and the part
                 behind it, which has the compiler's own memory, is left out.
                 The limit: 2 % an hour of the sampled size (without the pages of files). The upper end of the 95 % interval
                 of the slope, and half the interval, must be below it: a soak that is too noisy to tell is not flat.
  fds, threads   the least open files of the last quarter must not be more than the least of the second, nor the median of the
                 threads by a tenth: pools come and go with every save, what is never closed stays.
  files          metrics.jsonl, evaluations.jsonl, rollouts.jsonl.gz and tensorboard grow with the steps, the first two by no more
                 a row at the end than before (a tenth is allowed); there are at most `keep_checkpoints` checkpoints and the one
                 that is being written; no other file grows.
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

# A save leaves 0.14 MiB behind in orbax 0.12.8 with tensorstore 0.1.86 (strings of its JSON), so not one every ten seconds.
SMALL = ('steps=1000000', 'progress=False', 'questions_per_step=4', 'eval.every=40', 'eval.number=16', 'checkpoint_every=25')
EVERY = 10  # seconds
PARTS = 24
LIMIT = 0.02  # of the resident size, an hour
ROWS = ('metrics.jsonl', 'evaluations.jsonl')


def soak(config: str, changes: list[str], minutes: float, run: pathlib.Path) -> None:
  """Trains for so many minutes and samples the process; SystemExit if there is a run already, or if it ends before."""
  if (run / 'metrics.jsonl').exists():
    raise SystemExit(f'{run} holds a run already: choose another --out')
  fields = [f'--config.{change}' for change in (*SMALL, f'out={run}')]
  process = subprocess.Popen([sys.executable, '-m', 'jaxsearch.cli', 'train', '--config', config, *fields, *changes])
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
  """What a process holds, and {kind: [number, bytes]} of the files of its run."""
  found = collections.defaultdict(lambda: [0, 0])
  for folder, _, names in os.walk(run):  # passes over folders that are deleted meanwhile
    for path in (pathlib.Path(folder, name) for name in names):
      kind = path.relative_to(run).parts[0]
      with contextlib.suppress(FileNotFoundError):  # renamed or deleted since it was listed
        size = path.stat().st_size
        if kind != 'soak.jsonl':
          found[kind][0] += 1
          found[kind][1] += size
  with process.oneshot():
    memory = process.memory_info()
    return {'resident_mib': round((memory.rss - memory.shared) / 2**20, 1), 'fds': process.num_fds(),
            'threads': process.num_threads(), 'files': found,
            'checkpoints': sum(path.name.split('.')[0].isdecimal() for path in (run / 'checkpoints').glob('*'))}


def slope(values: np.ndarray, stretches: np.ndarray) -> tuple[float, float, float]:
  """(slope, low, high) of lines through the medians of parts: MiB per value given, with the 95 % interval.

  Sizes of neighbouring steps are alike, so that the interval of a line through all of them would be far too narrow.

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
  times, medians = np.array([(places.mean(), np.median(values[places])) for _, places in parts]).reshape(-1, 2).T
  within = lambda x: x - np.array([x[heights == number].mean() for number in heights])
  free = len(parts) - len(set(heights)) - 1
  if free < PARTS // 4:
    raise SystemExit(f'{len(parts)} parts in {len(set(heights))} stretches without a compilation are too few to tell')
  times, medians = within(times), within(medians)
  found = times @ medians / (times @ times)
  error = (np.sum((medians - found * times)**2) / free / (times @ times))**0.5
  half = stats.t.ppf(0.975, free) * error
  return found, found - half, found + half


def analyse(run: pathlib.Path) -> dict:
  """The figures of a run folder; open files, threads and other files only where it was sampled (`soak.jsonl`)."""
  rows, samples = row_files.read(run / 'metrics.jsonl'), row_files.read(run / 'soak.jsonl')
  config = json.loads((run / 'config.json').read_text())
  every = config['checkpoint_every']
  after = [place for place, row in enumerate(rows) if row['step'] % every == 1 % every]
  if len(after) < PARTS:
    raise SystemExit(f'{run}: {len(after)} saves are too few to tell, {PARTS} are needed')
  hours = ((run / 'metrics.jsonl').stat().st_mtime - (run / 'config.json').stat().st_mtime) / 3600  # written last, and first
  resident = [rows[place]['resident_mib'] for place in after]
  compiling = np.cumsum([row.get('compilations', 0) > 0 for row in rows])[after]
  medians = [round(float(np.median(part)), 1) for part in np.array_split(resident, PARTS)]
  first = len(resident) // 4
  an_hour = [len(resident) / hours * value for value in slope(np.array(resident[first:]), compiling[first:])]
  limit = LIMIT * float(np.median([row['resident_mib'] for row in samples or rows]))
  grows = ['resident_mib'] if max(an_hour[2], an_hour[2] - an_hour[0]) > limit else []

  found = {'steps': len(rows), 'compilations_late': int(compiling[-1] - compiling[first]), 'minutes': round(60 * hours, 1),
           'resident_mib': {'quarter': medians[PARTS // 4], 'half': medians[PARTS // 2], 'end': medians[-1]},
           'mib_per_hour': round(float(an_hour[0]), 1), 'interval': [round(float(value), 1) for value in an_hour[1:]],
           'limit_mib_per_hour': round(limit, 1), 'bytes_per_step': {}}
  for name in ROWS:
    sizes = [len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in row_files.read(run / name)]
    found['bytes_per_step'][name] = round(sum(sizes) / len(rows))
    early, late = (sizes[len(sizes) * part // 4:len(sizes) * (part + 1) // 4] for part in (1, 3))
    if early and statistics.mean(late) > 1.1 * statistics.mean(early):
      grows.append(name)
  for name, paths in (('tensorboard', run.glob('tensorboard/*')), ('rollouts.jsonl.gz', run.glob('rollouts.jsonl.gz'))):
    found['bytes_per_step'][name] = round(sum(path.stat().st_size for path in paths) / len(rows))
  if not samples:
    return found | {'grows': grows, 'flat': not grows}

  early, late = (samples[len(samples) * part // 4:len(samples) * (part + 1) // 4] for part in (1, 3))
  for name, typical, slack in (('fds', min, 1), ('threads', statistics.median, 1.1)):
    found[name] = {'quarter': typical(row[name] for row in early), 'end': typical(row[name] for row in late)}
    grows += [name] * (found[name]['end'] > found[name]['quarter'] * slack)
  found['checkpoints'] = {'most': max(row['checkpoints'] for row in samples),
                          'mib': round(samples[-1]['files'].get('checkpoints', [0, 0])[1] / 2**20, 1)}
  grows += ['checkpoints'] * (found['checkpoints']['most'] > config['keep_checkpoints'] + 1)
  found['peak_mib'] = max(row['resident_mib'] for row in samples)
  other = [{kind: size for kind, size in row['files'].items() if kind not in (*found['bytes_per_step'], 'checkpoints')}
           for row in (early[0], samples[-1])]
  found['other_files'] = {kind: size for kind, (_, size) in other[1].items()}
  grows += [kind for kind, size in other[1].items() if size != other[0].get(kind)]
  return found | {'grows': grows, 'flat': not grows}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--minutes', type=float, default=120)
  parser.add_argument('--config', default='quickstart')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('runs/soak'))
  parser.add_argument('--analyse', type=pathlib.Path, metavar='DIR', help='train nothing; the figures of this run')
  args, changes = parser.parse_known_args()
  if not args.analyse:
    soak(args.config, changes, args.minutes, args.out)
  print(json.dumps(analyse(args.analyse or args.out)))


if __name__ == '__main__':
  main()
