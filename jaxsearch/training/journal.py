"""The rollouts of a step on disk as they end: a run that was killed does not decode them again.

    DIR/journal/run.json            the config and the model of the run
    DIR/journal/STEP.PROCESS.jsonl  a line for each tree that ended in a process: its number in the batch, what the sampler
                                    counted for it, and the tree (`trees.records.grown_line`); an empty object when all have

Rollouts are a function of the parameters, which come from a checkpoint. So those of step n + 1 belong to the checkpoint of step
n and are kept as long as it is. With `train.async_steps=1` they are a part of it: their parameters are older than its own.

What a tree draws depends on nothing but its number and the key, yet its log-probabilities differ in the last bits with what it
shares the device with. Where bits count (`sampler.deterministic`) the rollouts of a process are taken as a whole or not at all.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from jaxsearch.files import naming, write_whole
from jaxsearch.trees.records import grown_line
from jaxsearch.trees.tree import Tree

FOLDER = 'journal'


def append(out: pathlib.Path, step: int, process: int, number: int, tree: Tree, counts: dict[str, int]) -> bool:
  """Writes a tree that has ended; False if its method made notes that a line cannot hold. An OSError names the file."""
  grown = grown_line(tree)
  if grown is not None:
    _write(out, step, process, f'{{"number": {number}, "counts": {json.dumps(counts)}, "tree": {grown}}}\n')
  return grown is not None


def end(out: pathlib.Path, step: int, process: int) -> None:
  """Writes that a process has no more trees of a step."""
  _write(out, step, process, '{}\n')


def _write(out: pathlib.Path, step: int, process: int, line: str) -> None:
  path = out / FOLDER / f'{step}.{process}.jsonl'
  with naming(path), open(path, 'a', encoding='utf-8') as file:
    file.write(line)


def read(out: pathlib.Path, step: int) -> dict[int, dict[str, Any]]:
  """{number: record} of the trees of a step that ended, whichever process grew them."""
  return {record['number']: record for path in sorted((out / FOLDER).glob(f'{step}.*.jsonl'))
          for record in _records(path)[0] if record}


def keep(out: pathlib.Path, wanted: Callable[[int], bool]) -> None:
  """Drops the rollouts of the steps that are not `wanted`."""
  for path in (out / FOLDER).glob('*.*.jsonl'):
    if not wanted(int(path.name.partition('.')[0])):
      path.unlink()


def reopen(out: pathlib.Path, run: dict[str, Any], check: Callable[[dict], None], wanted: Callable[[int], bool],
           whole: bool) -> None:
  """Makes the journal of a run that starts: only steps that are `wanted`, no lines cut short, nothing of another run.

  Args:
    run: what `check` is called with when the run resumes; it raises ValueError where the journal is of another.
    whole: drop what a process had not grown to its end.
  """
  folder = out / FOLDER
  try:
    check(json.loads((folder / 'run.json').read_text(encoding='utf-8')))
  except (FileNotFoundError, ValueError, KeyError):
    shutil.rmtree(folder, ignore_errors=True)
  keep(out, wanted)
  for path in folder.glob('*.*.jsonl'):
    records, size = _records(path)
    if whole and not (records and records[-1] == {}):
      path.unlink()
    else:
      os.truncate(path, size)
  write_whole(folder / 'run.json', json.dumps(run) + '\n')


def _records(path: pathlib.Path) -> tuple[list[dict], int]:
  """The records of a file up to the first line that is not whole, and where that begins."""
  records, size = [], 0
  for line in path.read_bytes().splitlines(keepends=True):
    try:
      records.append(json.loads(line if line.endswith(b'\n') else b''))
    except ValueError:
      break
    size += len(line)
  return records, size
