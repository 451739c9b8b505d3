"""What the studies share: beds, trees grown with frozen weights, equal budgets, intervals, verdicts, files.

A study is cut into parts, each a row of its file of JSON lines: what is there already is not measured again.
"""

import argparse
import dataclasses
import datetime
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxsearch import setup
from jaxsearch.commands.command import progress_of
from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation import agents, tables, verdicts
from jaxsearch.evaluation.verdicts import Estimate
from jaxsearch.methods import find_method
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.training import row_files
from jaxsearch.training.saved_policies import VERSIONS
from jaxsearch.trees.tree import Tree

RUNS = pathlib.Path('docs/claims/runs')  # of studies at full size


@dataclasses.dataclass(frozen=True)
class Bed:
  """A policy with frozen weights, its search and its questions."""
  config: ConfigDict
  policy: agents.Policy
  agent: Agent
  questions: Sequence[Question]


def paths(name: str, hops: Sequence[int]) -> list[Question]:
  """Returns the questions of `name` that are plain paths of so many hops: no comparisons, no sums."""
  return [question for question in load_questions(name, hops=tuple(hops), arithmetic=False)
          if question.metadata.get('operation') is None]


def open_bed(config: ConfigDict, questions: Sequence[Question], checkpoint: str = '', **grow: Any) -> Bed:
  """Opens the policy of `checkpoint`, or of config.model, as it samples in training, with tools and services.

  `grow` are settings of the method's `grow` that differ from config.grow.
  """
  policy = agents.load_policy(config, checkpoint)
  engine = setup.open_engine(config, policy.config, policy.tokenizer)
  engine.load(policy.params)
  tools = setup.open_tools(config, services=getattr(find_method(config.method), 'SERVICES', ()))
  return Bed(config, policy, setup.make_agent(config, engine, tools, **grow), questions)


def grow(bed: Bed, seed: int, *, copies: int = 1, own: Callable | None = None,
         **changes: Any) -> list[list[Tree]]:
  """Grows `copies` trees for each question of a bed and returns them by question.

  Args:
    seed: of sampling; the same seed gives the same trees.
    own: a `grow(question, tree)` in place of the method's.
    changes: of the arguments of `rollout`.
  """
  agent = dataclasses.replace(bed.agent, grow=own) if own else bed.agent
  asked = [question for question in bed.questions for _ in range(copies)]
  with progress_of(len(asked), 'trees') as report:
    trees, _ = rollout(agent, asked, jax.random.key(seed), on_progress=report, **changes)
  return [trees[start:start + copies] for start in range(0, len(trees), copies)]


def at_budget(tokens: Sequence[float], values: np.ndarray, budget: float) -> np.ndarray:
  """Returns the values [...] at `budget` tokens of a curve: values [N,...] at mean `tokens` [N], rising.

  Interpolates linearly between points; constant beyond the ends.
  """
  return np.apply_along_axis(lambda of_one: np.interp(budget, tokens, of_one), 0, values)


def decide(contrasts: Mapping[str, tuple[Estimate, float | None]]) -> list[dict]:
  """Returns a row for each contrast (estimate, margin): mean, interval, corrected p, verdict.

  Primary are those with a margin: p is corrected over them (Holm). The others are shown and decide nothing.
  """
  primary = [name for name, (of, margin) in contrasts.items() if margin is not None and of.p is not None]
  corrected = dict(zip(primary, verdicts.holm([contrasts[name][0].p for name in primary])))
  return [{'contrast': name, **of._asdict(), 'corrected': corrected.get(name),
           'verdict': '' if margin is None else verdicts.verdict(of, margin, corrected.get(name))}
          for name, (of, margin) in contrasts.items()]


def times(of: Estimate, scale: float) -> Estimate:
  """Returns an estimate in another unit."""
  return Estimate(*(value and value * scale for value in of[:3]), of.p)


def interval(of: Estimate, scale: float = 1, digits: int = 1) -> str:
  """Returns 'mean [low, high]', each times `scale`."""
  mean, low, high, _ = times(of, scale)
  return f'{mean:+.{digits}f}' + ('' if low is None else f' [{low:+.{digits}f}, {high:+.{digits}f}]')


def verdicts_of(contrasts: Mapping[str, tuple[Estimate, float | None]], unit: str, scale: float = 1,
                digits: int = 1, why: str = '') -> str:
  """Returns the Markdown table of `decide`, differences and margins times `scale` in `unit`.

  Where a bed misses its gate, `why` says so in place of verdicts.
  """
  contrasts = {name: (times(of, scale), margin and margin * scale)
               for name, (of, margin) in contrasts.items()}
  return table([{'contrast': row['contrast'], unit: interval(contrasts[row['contrast']][0], 1, digits),
                 'p (Holm)': row['corrected'], 'verdict': row['verdict'] and (why or row['verdict'])}
                for row in decide(contrasts)])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a Markdown table of rows with the same keys; the first column is what a row is."""
  cell = lambda value: '' if value is None else f'{value:.3g}' if isinstance(value, float) else str(value)
  return tables.layout([list(rows[0]), *(list(map(cell, row.values())) for row in rows)], 'markdown')


def measured(path: pathlib.Path, parts: Mapping[str, Callable[[], dict]],
             others: bool = False) -> dict[str, dict]:
  """Returns name -> row of every part; those that the file at `path` lacks are measured and appended.

  With `others` also rows of the file that are none of the parts, since a clone has no run folders.
  """
  have = {row['part']: row for row in row_files.read(path)}
  path.parent.mkdir(parents=True, exist_ok=True)
  for name, measure in parts.items():
    if name not in have:
      have[name] = {'part': name} | measure() | VERSIONS | {'date': datetime.date.today().isoformat()}
      row_files.write(path, [*row_files.read(path), have[name]])  # a kill may have cut the last line short
      print(f'{name}: done', flush=True)
  return have if others else {name: have[name] for name in parts}


def main(name: str, study: Callable[[argparse.Namespace, pathlib.Path], str],
         sizes: Mapping[str, Mapping[str, Any]], arguments: Sequence[str] | None = None,
         **options: str) -> None:
  """Runs a study from its command line and prints its tables.

  Args:
    study: (the parsed flags with the settings of the size; the file of its rows) -> Markdown.
    sizes: by name, the settings of each; the first is what the plan says.
    options: further flags and their defaults.
  """
  full = next(iter(sizes))
  parser = argparse.ArgumentParser(prog=f'python -m studies.{name}')
  parser.add_argument('--size', choices=sizes, default=full)
  parser.add_argument('--out', help=f'folder for its rows; {RUNS}, or one in runs/studies for another size or bed')
  for flag, default in options.items():
    parser.add_argument(f'--{flag}', default=default)
  given = parser.parse_args(arguments)
  others = [f'{flag} {value}' for flag, default in options.items() if (value := getattr(given, flag)) != default]
  jax.config.update('jax_compilation_cache_dir', jax.config.jax_compilation_cache_dir or '.jax_cache')
  vars(given).update(sizes[given.size])
  chosen = re.sub('[^a-zA-Z0-9.-]+', '_', ' '.join([given.size, *others]))
  out = given.out or (RUNS if chosen == full else f'runs/studies/{chosen}')
  try:
    print(study(given, pathlib.Path(out) / f'{name}.jsonl'))
  except FileNotFoundError as missing:
    sys.exit(f'{missing}\nThe head of studies/{name}.py says how to make the bed.')
