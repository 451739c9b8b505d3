"""The command line of a command: its own flags, and a config, a file or a shipped one, with overrides of its fields.

argparse and ml_collections parse; here their complaints become one line that names the flag or field and the nearest right one.
"""

import argparse
import functools
import operator
import pathlib
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from ml_collections import config_flags

from jaxsearch.config_check import SHIPPED, check, fields, from_saved, load_file, suggestion

# What a policy was trained to see: with a checkpoint these are the run's, whichever config is given.
TRAINED = ('method', 'grow', 'eval.grow', 'sampler.length', 'tokenizer', 'search.topk', 'python')


class UsageError(Exception):
  """The command line cannot be carried out as it stands; the message says why."""


class Parser(argparse.ArgumentParser):
  """argparse for the flags of a command: a mistake is a UsageError."""

  def error(self, message: str):
    message = re.sub("argument (.*): invalid .* value: '(.*)'", r'\1=\2: not a number', message)
    raise UsageError(message.replace('the following arguments are required:', f'{self.prog} needs'))


class Given(NamedTuple):
  """What a command line says beside the flags of its command."""
  config: ml_collections.ConfigDict
  words: list[str]
  changed: frozenset[str]  # fields of the config that it sets


def parse(command: str, arguments: Sequence[str], default: str, saved: Mapping[str, Any] | None = None) -> Given:
  """What `--config NAME --config.key=value … words` says, parsed and checked.

  Args:
    command: for messages; `train` also checks what only training needs.
    default: the config taken when none is named.
    saved: the config of the checkpoint that the command reads. It takes the place of `default`; in a config that is named it
      takes the place of what the policy was trained to see (`TRAINED`). Fields set by `--config.key=value` win over it. Each
      difference is a line on stderr.
  Raises:
    UsageError: an unknown flag, field or config, or values that fields cannot have; names them.
  """
  parser = Parser(prog=command, add_help=False, allow_abbrev=False)
  parser.add_argument('--config', default='')
  given, overrides = parser.parse_known_args(arguments)
  names = [match[1] for match in map(re.compile('--?(?:no)?config[.]([^=]+)').match, overrides) if match]
  try:
    trained = None if saved is None else from_saved(saved)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UsageError(f'the config in the checkpoint: {error}') from error
  then = {} if trained is None else _trained(trained)
  config = trained if trained is not None and not given.config else _load(given.config or default)
  if trained is not None and given.config:
    _take_trained(config, trained, names)
  values = flags.FlagValues()
  try:
    config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=overrides)
    words = values([command, *overrides])[1:]
    check(config, training=command == 'train')
  except flags.UnrecognizedFlagError as error:
    raise UsageError(f'{command} has no flag --{error.flagname}') from error
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    known = [name for name, _ in fields(config)]
    unknown = [f'the config has no field {name!r}{suggestion(name, known)}' for name in names if name not in known]
    raise UsageError('; '.join(unknown) or str(error).replace('\n', ' ')) from error
  now = _trained(config)
  for name in names if then else ():
    if now.get(name) != then.get(name):
      _say(f'{name}={now.get(name)!r} as you set it; the policy was trained with {_shown(then, name)}')
  return Given(config, words, frozenset(names))


def _load(name: str) -> ml_collections.ConfigDict:
  file, argument = find(name)
  try:
    config = load_file(file).get_config(*argument)
    if not isinstance(config, ml_collections.ConfigDict):
      raise TypeError('get_config() returns no ConfigDict')
  except Exception as error:  # whatever goes wrong in the user's file
    raise UsageError(f'{file}: {type(error).__name__}: {error}') from error
  return config


def _take_trained(config: ml_collections.ConfigDict, trained: ml_collections.ConfigDict, changed: Iterable[str]) -> None:
  """Sets the fields `TRAINED` of a config as in `trained`, and groups that it lacks; says what differed and is not `changed`."""
  ours, theirs = _trained(config), _trained(trained)
  for name in sorted(ours.keys() | theirs.keys()):
    if ours.get(name) != theirs.get(name) and name not in changed:
      _say(f'{name}: the config has {_shown(ours, name)}, the checkpoint {_shown(theirs, name)}; that of the checkpoint is used')
  with config.unlocked():
    for name in (*TRAINED, *(set(trained) - set(config))):
      *path, leaf = name.split('.')
      functools.reduce(operator.getitem, path, config)[leaf] = functools.reduce(operator.getitem, [*path, leaf], trained)


def _trained(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Name -> value of the fields `TRAINED`; of groups, of what is in them."""
  return {name: value for name, value in fields(config) if not isinstance(value, ml_collections.ConfigDict)
          and any(name == one or name.startswith(f'{one}.') for one in TRAINED)}


def _shown(values: Mapping[str, Any], name: str) -> str:
  return repr(values[name]) if name in values else 'none'


def _say(message: str) -> None:
  print(f'jaxsearch: {message}', file=sys.stderr)


def find(name: str) -> tuple[pathlib.Path, list[str]]:
  """(file, arguments of its get_config) of `quickstart`, `claims/carl`, `smollm2:cusearch`, `configs/carl.py` or `my/own.py`.

  A name is a shipped config first, a path with '.py' a file first. From then on `from configs import …` finds the shipped
  configs, and before them those of the folder `configs` that the file is in, if there is one.
  """
  path, *argument = name.split(':', 1)
  stem = path.removesuffix('.py')
  shipped, own = SHIPPED / f'{stem.removeprefix("configs/")}.py', pathlib.Path(f'{stem}.py')
  for file in (own, shipped) if path.endswith('.py') else (shipped, own):
    if file.is_file():
      package = sys.modules.setdefault('configs', types.ModuleType('configs'))
      around = [str(folder) for folder in file.resolve().parents if folder.name == 'configs'][:1]
      package.__path__ = list(dict.fromkeys([*around, *getattr(package, '__path__', ()), str(SHIPPED)]))
      return file, argument
  known = [str(file.relative_to(SHIPPED).with_suffix('')) for file in sorted(SHIPPED.rglob('*.py')) if file.name != 'checks.py']
  near = suggestion(stem.removeprefix('configs/'), known)
  raise UsageError(f'no config {path!r}{near or "; there are " + ", ".join(known)}')
