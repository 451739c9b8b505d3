"""A soak: hours of training in the embedded world, and whether anything grows that should not.

    source launch/environment.sh && python benchmarks/soak.py --minutes 120 [--config quickstart] [--config.FIELD=VALUE ...]
    python benchmarks/soak.py --analyse DIR        (the folder of any run, also of one that still runs)

Trains in a process of its own, in small steps with evaluations and checkpoints, and writes a line every ten seconds to
`soak.jsonl` in the run folder: resident size, open files, threads, and the number and bytes of the files. After the minutes the
run is stopped with SIGTERM. The last line is one JSON object; `grows` names what grew, and `flat` says that nothing did:

  resident_mib   of the samples, without the pages of files, which the system takes away and gives back as it likes (of a run
                 that was not sampled: of the rows of metrics, with them). In the second half (in the first, programs are
                 compiled and malloc's arenas fill): cut into twelve equal parts, with a line through the medians of the parts.
                 The upper end of the 95 % interval of its slope must be below 2 % of the size an hour, so a soak that is too
                 short or too noisy to tell is not flat.
  fds, threads   the least of the last quarter must not be above that of the second, of threads by a tenth: pools come and go
                 with every save, what is never closed stays.
  files          metrics.jsonl, evaluations.jsonl, rollouts.jsonl.gz and tensorboard grow with the steps, the first two by no more
                 a row at the end than before (a tenth is allowed); there are at most `keep_checkpoints` checkpoints and the one
                 that is being written; the journal is never twice as large as it was in the second quarter; no other file grows.
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

from jaxsearch.training import runs

SMALL = ('steps=1000000', 'progress=False', 'questions_per_step=4', 'eval.every=40', 'eval.number=16', 'checkpoint_every=5')
EVERY = 10  # seconds
PARTS = 12
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
        runs.append(run / 'soak.jsonl', [sample(psutil.Process(process.pid), run)])
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


def slope(values: list[float]) -> tuple[float, float, float]:
  """(slope, low, high) of a line through the medians of `PARTS` equal parts, a step, with the 95 % interval.

  Sizes of neighbouring steps are alike, so that the interval of a line through all of them would be far too narrow.
  """
  parts = np.array_split(np.array(values), PARTS)
  places = np.cumsum([0] + [len(part) for part in parts])
  line = stats.linregress((places[:-1] + places[1:] - 1) / 2, [np.median(part) for part in parts])
  half = stats.t.ppf(0.975, PARTS - 2) * line.stderr
  return line.slope, line.slope - half, line.slope + half


def analyse(run: pathlib.Path) -> dict:
  """The figures of a run folder; open files, threads and other files only where it was sampled (`soak.jsonl`)."""
  rows, samples = runs.read(run / 'metrics.jsonl'), runs.read(run / 'soak.jsonl')
  config = json.loads((run / 'config.json').read_text())
  if len(rows) < 4 * PARTS:
    raise SystemExit(f'{run}: {len(rows)} steps are too few to tell, {4 * PARTS} are needed')
  hours = ((run / 'metrics.jsonl').stat().st_mtime - (run / 'config.json').stat().st_mtime) / 3600  # written last, and first
  resident = [row['resident_mib'] for row in samples or rows]
  medians = [round(float(np.median(part)), 1) for part in np.array_split(resident, 2 * PARTS)]
  an_hour = [len(resident) / hours * value for value in slope(resident[len(resident) // 2:])]
  limit = LIMIT * medians[PARTS]
  grows = ['resident_mib'] if an_hour[2] > limit else []

  found = {'steps': len(rows), 'minutes': round(60 * hours, 1),
           'resident_mib': {'quarter': medians[PARTS // 2], 'half': medians[PARTS], 'end': medians[-1]},
           'mib_per_hour': round(an_hour[0], 1), 'interval': [round(value, 1) for value in an_hour[1:]],
           'limit_mib_per_hour': round(limit, 1), 'bytes_per_step': {}}
  for name in ROWS:
    sizes = [len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in runs.read(run / name)]
    found['bytes_per_step'][name] = round(sum(sizes) / len(rows))
    early, late = (sizes[len(sizes) * part // 4:len(sizes) * (part + 1) // 4] for part in (1, 3))
    if early and statistics.mean(late) > 1.1 * statistics.mean(early):
      grows.append(name)
  for name, paths in (('tensorboard', run.glob('tensorboard/*')), ('rollouts.jsonl.gz', run.glob('rollouts.jsonl.gz'))):
    found['bytes_per_step'][name] = round(sum(path.stat().st_size for path in paths) / len(rows))
  if not samples:
    return found | {'grows': grows, 'flat': not grows}

  early, late = (samples[len(samples) * part // 4:len(samples) * (part + 1) // 4] for part in (1, 3))
  least = lambda part, name: min(row[name] for row in part)
  for name in ('fds', 'threads'):
    found[name] = {'quarter': least(early, name), 'end': least(late, name)}
    grows += [name] * (found[name]['end'] > found[name]['quarter'] * (1.1 if name == 'threads' else 1))
  found['checkpoints'] = {'most': max(row['checkpoints'] for row in samples),
                          'mib': round(samples[-1]['files'].get('checkpoints', [0, 0])[1] / 2**20, 1)}
  grows += ['checkpoints'] * (found['checkpoints']['most'] > config['keep_checkpoints'] + 1)
  found['peak_mib'] = max(row['resident_mib'] for row in samples)
  largest = lambda part, kind: max(row['files'].get(kind, [0, 0])[1] for row in part)
  grows += ['journal'] * (largest(late, 'journal') >= 2 * max(largest(early, 'journal'), 1))
  other = [{kind: size for kind, size in row['files'].items() if kind not in (*found['bytes_per_step'], 'checkpoints', 'journal')}
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
