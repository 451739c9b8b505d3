"""Checks a config before anything is loaded, and names all its mistakes at once.

configs/checks.py says what fields may hold, alone and together, and which of them name files that must exist.
This module applies it, and checks what depends on the method: the arguments of its functions.
"""

import contextlib
import difflib
import inspect
import math
import operator
import os
import pathlib
import re
import runpy
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from jaxsearch import registry, tools

SHIPPED = pathlib.Path(__file__).resolve().parent / 'configs'  # of a wheel
if not SHIPPED.is_dir():
  SHIPPED = SHIPPED.parents[1] / 'configs'  # of a checkout
CHECKS = SHIPPED / 'checks.py'  # the table
COMPARE = {'>=': operator.ge, '>': operator.gt, '<=': operator.le, '<': operator.lt, '=': operator.eq}


def check(config: ml_collections.ConfigDict, *, training: bool = True) -> None:
  """Checks every field of a config, and with `training` what only a training run needs.

  Sweeps (configs/claims) pass: each run is checked on its own. Raises ValueError that lists every mistake
  with its field, its value and what is allowed.
  """
  if 'method' in config:
    table = load_file(CHECKS)
    mistakes = [*_values(config, table.FIELDS), *_misspelt(config), *_method(config, training),
                *table.together(config, training)]
    if mistakes:
      raise ValueError('; '.join(mistakes))


def _values(config: ml_collections.ConfigDict, table: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
  """Yields mistakes of single fields, by the table."""
  for name, value in fields(config):
    if isinstance(value, ml_collections.ConfigDict):
      continue
    rule = table.get(name, table.get(f'*.{name.split(".")[-1]}'))
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(each, float) and not math.isfinite(each) for each in values):
      yield f'{name}={value!r} must be finite'
    elif rule and not all(each is None or allowed(each, rule) for each in values):
      yield f'{name}={value!r} must be {rule if isinstance(rule, str) else "one of " + ", ".join(rule)}'


def _misspelt(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields fields that groups of configs/base.py lack, and new names that look like one of its own."""
  base = dict(fields(load_file(SHIPPED / 'base.py').get_config()))
  leaves, top = {name.split('.')[-1] for name in base}, [name for name in base if '.' not in name]
  for name, value in fields(config):
    group = name.rpartition('.')[0]
    if name in base or name.startswith(tuple(f'{each}.' for each in ARGUMENTS)):
      continue
    number = isinstance(value, (int, float))
    like = difflib.get_close_matches(name, top, 1, 0.75) or (number and name in leaves)
    if group in base or (like and not group):
      yield f'the config has no field {name!r}{suggestion(name, base)}'


def allowed(value: Any, rule: str | tuple[str, ...]) -> bool:
  """Tells whether a value is one of the names, or a number for which one alternative of the comparisons
  holds."""
  if isinstance(rule, tuple):
    return value in rule
  if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
    return False
  alternatives = [map(str.split, option.split(' and ')) for option in rule.split(' or ')]
  return any(all(COMPARE[sign](value, float(bound)) for sign, bound in terms) for terms in alternatives)


def _method(config: ml_collections.ConfigDict, training: bool) -> Iterator[str]:
  """Yields mistakes in the arguments of the method's functions, and in what else the method needs."""
  from jaxsearch import methods  # with NumPy, which `--help` does not wait for
  from jaxsearch.methods import folding
  from jaxsearch.trees import native, templates
  try:
    method = methods.find_method(config.method)
  except ValueError as error:
    known = methods.known_methods()
    yield f'{error}; known are {", ".join(known)}{suggestion(config.method, known)}'
    return
  learns, warmup = hasattr(method, 'credit'), config.get('critic_warmup', {})
  if training and not learns:
    yield f'method={config.method!r} cannot be trained, it has no credit: take `jaxsearch eval`'
    return
  changes = {f'critic_warmup.{kind}': warmup[kind]
             for kind in ('closed_book', 'tool_required', 'multi_hop') if warmup}
  for name, values in {'grow': config.grow, 'eval.grow': config.eval.grow, **changes}.items():
    known = _arguments(method, 'grow', given=2)
    yield from _unknown(name, values, known and [*known, *native.SETTINGS, *folding.SETTINGS])
    if values.get('fold', 'never') != 'never' and (getattr(method, 'BRANCHES', False) or not learns):
      yield f'{name}.fold={values["fold"]!r}: method={config.method!r} does not grow chains alone'
    try:
      templates.check(values)
    except ValueError as error:
      yield f'{name}: {error}'
  if hasattr(method, 'TOOLS') and (called := (*config.tools, *config.mcp.servers)):
    yield f'tools={called!r} mean nothing with method={config.method!r}, which has {", ".join(method.TOOLS)}'
  if warmup:
    yield from _unknown('critic_warmup.second_search', warmup.second_search, list(config.search))
  for service in getattr(method, 'SERVICES', ()) if training or not learns else ():
    if service not in config:
      yield f'method={config.method!r} needs the group config.{service}'
  if training:
    if config.reward == 'judge' and not getattr(method, 'JUDGED', False):
      yield (f"reward='judge': method={config.method!r} has rewards of its own; set JUDGED = True in "
             f'methods/{config.method}.py if they are of Tree.score')
    for name, given in {'credit': 2, 'sizes': 3}.items():
      yield from _unknown(name, config[name], _arguments(method, name, given))
    if config.group_size == 1 and not config.critic.enabled and not getattr(method, 'ONE_TREE', False):
      yield ('group_size=1: with one tree a question, a critic is needed, or ONE_TREE = True in '
             f'methods/{config.method}.py (credit that still learns from a single tree)')


def _arguments(method: types.ModuleType, name: str, given: int) -> list[str] | None:
  """Returns a function's arguments but the first `given`, which the caller passes; None if it takes any."""
  parameters = inspect.signature(getattr(method, name)).parameters if hasattr(method, name) else {}
  takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
  return None if takes_any else list(parameters)[given:]


def _unknown(name: str, values: Mapping[str, Any], known: Sequence[str] | None) -> Iterator[str]:
  """Yields mistakes of arguments that are none of the known ones."""
  for unknown in sorted(set(values) - set(known)) if known is not None else ():
    near = suggestion(unknown, known) or '; known are ' + (', '.join(known) or 'none')
    yield f'{name}.{unknown} is no argument{near}'


def check_files(config: ml_collections.ConfigDict, used: Sequence[str], corpus: str = '',
                services: Sequence[str] = ()) -> None:
  """Raises ValueError that lists the files and folders that a config names and that are not there.

  Args:
    used: the fields and groups that the command reads.
    corpus: what takes the place of `data.corpus`.
    services: those that the command asks itself, beside the method's.
  """
  from jaxsearch import methods
  from jaxsearch.trees import templates
  services, mistakes = (*getattr(methods.find_method(config.method), 'SERVICES', ()), *services), []
  for backend in tools.declared().values() if 'search' in used else ():
    mistakes += backend.mistakes(config.search)
  needs = load_file(CHECKS).needs(config, services)
  for field, kind in needs.items():
    if f'{field}.'.startswith(tuple(f'{name}.' for name in used)):
      given = corpus and field == 'data.corpus'
      mistakes += _missing('--corpus', kind, corpus) if given else _missing(field, kind, config[field])
  if mistakes:
    raise ValueError('; '.join(mistakes))
  for name in ('judge', 'second_judge'):
    if name in used and f'{name}.model' in needs:
      templates.files('judge', config[name].templates)


def _missing(field: str, kind: str, value: str) -> Iterator[str]:
  """Yields what is missing of a field that has to be set."""
  from jaxsearch.data import sources
  from jaxsearch.models import gguf_files
  from jaxsearch.models.architecture import preset
  if not value:
    yield f'{field} is not set'
  elif kind == 'url':
    if not all(map(is_address, value.split(','))):
      yield f'{field}={value!r}: not an http address'
  elif kind == 'policy' and value.startswith('random:'):
    preset(value.removeprefix('random:'))
  elif value.startswith(gguf_files.PACKAGE):
    try:
      gguf_files.in_package(value)
    except FileNotFoundError as error:
      yield f'{field}={value!r}: {error}'
  elif kind == 'source':
    if missing := [path for path in sources.files_of(value) if not os.path.exists(path)]:
      names = f' as {", ".join(missing)}' if missing != [value] else ''
      yield f'{field}={value!r}: no such file or folder{names}'
  elif kind != 'name' and '://' not in value:  # nor in a bucket
    known = [*registry.ENTRIES['models'], *registry.POLICIES] if kind in ('model', 'policy') else []
    before, each, _ = value.partition('{source}')
    if value not in known and not pathlib.Path(os.path.dirname(before) if each else value).exists():
      yield f'{field}={value!r}: no such file or folder{suggestion(value, known)}'


def is_address(text: str) -> bool:
  """Tells whether a text is the address of an HTTP server."""
  from jaxsearch.tools.http_client import parse_url  # with httpx, which `--help` does not wait for
  with contextlib.suppress(ValueError):
    return bool(parse_url(text))
  return False


_PASSWORD = re.compile(r'(?<=://)[^/?#\s]*@')
_SECRET = '(?:key|token|secret|pass|pwd|auth|cred|sig|session)'
_KEY = re.compile(rf'([?&;][^=&;#\s]*{_SECRET}[^=&;#\s]*=)[^&;#,\s]+', re.IGNORECASE)


def without_secrets(value: Any) -> Any:
  """Returns the value with '***' for the user and password of URLs in it, and for parameters such as
  `api_key`."""
  if isinstance(value, str):
    return _KEY.sub(r'\1***', _PASSWORD.sub('***@', value)) if '://' in value else value
  if isinstance(value, Mapping):
    return {name: without_secrets(each) for name, each in value.items()}
  return type(value)(map(without_secrets, value)) if isinstance(value, (list, tuple)) else value


def to_saved(config: ml_collections.ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config as it is saved: without secrets, and with the texts of the user's prompt files."""
  from jaxsearch.trees import templates
  saved = without_secrets(config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config)
  for group in (saved.get('grow', {}), saved.get('eval', {}).get('grow', {})):
    group.update(templates.texts(group))
  return saved


ARGUMENTS = ('grow', 'credit', 'sizes', 'eval.grow')  # groups of arguments: the method says what they hold


def from_saved(values: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """Returns the config that `to_saved` wrote, with the fields of today.

  A field that it lacks has the value of configs/base.py; one that no longer exists is left out. Groups that
  base.py does not have, such as `reader`, are kept. Raises ValueError for a value of another kind than its
  field.
  """
  config = load_file(SHIPPED / 'base.py').get_config().unlock()

  def fill(group: ml_collections.ConfigDict, saved: Mapping[str, Any], prefix: str) -> None:
    for name, value in saved.items():
      known = group.get(name)
      if isinstance(known, ml_collections.ConfigDict) and not isinstance(value, Mapping):
        raise ValueError(f'{prefix}{name}={value!r} is not a group')
      if isinstance(known, ml_collections.ConfigDict) and prefix + name not in ARGUMENTS:
        fill(known, value, f'{prefix}{name}.')
      elif name in group or not prefix:
        group[name] = _from_json(value)

  try:
    fill(config, values, '')
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(str(error)) from error
  return config.lock()


def _from_json(value: Any) -> Any:
  """Returns groups for dicts, and tuples for lists: configs have no lists."""
  if isinstance(value, Mapping):
    return ml_collections.ConfigDict({name: _from_json(each) for name, each in value.items()})
  return tuple(map(_from_json, value)) if isinstance(value, list) else value


def load_file(path: pathlib.Path) -> types.SimpleNamespace:
  """Returns what a Python file defines; it does not enter sys.modules."""
  return types.SimpleNamespace(**runpy.run_path(str(path)))


def fields(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yields (name with dots, value) of every field, and of every group before its fields."""
  for name, value in config.items():
    yield prefix + name, value
    if isinstance(value, (Mapping, ml_collections.ConfigDict)):
      yield from fields(value, f'{prefix}{name}.')


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns '; did you mean …?' with known names of the same last part, or the nearest; '' if none is
  near."""
  known, leaf = list(known), name.split('.')[-1]
  near = [each for each in known if each.split('.')[-1] == leaf]
  near = near or difflib.get_close_matches(name, known, 1, 0.6)
  return f'; did you mean {" or ".join(map(repr, near[:3]))}?' if near else ''
