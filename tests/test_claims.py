"""Every row of every table in configs/claims is a config that runs: two small steps of each, and an
evaluation."""

import functools
import importlib
import json
import pathlib
import re
import subprocess

import jax
import pytest

from jaxsearch import cli, flags
from jaxsearch.config_check import fields
from jaxsearch.evaluation import sweep
from jaxsearch.training import row_files

FOLDER = pathlib.Path(__file__).parents[1] / 'configs' / 'claims'
SWEEPS = {file.stem: importlib.import_module(f'configs.claims.{file.stem}').get_config()
          for file in sorted(FOLDER.glob('[!_]*.py'))}
SMALL = {'steps': 2, 'questions_per_step': 2, 'eval.every': 2, 'eval.number': 2, 'checkpoint_every': 2,
         'progress': False,
         'train.micro_rows': 8}  # as many as the tests have devices
# What other commands make for these sweeps: here the run takes what the embedded world has.
MADE_BEFORE = {'model': 'world-carl', 'data.corpus': 'world', 'data.questions': 'world:rl',
               'eval.questions': 'world:test', 'eval.tiers': '', 'critic.warm_start': ''}


@functools.cache
def runs_of(name):
  return sweep.plan(SWEEPS[name])


def changed(run, out):
  """The overrides that make a run small."""
  made = {name: value for name, value in MADE_BEFORE.items()
          if str(dict(fields(run.config))[name]).startswith('runs/')}
  return [f'--config.{name}={value}' for name, value in (SMALL | made | {'out': str(out)}).items()]


def test_two_rows_of_a_table_differ():
  for name, config in SWEEPS.items():
    rows = [run.config.to_dict() | {'out': ''} for run in runs_of(name) if run.seed == config.seeds[0]]
    assert len({json.dumps(row, sort_keys=True, default=str) for row in rows}) == len(rows) == len(config.variants), name


def commands(name):
  """The arguments of the `jaxsearch` commands in the docstring of a sweep, as a shell expands them."""
  text = importlib.import_module(f'configs.claims.{name}').__doc__
  script = '\n'.join(['jaxsearch() { echo "$@"; }', *re.findall('^    (.*)', text, re.MULTILINE)])
  shell = subprocess.run(['bash', '-uc', script], capture_output=True, text=True, check=True)
  return [line.split() for line in shell.stdout.splitlines()]


@pytest.mark.parametrize('name', ['carl', 'carl_formats'])
def test_critics_were_warmed_up_alike_where_they_are_read_and_left_the_policy_as_it_was(name):
  """Appendix H of CARL compares critics after equal training; the rows of a grid start from one set of
  weights."""
  made = {config.out: config for command, *arguments in commands(name) if command == 'critic-warmup'
          for config in [flags.parse(command, arguments, 'carl').config]}
  rows = [run.config for run in runs_of(name)]
  assert {row.critic.warm_start for row in rows} == {'', *made} and len({row.model for row in rows}) == 1
  assert len({(warm.critic_warmup.min_updates, warm.critic_warmup.max_updates)
              for warm in made.values()}) == 1
  for warm in made.values():
    assert warm.critic_warmup.min_updates == warm.critic_warmup.max_updates
    assert warm.critic_warmup.backbone_rate == 0
  for row in rows:
    if row.critic.warm_start:
      warm = made[row.critic.warm_start]
      assert (warm.method, warm.model, warm.train.aggregate, warm.critic.shared) == (
        row.method, row.model, row.train.aggregate, row.critic.shared)


def test_the_files_that_the_fidelity_page_names_are_there():
  page = (FOLDER.parents[1] / 'docs' / 'fidelity.md').read_text(encoding='utf-8')
  rooms = 'configs|benchmarks|methods|trees|rewards|tools|training|models|evaluation|advantages|sampler'
  named = set(re.findall(rf'`((?:{rooms})/[\w/]+\.(?:py|txt|md|html))', page))
  roots = FOLDER.parents[1], FOLDER.parents[1] / 'jaxsearch'
  assert len(named) > 30 and not [name for name in named if not any((root / name).exists() for root in roots)]


@pytest.fixture
def no_programs_left():
  """Drops the compiled programs of a row: those of 46 rows took 4.9 GB."""
  yield
  jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures('no_programs_left')
@pytest.mark.parametrize(('name', 'variant'),
                         [(name, variant) for name, config in SWEEPS.items() for variant in config.variants])
def test_every_row_trains(name, variant, tmp_path):
  run = next(run for run in runs_of(name) if run.variant == variant)
  assert cli.main(['train', *run.arguments, *changed(run, tmp_path)]) == 0
  rows = row_files.read(tmp_path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2] and all(row['tokens_generated'] > 0 for row in rows)
  assert row_files.read(tmp_path / 'evaluations.jsonl')[-1]['step'] == 2
