"""The command line of a command: its own flags, and a config, a file or a shipped one, with overrides of its fields.

argparse and ml_collections parse; here their complaints become one line that names the flag or field and the nearest right one.
"""

import argparse
import pathlib
import re
import sys
import types
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from jaxsearch.config_check import SHIPPED, check, fields, load_file, suggestion


class UsageError(Exception):
  """The command line cannot be carried out as it stands; the message says why."""


class Parser(argparse.ArgumentParser):
  """argparse for the flags of a command: a mistake is a UsageError."""

  def error(self, message: str):
    message = re.sub("argument (.*): invalid .* value: '(.*)'", r'\1=\2: not a number', message)
    raise UsageError(message.replace('the following arguments are required:', f'{self.prog} needs'))


def parse(command: str, arguments: Sequence[str], default: str) -> tuple[ml_collections.ConfigDict, list[str]]:
  """(config, remaining words) of `--config NAME --config.key=value … words`, parsed and checked.

  Args:
    command: for messages; `train` also checks what only training needs.
    default: the config taken when none is named.
  Raises:
    UsageError: an unknown flag, field or config, or values that fields cannot have; names them.
  """
  parser = Parser(prog=command, add_help=False, allow_abbrev=False)
  parser.add_argument('--config', default=default)
  given, overrides = parser.parse_known_args(arguments)
  file, argument = find(given.config)
  try:
    config = load_file(file).get_config(*argument)
    if not isinstance(config, ml_collections.ConfigDict):
      raise TypeError('get_config() returns no ConfigDict')
  except Exception as error:  # whatever goes wrong in the user's file
    raise UsageError(f'{file}: {type(error).__name__}: {error}') from error
  values = flags.FlagValues()
  try:
    config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=overrides)
    words = values([command, *overrides])[1:]
    check(config, training=command == 'train')
  except flags.UnrecognizedFlagError as error:
    raise UsageError(f'{command} has no flag --{error.flagname}') from error
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    known = [name for name, _ in fields(config)]
    names = [match[1] for match in map(re.compile('--?(?:no)?config[.]([^=]+)').match, overrides) if match]
    unknown = [f'the config has no field {name!r}{suggestion(name, known)}' for name in names if name not in known]
    raise UsageError('; '.join(unknown) or str(error).replace('\n', ' ')) from error
  return config, words


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
