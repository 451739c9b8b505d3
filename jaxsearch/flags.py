"""The command line of a command: its own flags, and a config, a file or a shipped one, with overrides of its fields.

argparse and ml_collections parse; here their complaints become one line that names the flag or field and the nearest right one.
"""

import argparse
import contextlib
import functools
import inspect
import operator
import pathlib
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from ml_collections import config_flags

from jaxsearch import registry
from jaxsearch.config_check import CHECKS, SHIPPED, allowed, check, fields, from_saved, load_file, suggestion
from jaxsearch.data.jsonl import shortened
from jaxsearch.trees import templates

KINDS = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'a text', tuple: 'a tuple such as (1, 2)'}
# What a policy was trained to see: with a checkpoint these are the run's, whichever config is given.
TRAINED = ('method', 'grow', 'eval.grow', 'sampler.length', 'sampler.max_observation', 'search.topk', 'search.words', 'python')
# Without a config these are the run's too: numbers, and names out of a list.
ALONE = ('dtype', 'sampler', 'train.row_length', 'search.engine', 'data.hops', 'data.arithmetic')
# Last parts of the names of fields that say what is opened, asked or written. These are never taken: a checkpoint may come from
# anyone, and asking its policy a question would send keys to servers of its choice, and write files where it says.
PLACES = ('model', 'tokenizer', 'questions', 'corpus', 'backend', 'index', 'encoder', 'url', 'cache', 'writer', 'writer_model',
          'writer_templates', 'kind', 'templates', 'template', 'evidence_template', 'review', 'prompts')


class UsageError(Exception):
  """The command line cannot be carried out as it stands; the message says why."""


class Parser(argparse.ArgumentParser):
  """argparse for the flags of a command: a mistake is a UsageError."""

  def error(self, message: str):
    if choice := re.fullmatch("argument (.*): invalid choice: '(.*)' [(]choose from (.*)[)]", message):
      message = f'{choice[1]}={choice[2]} must be one of {choice[3].replace(chr(39), "")}'
    message = re.sub('argument (.*): =', r'\1=', message)  # of `number`, `place` and `address` below
    raise UsageError(message.replace('the following arguments are required:', f'{self.prog} needs'))


def number(kind: type, rule: str) -> Callable[[str], float]:
  """The type of a flag whose value is a number for which a rule as in configs/checks.py holds."""
  def read(text: str) -> float:
    try:
      value = kind(text)
    except ValueError as error:
      raise argparse.ArgumentTypeError(f'={text}: {KINDS[kind]} is needed') from error
    if not allowed(value, rule):
      raise argparse.ArgumentTypeError(f'={text} must be {rule}')
    return value
  return read


def place(folder: bool = False) -> Callable[[str], str]:
  """The type of a flag that names a file to write, or a folder: a place that can be written, see `check_place`."""
  def read(path: str) -> str:
    try:
      check_place('', path, folder)
    except UsageError as error:
      raise argparse.ArgumentTypeError(str(error)) from error
    return path
  return read


def policy(name: str) -> str:
  """The type of a flag that names a policy: the path of a place, or of a shipped one by its name."""
  path, near = registry.policy_path(name), suggestion(name, registry.POLICIES)
  if near and not pathlib.Path(path).exists():
    raise argparse.ArgumentTypeError(f'={name}: no such folder, nor a shipped policy{near}')
  return path


def steps(text: str) -> tuple[int, int]:
  """The type of a flag that takes a step, '7', or a range of steps, '5:20'."""
  first, _, last = text.partition(':')
  if not (first.isdecimal() and (last or first).isdecimal()):
    raise argparse.ArgumentTypeError(f'={text}: a step such as 7 or a range such as 5:20 is needed')
  return int(first), int(last or first)


def address(text: str) -> str:
  """The type of a flag that takes the address of a server."""
  from jaxsearch.tools.http_client import parse_url  # with httpx, which `--help` does not wait for
  try:
    parse_url(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f'={text}: not an http address') from error
  return text


def check_place(name: str, path: str, folder: bool = False) -> None:
  """Raises UsageError unless a file (or a folder) can be written at the path that the flag or field `name` holds."""
  wanted = above = pathlib.Path(path).resolve()
  reason = ''
  try:
    above = next(one for one in (wanted, *wanted.parents) if one.exists())
    if not path:
      reason = 'a path is needed'
    elif above == wanted and not folder and above.is_dir():
      reason = 'it is a folder, not a file'
    elif not above.is_dir() and (folder or above != wanted):
      reason = f'{above} is a file, not a folder'
    elif wanted.is_file() or above.is_dir():  # neither a device nor a pipe
      above = wanted.parent if wanted.is_file() else above
      tempfile.TemporaryFile(dir=above).close()
  except OSError as error:
    reason = f'nothing can be written in {above} ({error.strerror})'
  if reason:
    raise UsageError(f'{name}={path}: {reason}')


class Given(NamedTuple):
  """What a command line says beside the flags of its command."""
  config: ml_collections.ConfigDict
  words: list[str]
  changed: frozenset[str]  # fields of the config that it sets


def parse(command: str, arguments: Sequence[str], default: str, own: Sequence[str] = (), *,
          saved: Mapping[str, Any] | None = None, replaced: Sequence[str] = ()) -> Given:
  """What `--config NAME --config.key=value … words` says, parsed and checked.

  Args:
    command: for messages; `train` also checks what only training needs.
    default: the config taken when none is named.
    own: the command's own flags, for messages.
    saved: the config of the checkpoint that the command reads. What the policy was trained to see (`TRAINED`) is taken from it,
      without `--config NAME` `ALONE` too. Fields set by `--config.key=value` win over it. Each difference to a config that is
      named is a line on stderr, and so are the places that it names, which are not taken.
    replaced: fields that the command's own flags take the place of.
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
  config = _load(given.config or default)
  if command != 'sweep' and 'method' not in config:
    raise UsageError(f'{given.config} is not the config of a run: it has no `method`. Those in claims/ are for jaxsearch sweep')
  then = {} if trained is None else _take_trained(config, trained, [*names, *replaced], bool(given.config))
  values = flags.FlagValues()
  try:
    config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=overrides)
    words = values([command, *overrides])[1:]
    check(config, training=command == 'train')
  except flags.UnrecognizedFlagError as error:
    known = [*own, *(f'config.{name}' for name, _ in fields(config))]
    near = re.sub("'([^']+)'", r"'--\1'", suggestion(error.flagname, known))
    raise UsageError(f'{command} has no flag --{error.flagname}{near}') from error
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    known = [name for name, _ in fields(config)]
    unknown = [f'the config has no field {name!r}{suggestion(name, known)}' for name in names if name not in known]
    mistakes = [*unknown, *_wrong_types(config, overrides)]
    raise UsageError('; '.join(mistakes) or str(error).replace('\n', ' ')) from error
  now = _within(config, TRAINED)
  for name in names if then else ():
    if now.get(name) != then.get(name):
      _say(f'{name}={now.get(name)!r} as you set it; the policy was trained with {_shown(then, name)}')
  return Given(config, words, frozenset(names))


def _take_trained(config: ml_collections.ConfigDict, trained: ml_collections.ConfigDict, changed: Collection[str],
                  given: bool) -> dict[str, Any]:
  """Sets what a config takes from that of a checkpoint, and returns those fields that are `TRAINED`.

  Says what differed in a `given` config, and which places the checkpoint names, but for fields that are `changed`.
  """
  places = {name: value for name, value in fields(trained) if name.split('.')[-1] in PLACES and _is_place(name, value)}
  prompts = {name: value for name, value in places.items() if name.startswith(('grow.', 'eval.grow.'))}
  with trained.unlocked():
    for name in prompts:  # in a file: the config's own instead, or that of the method
      *path, leaf = name.split('.')
      own, group = (functools.reduce(operator.getitem, path, one) for one in (config, trained))
      del group[leaf]
      if leaf in own:
        group[leaf] = own[leaf]
  ours, theirs = _within(config, TRAINED), _within(trained, TRAINED)
  for name in sorted(ours.keys() | theirs.keys()) if given else ():
    if ours.get(name) != theirs.get(name) and name not in changed:
      _say(f'{name}: the config has {_shown(ours, name)}, the checkpoint {_shown(theirs, name)}; that of the checkpoint is used')
  shipped = not given and 'model' not in changed and registry.is_shipped(trained.model)
  copy_fields((*TRAINED, *(() if given else ALONE), *['model'] * shipped), trained, config)
  now = dict(fields(config))
  if left := [f'{name}={value!r:.200}' for name, value in places.items() if value != now.get(name) and name not in changed]:
    _say(f'not taken from the checkpoint: {", ".join(left)}; what to open and to ask is yours to say, with --config or flags')
  return theirs | prompts


def _is_place(name: str, value: object) -> bool:
  """Whether a checkpoint's field of `PLACES` names what we do not ship; of a prompt, whether it names a file."""
  if not isinstance(value, str) or not value:
    return False
  if (leaf := name.split('.')[-1]) in templates.SETTINGS:
    return templates.is_file(value, templates.SETTINGS[leaf])
  return not (registry.is_shipped(value) or value.partition(':')[0] in registry.ENTRIES['questions'])


def copy_fields(names: Iterable[str], source: ml_collections.ConfigDict, target: ml_collections.ConfigDict) -> None:
  """Sets fields and groups of `target` as they are in `source`."""
  with target.unlocked():
    for name in names:
      *path, leaf = name.split('.')
      functools.reduce(operator.getitem, path, target)[leaf] = functools.reduce(operator.getitem, [*path, leaf], source)


def _within(config: ml_collections.ConfigDict, names: Sequence[str]) -> dict[str, Any]:
  """Name -> value of these fields; of groups, of what is in them."""
  return {name: value for name, value in fields(config) if not isinstance(value, ml_collections.ConfigDict)
          and any(name == one or name.startswith(f'{one}.') for one in names)}


def _shown(values: Mapping[str, Any], name: str) -> str:
  return shortened(values[name]) if name in values else 'none'


def _say(message: str) -> None:
  print(f'jaxsearch: {message}', file=sys.stderr)


def _wrong_types(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> Iterator[str]:
  """Mistakes of '--config.FIELD=VALUE' whose value is none of the field's type."""
  for override in overrides:
    values, (name, _, value) = flags.FlagValues(), override.partition('=')
    try:
      config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=[override])
      values(['', override])
    except flags.IllegalFlagValueError:
      *path, leaf = name.removeprefix('--config.').split('.')
      kind = functools.reduce(operator.getitem, path, config).get_type(leaf)
      needed = f'{KINDS[kind]} is needed' if kind in KINDS else 'it is a group, set one of its fields'
      yield f'{name.removeprefix("--")}={value}: {needed}'
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError):
      pass  # another kind of mistake


def _load(name: str) -> ml_collections.ConfigDict:
  """The config that a name stands for, see `find`. Raises UsageError, with the line of the file that fails."""
  file, argument = find(name)
  with _naming_lines(file):
    get_config = getattr(load_file(file), 'get_config', None)
  if get_config is None:
    raise UsageError(f'{file}: not a config, it defines no get_config()')
  if argument and not inspect.signature(get_config).parameters:
    raise UsageError(f'{name}: get_config() of {file} takes no {argument[0]!r}')
  with _naming_lines(file):
    config = get_config(*argument)
  if not isinstance(config, ml_collections.ConfigDict):
    raise UsageError(f'{file}: get_config() returns no ConfigDict')
  return config


@contextlib.contextmanager
def _naming_lines(file: pathlib.Path) -> Iterator[None]:
  """A context for code of the user's: whatever it raises becomes a UsageError with the line of `file`."""
  try:
    yield
  except SyntaxError as error:
    raise UsageError(f'{error.filename}:{error.lineno}: {error.msg}') from error
  except Exception as error:
    lines = [f':{frame.lineno}' for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    module = getattr(error, 'name', None) or ''
    near = suggestion(module.removeprefix('configs.'), shipped_configs()) if module.startswith('configs.') else ''
    what = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '  # the file itself says what is wrong
    raise UsageError(f'{file}{"".join(lines[-1:])}: {what}{error}{near}') from error


def shipped_configs() -> list[str]:
  """The names of the shipped configs."""
  return [str(file.relative_to(SHIPPED).with_suffix('')) for file in sorted(SHIPPED.rglob('*.py')) if file != CHECKS]


def find(name: str) -> tuple[pathlib.Path, list[str]]:
  """(file, arguments of its get_config) of `quickstart`, `claims/carl`, `smollm2:cusearch`, `configs/carl.py` or `my/own.py`.

  A name is a shipped config first, a path with '.py' a file first. From then on `from configs import …` finds the shipped
  configs, and before them those of the folder `configs` that the file is in, if there is one.
  """
  path, *argument = name.split(':', 1)
  stem = path.removesuffix('.py')
  shipped, own = SHIPPED / f'{stem.removeprefix("configs/")}.py', pathlib.Path(f'{stem}.py')
  for file in (own, shipped) if path.endswith('.py') else (shipped, own):
    if file.is_file() and file != CHECKS:
      package = sys.modules.setdefault('configs', types.ModuleType('configs'))
      around = [str(folder) for folder in file.resolve().parents if folder.name == 'configs'][:1]
      package.__path__ = list(dict.fromkeys([*around, *getattr(package, '__path__', ()), str(SHIPPED)]))
      return file, argument
  beside = [str(file.with_suffix('')) for file in sorted(own.parent.glob('*.py'))] if path.endswith('.py') else []
  near = suggestion(stem.removeprefix('configs/'), [*shipped_configs(), *beside])
  raise UsageError(f'no config {path!r}{near or "; there are " + ", ".join(shipped_configs())}')
