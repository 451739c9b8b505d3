"""Command-line flags: a config file with overrides of its fields, and the few plain flags of a command.

ml_collections does the parsing; here its complaints become one line that names the field and, where one is near, the
right one.
"""

import difflib
import pathlib
import sys
from collections.abc import Iterator, Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


class UsageError(Exception):
  """The command line cannot be carried out as it stands; the message says why."""


def parse(command: str, arguments: Sequence[str], default_config: str, **plain: tuple[type, str]):
  """Parses `--config FILE --config.key=value … --NAME VALUE … words`.

  Args:
    command: for messages.
    arguments: after the command.
    default_config: the file taken when none is named; relative to the working folder, else to the repository.
    plain: NAME -> (str or bool, help) of the command's own flags; an absent one is '' or False.
  Returns:
    (config, {NAME: value}, remaining words).
  Raises:
    UsageError: an unknown flag, field or file, or a value of the wrong type; names it.
  """
  arguments = _located([argument for argument in arguments if argument != '--traceback'], default_config)
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values)
  for name, (kind, text) in plain.items():
    define = flags.DEFINE_bool if kind is bool else flags.DEFINE_string
    define(name, False if kind is bool else '', text, flag_values=values)
  try:
    words = _parsed(values, [f'jaxsearch {command}', *arguments])[1:]
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    raise UsageError(_explained(error, arguments)) from error
  return values.config, {name: values[name].value for name in plain}, words


def _parsed(values: flags.FlagValues, argv: list[str]) -> list[str]:
  """Parses `argv` into `values`; config_flags looks for overrides in sys.argv, so they are put there meanwhile."""
  before, sys.argv = sys.argv, argv
  try:
    return values(argv)
  finally:
    sys.argv = before


def _located(arguments: list[str], default: str) -> list[str]:
  """The arguments with the config file's path made one that exists."""
  arguments = list(arguments)
  for i, argument in enumerate(arguments):
    if argument == '--config' and i + 1 < len(arguments):
      arguments[i + 1] = str(_find(arguments[i + 1]))
      return arguments
    if argument.startswith('--config='):
      arguments[i] = '--config=' + str(_find(argument.removeprefix('--config=')))
      return arguments
  return [f'--config={_find(default)}', *arguments]


def _find(path: str) -> pathlib.Path:
  file, _, rest = path.partition(':')  # `file.py:argument` is passed on by ml_collections
  for folder in (pathlib.Path(), REPOSITORY):
    if (folder / file).is_file():
      _importable((folder / file).resolve().parent.parent, REPOSITORY)  # for `from configs import base`
      return pathlib.Path(f'{folder / file}{":" + rest if rest else ""}')
  known = [str(path) for path in sorted(pathlib.Path('configs').glob('*.py'))]
  raise UsageError(f'no config file {file}{_suggestion(file, known)}')


def _importable(*folders: pathlib.Path) -> None:
  sys.path.extend(str(folder) for folder in folders if str(folder) not in sys.path)


def _explained(error: Exception, arguments: Sequence[str]) -> str:
  """The message for an error of the flag parser: unknown field with a suggestion, or the parser's own words."""
  config = _load(arguments)
  if config is not None:
    known = list(_fields(config))
    for argument in arguments:
      name, _, value = argument.removeprefix('--').removeprefix('no').partition('=')
      if name.startswith('config.') and name.removeprefix('config.') not in known:
        return f'the config has no field {name.removeprefix("config.")!r}{_suggestion(name.removeprefix("config."), known)}'
  return str(error).replace('\n', ' ')


def _load(arguments: Sequence[str]) -> ml_collections.ConfigDict | None:
  for i, argument in enumerate(arguments):
    path = argument.removeprefix('--config=') if argument.startswith('--config=') else None
    path = arguments[i + 1] if argument == '--config' else path
    if path:
      values = flags.FlagValues()
      config_flags.DEFINE_config_file('config', flag_values=values)
      try:
        _parsed(values, ['', f'--config={path}'])
      except Exception:  # the file itself is at fault: the parser's own words are the better ones
        return None
      return values.config
  return None


def _fields(config: ml_collections.ConfigDict, prefix: str = '') -> Iterator[str]:
  for name, value in config.items():
    yield prefix + name
    if isinstance(value, ml_collections.ConfigDict):
      yield from _fields(value, f'{prefix}{name}.')


def _suggestion(name: str, known: Sequence[str]) -> str:
  near = difflib.get_close_matches(name, known, 1, 0.6)
  same_leaf = [field for field in known if field.split('.')[-1] == name.split('.')[-1]]
  found = (same_leaf or near)[:1]
  return f'; did you mean {found[0]!r}?' if found else ''
