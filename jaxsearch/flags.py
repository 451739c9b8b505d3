"""Reads the command line of a command: its own flags, and a config with overrides of its fields.

argparse, absl and ml_collections parse; here their complaints become one line that names the flag or field,
and the nearest right one.
"""

import argparse
import ast
import functools
import inspect
import pathlib
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from ml_collections.config_flags import tuple_parser

from jaxsearch import registry
from jaxsearch.config_check import (
  CHECKS,
  SHIPPED,
  allowed,
  check,
  fields,
  from_saved,
  is_address,
  load_file,
  suggestion,
)
from jaxsearch.data.jsonl import shortened
from jaxsearch.trees import templates

KINDS = {int: 'a whole number is needed', float: 'a number is needed', bool: 'True or False is needed',
         str: 'a text is needed', tuple: 'a tuple such as (1, 2) is needed'}
PARSERS = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser(),
           str: flags.ArgumentParser(), tuple: tuple_parser.TupleParser()}
FIELD = re.compile('--?(no)?config[.]([^=]*)(?:=(.*))?', re.DOTALL)
# What a policy saw in training: with a checkpoint these come from its run, whichever config is given.
TRAINED = ('method', 'grow', 'eval.grow', 'sampler.length', 'sampler.max_observation', 'search.topk',
           'search.words', 'tools', 'python', 'eval.right')
# Without a config these come from the run too: numbers, and names out of a list.
ALONE = ('dtype', 'sampler', 'train.row_length', 'search.engine', 'data.hops', 'data.arithmetic')
SERVERS = ('sampler.engine', 'sampler.urls', 'sampler.folder')  # of ALONE, yet not taken
# Last parts of the names of fields that say what to open, query or write. They are never taken from a
# checkpoint: it may come from anyone, and could send keys to servers of its choice and write files where it
# says.
PLACES = ('model', 'tokenizer', 'questions', 'corpus', 'backend', 'index', 'encoder', 'url', 'urls', 'cache',
          'writer', 'writer_model', 'writer_templates', 'kind', 'templates', 'template', 'evidence_template',
          'review', 'prompts', 'servers')


class UsageError(argparse.ArgumentTypeError, ValueError):
  """The command line cannot be carried out as it stands; the message says why."""


class Parser(argparse.ArgumentParser):
  """argparse for the flags of a command: a mistake is a UsageError."""

  def error(self, message: str):
    if choice := re.fullmatch("argument (.*): invalid choice: '(.*)' [(]choose from (.*)[)]", message):
      message = f'{choice[1]}={choice[2]} must be one of {choice[3].replace(chr(39), "")}'
    message = re.sub('argument (.*): =', r'\1=', message)
    raise UsageError(message.replace('the following arguments are required:', f'{self.prog} needs'))


# Types of flags: functions of the text. A message that begins with '=' continues '--FLAG'.


def number(kind: type, rule: str, text: str) -> float:
  """Reads a number for which a rule as in configs/checks.py holds."""
  try:
    value = kind(text)
  except ValueError as error:
    raise UsageError(f'={text}: {KINDS[kind]}') from error
  if not allowed(value, rule):
    raise UsageError(f'={text} must be {rule}')
  return value


def place(folder: bool = False) -> Callable[[str], str]:
  """Returns the type of a flag that names a file to write, or a folder."""
  return functools.partial(check_place, '', folder=folder)


def policy(name: str) -> str:
  """Reads the path of a policy, or the name of a shipped one."""
  path, near = registry.policy_path(name), suggestion(name, registry.POLICIES)
  if near and not pathlib.Path(path).exists():
    raise UsageError(f'={name}: no such folder, nor a shipped policy{near}')
  return path


def steps(text: str) -> tuple[int, int]:
  """Reads a step, '7', or a range of steps, '5:20'."""
  first, _, last = text.partition(':')
  if not (first.isdecimal() and (last or first).isdecimal()):
    raise UsageError(f'={text}: a step such as 7 or a range such as 5:20 is needed')
  return int(first), int(last or first)


def address(text: str) -> str:
  """Reads the address of a server."""
  if not is_address(text):
    raise UsageError(f'={text}: not an http address')
  return text


def check_place(name: str, path: str, folder: bool = False) -> str:
  """Returns the path in the flag or field `name`; UsageError unless a file, or a folder, can be written
  there."""
  wanted = above = pathlib.Path(path).resolve()
  reason = '' if path else 'a path is needed'
  try:
    above = next(each for each in (wanted, *wanted.parents) if each.exists())
    if above.is_file():
      reason = f'{above} is a file, not a folder' if folder or above != wanted else ''
      above = above.parent
    elif above == wanted and above.is_dir() and not folder:
      reason = reason or 'it is a folder, not a file'
    if not reason and above.is_dir():  # neither a device nor a pipe
      tempfile.TemporaryFile(dir=above).close()
  except OSError as error:
    reason = f'nothing can be written in {above} ({error.strerror})'
  if reason:
    raise UsageError(f'{name}={path}: {reason}')
  return path


class Given(NamedTuple):
  """Holds what a command line says beside the flags of its command; `changed` are the fields that it sets."""
  config: ml_collections.ConfigDict
  words: list[str]
  changed: frozenset[str]


def parse(command: str, arguments: Sequence[str], default: str, own: Sequence[str] = (), *,
          saved: Mapping[str, Any] | None = None, replaced: Sequence[str] = ()) -> Given:
  """Reads and checks `--config NAME --config.key=value … words`.

  Args:
    command: its name; `train` also checks what only training needs.
    default: the config taken when none is named.
    own: the command's own flags, for messages.
    saved: the config of the checkpoint that the command reads, see `_take_trained`; overrides win.
    replaced: fields that the command's own flags take the place of.
  Raises:
    ValueError: an unknown flag, field or config, or values that fields cannot have; names them.
  """
  parser = Parser(prog=command, add_help=False, allow_abbrev=False)
  parser.add_argument('--config', default='')
  given, overrides = parser.parse_known_args(arguments)
  names = [match[2] for match in map(FIELD.fullmatch, overrides) if match]
  config = _load(given.config or default)
  if command != 'sweep' and 'method' not in config:
    raise UsageError(f'{given.config} is not the config of a run: it has no `method`. '
                     'Those in claims/ are for jaxsearch sweep')
  then = {} if saved is None else _take_trained(config, saved, [*names, *replaced], bool(given.config))
  words = _set_fields(config, overrides, command, own)
  check(config, training=command == 'train')
  values = dict(fields(config))
  second = 'critic_warmup.second_' * (command == 'critic-warmup')  # its second search reads them too
  useless = [f'{name} means nothing with {choice}={values[choice]!r}'
             for name, (choice, others) in load_file(CHECKS).UNREAD.items()
             if name in names and values[name] and values[choice] in others
             and values.get(f'{second}{choice}', values[choice]) in others]
  if useless:
    raise UsageError('; '.join(useless))
  now = _within(config, TRAINED)
  for name in names if then else ():
    if now.get(name) != then.get(name):
      say(f'{name}={now.get(name)!r} as you set it; the policy was trained with {_shown(then, name)}')
  return Given(config, words, frozenset(names))


def _set_fields(config: ml_collections.ConfigDict, arguments: Sequence[str], command: str,
                own: Sequence[str]) -> list[str]:
  """Sets what each '--config.FIELD=VALUE' says and returns the other words; UsageError lists all mistakes."""
  known, words, unknown, wrong = [name for name, _ in fields(config)], [], [], []
  optional = [name for name, value in fields(load_file(SHIPPED / 'base.py').get_config()) if value is None]
  optional.append('critic.value_clip')  # a number there, and None is off
  for text in arguments:
    match = FIELD.fullmatch(text)
    if match is None and text.startswith('-') and text.strip('-'):
      flag = text.lstrip('-').partition('=')[0]
      near = re.sub("'([^']+)'", r"'--\1'", suggestion(flag, [*own, *(f'config.{field}' for field in known)]))
      raise UsageError(f'{command} has no flag --{flag}{near}')
    if match is None:
      words += [text] * (text != '--')
      continue
    negated, name, value = match.groups()
    if name not in known:
      unknown.append(f'the config has no field {name!r}{suggestion(name, known)}')
      continue
    group, leaf = _place_of(config, name)
    kind = group.get_type(leaf)
    if kind is bool and value is None:
      value = str(not negated)
    if value is None or (negated and match[3] is not None):
      wrong.append(f'{text}: write --config.{name}=VALUE')
      continue
    try:
      if kind is ml_collections.ConfigDict and not group[leaf]:  # an empty group takes a dict
        group[leaf] = ml_collections.ConfigDict(dict(ast.literal_eval(value)))
      else:
        group[leaf] = None if name in optional and value == 'None' else PARSERS[kind].parse(value)
    except (KeyError, SyntaxError, TypeError, ValueError):
      is_group = isinstance(group[leaf], ml_collections.ConfigDict)
      other = 'it is a group, set one of its fields' if is_group else 'set it in a config file'
      wrong.append(f'{text.removeprefix("--")}: {KINDS.get(kind, other)}')
  if unknown or wrong:
    raise UsageError('; '.join([*unknown, *wrong]))
  return words


def _take_trained(config: ml_collections.ConfigDict, saved: Mapping[str, Any], changed: Collection[str],
                  given: bool) -> dict[str, Any]:
  """Copies into a config what it takes from a checkpoint's; returns the checkpoint's `TRAINED` fields.

  `TRAINED` fields are always copied, `ALONE` only where no config is `given`, `PLACES` never. Says what
  differed in a given config and which places the checkpoint names, except for fields in `changed`.
  """
  try:
    trained = from_saved(saved)
  except ValueError as error:
    raise UsageError(f'the config in the checkpoint: {error}') from error
  places = {name: value for name, value in fields(trained) if _is_place(name, value)}
  prompts = {name: value for name, value in places.items() if name.startswith(('grow.', 'eval.grow.'))}
  with trained.unlocked():
    for name in prompts:  # the path of a file: take the config's own, else the method's default
      (ours, leaf), (theirs, _) = _place_of(config, name), _place_of(trained, name)
      del theirs[leaf]
      if leaf in ours:
        theirs[leaf] = ours[leaf]
  ours, theirs = _within(config, TRAINED), _within(trained, TRAINED)
  for name in sorted(ours.keys() | theirs.keys()) if given else ():
    if ours.get(name) != theirs.get(name) and name not in changed:
      say(f'{name}: the config has {_shown(ours, name)}, the checkpoint {_shown(theirs, name)}; '
          'that of the checkpoint is used')
  shipped = not given and 'model' not in changed and registry.is_shipped(trained.model)
  alone = [] if given else [name for name in _within(trained, ALONE) if name not in SERVERS]
  copy_fields((*TRAINED, *alone, *['model'] * shipped), trained, config)
  now = dict(fields(config))
  left = [f'{name}={value!r:.200}' for name, value in places.items()
          if value != now.get(name) and name not in changed]
  if left:
    say(f'not taken from the checkpoint: {", ".join(left)}; what to open and to ask is yours to say, with '
        '--config or flags')
  return theirs | prompts


def _is_place(name: str, value: object) -> bool:
  """Tells whether a saved field is in `PLACES` and names something not shipped; for a prompt, a file."""
  leaf = name.split('.')[-1]
  if leaf not in PLACES or not isinstance(value, (str, tuple)) or not value:
    return False
  if isinstance(value, tuple):  # of MCP servers
    return True
  if leaf in templates.SETTINGS:
    return templates.is_file(value, templates.SETTINGS[leaf])
  return not (registry.is_shipped(value) or value.partition(':')[0] in registry.ENTRIES['questions'])


def _place_of(config: ml_collections.ConfigDict, name: str) -> tuple[ml_collections.ConfigDict, str]:
  """Returns the group that a field is in, and the last part of its name."""
  path, _, leaf = name.rpartition('.')
  return config[path] if path else config, leaf


def copy_fields(names: Iterable[str], source: ml_collections.ConfigDict,
                target: ml_collections.ConfigDict) -> None:
  """Sets fields and groups of `target` as they are in `source`."""
  with target.unlocked():
    for name in names:
      (ours, leaf), (theirs, _) = _place_of(target, name), _place_of(source, name)
      ours[leaf] = theirs[leaf]


def _within(config: ml_collections.ConfigDict, names: Sequence[str]) -> dict[str, Any]:
  """Returns {name: value} of these fields, and of those in these groups."""
  return {name: value for name, value in fields(config) if not isinstance(value, ml_collections.ConfigDict)
          and (name in names or name.startswith(tuple(f'{group}.' for group in names)))}


def _shown(values: Mapping[str, Any], name: str) -> str:
  return shortened(values[name]) if name in values else 'none'


def say(message: str) -> None:
  print(f'jaxsearch: {message}', file=sys.stderr, flush=True)


def _load(name: str) -> ml_collections.ConfigDict:
  """Loads the config that a name stands for, see `find`; UsageError names the line of the file that fails."""
  file, argument = find(name)
  try:
    get_config = getattr(load_file(file), 'get_config', None)
    if get_config is None:
      raise ValueError('not a config, it defines no get_config()')
    if argument and not inspect.signature(get_config).parameters:
      raise ValueError(f'{name}: get_config() of this file takes no {argument[0]!r}')
    config = get_config(*argument)
    if not isinstance(config, ml_collections.ConfigDict):
      raise ValueError('get_config() returns no ConfigDict')
    return config
  except SyntaxError as error:
    raise UsageError(f'{error.filename}:{error.lineno}: {error.msg}') from error
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f':{frame.lineno}' for frame in frames if frame.filename == str(file)]
    module = getattr(error, 'name', None) or ''
    near = ''
    if module.startswith('configs.'):
      near = suggestion(module.removeprefix('configs.'), shipped_configs())
    kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '  # the file says what is wrong
    raise UsageError(f'{file}{"".join(lines[-1:])}: {kind}{error}{near}') from error


def shipped_configs() -> list[str]:
  """Returns the names of the configs that ship."""
  files = sorted(file for file in SHIPPED.rglob('*.py') if file != CHECKS)
  return [str(file.relative_to(SHIPPED).with_suffix('')) for file in files]


def find(name: str) -> tuple[pathlib.Path, list[str]]:
  """Finds `quickstart`, `claims/carl`, `smollm2:cusearch`, `configs/carl.py` or `my/own.py`.

  A name is a shipped config first, a path with '.py' a file first. From then on `from configs import` finds
  the shipped configs, and before them those of the folder `configs` that the file is in, if there is one.

  Returns:
    (file, arguments of its get_config).
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
  beside = [str(file.with_suffix('')) for file in own.parent.glob('*.py')] if path.endswith('.py') else []
  near = suggestion(stem.removeprefix('configs/'), [*shipped_configs(), *beside])
  raise UsageError(f'no config {path!r}{near or "; there are " + ", ".join(shipped_configs())}')
