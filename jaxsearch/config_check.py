"""Checks a config before anything is loaded, and names all its mistakes at once.

The table configs/checks.py has the ranges and choices of single fields; here is how it is read, and what needs more than one
field: values that exclude each other, and the arguments of the method's functions.
"""

import contextlib
import difflib
import functools
import importlib.util
import inspect
import math
import operator
import pathlib
import re
import runpy
import sys
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
  """Checks every field of a config, and with `training` what only a training run needs, such as long enough rows.

  A sweep (configs/claims) passes: each of its runs is checked on its own. Raises ValueError: lists every mistake with its field,
  its value and what is allowed.
  """
  if 'method' in config:
    mistakes = [*_values(config), *_method(config, training), *(_together(config) if training else ())]
    if mistakes:
      raise ValueError('; '.join(mistakes))


def _values(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Mistakes of single fields, by the table."""
  if config.sampler.episode_deadline is not None and config.sampler.deterministic:
    yield (f'sampler.episode_deadline={config.sampler.episode_deadline} needs sampler.deterministic=False: '
           'the clock would decide what is sampled')
  table = load_file(CHECKS).FIELDS
  for name, value in fields(config):
    if isinstance(value, ml_collections.ConfigDict):
      continue
    rule = table.get(name, table.get(f'*.{name.split(".")[-1]}'))
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(one, float) and not math.isfinite(one) for one in values):
      yield f'{name}={value!r} must be finite'
    elif rule and not all(one is None or allowed(one, rule) for one in values):
      yield f'{name}={value!r} must be {rule if isinstance(rule, str) else "one of " + ", ".join(rule)}'


def allowed(value: Any, rule: str | tuple[str, ...]) -> bool:
  """Whether a value is one of the names, or a number for which one alternative of the comparisons holds."""
  if isinstance(rule, tuple):
    return value in rule
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and any(
    all(COMPARE[sign](value, float(bound)) for sign, bound in map(str.split, option.split(' and ')))
    for option in rule.split(' or '))


def _method(config: ml_collections.ConfigDict, training: bool) -> Iterator[str]:
  """Mistakes in the arguments of the method's functions, and in what else the method needs."""
  from jaxsearch import methods  # with NumPy, which `--help` does not wait for
  from jaxsearch.trees import templates
  try:
    method = methods.find_method(config.method)
  except ValueError as error:
    known = methods.known_methods()
    yield f'{error}; known are {", ".join(known)}{suggestion(config.method, known)}'
    return
  if training and not hasattr(method, 'credit'):
    yield f'method={config.method!r} cannot be trained, it has no credit: take `jaxsearch eval`'
    return
  warmup = config.get('critic_warmup', {})
  changes = {f'critic_warmup.{kind}': warmup[kind] for kind in ('closed_book', 'tool_required', 'multi_hop') if warmup}
  for name, values in {'grow': config.grow, 'eval.grow': config.eval.grow, **changes}.items():
    yield from _unknown(name, values, _arguments(method, 'grow', given=2))
    try:
      templates.check(values)
    except ValueError as error:
      yield f'{name}: {error}'
  if warmup:
    yield from _unknown('critic_warmup.second_search', warmup.second_search, list(config.search))
  for service in getattr(method, 'SERVICES', ()) if training or not hasattr(method, 'credit') else ():
    if service not in config:
      yield f'method={config.method!r} needs the group config.{service}'
  if training:
    for name, given in {'credit': 2, 'sizes': 3}.items():
      yield from _unknown(name, config[name], _arguments(method, name, given))
    if config.group_size == 1 and not config.critic.enabled and not getattr(method, 'ONE_TREE', False):
      yield (f'group_size=1: with one tree a question, a critic or ONE_TREE = True in methods/{config.method}.py is needed '
             '(credit that still learns from a single tree)')


def _arguments(method: types.ModuleType, name: str, given: int) -> list[str] | None:
  """Arguments of a method's function but the first `given`, which the caller passes; None if it takes any."""
  parameters = inspect.signature(getattr(method, name)).parameters if hasattr(method, name) else {}
  return None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else list(parameters)[given:]


def _unknown(name: str, values: Mapping[str, Any], known: Sequence[str] | None) -> Iterator[str]:
  """Mistakes of arguments that are none of the known ones."""
  for unknown in sorted(set(values) - set(known)) if known is not None else ():
    yield f'{name}.{unknown} is no argument{suggestion(unknown, known) or "; known are " + (", ".join(known) or "none")}'


def _together(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Values that do not fit together in a training run."""
  shared = config.critic.enabled and config.critic.shared
  if config.lora.rank > 0 and shared:
    yield f'lora.rank={config.lora.rank}: an adapter cannot share its frozen backbone with a critic; set critic.shared=False'
  if config.critic.enabled and config.critic.learning_rate == 0 and config.critic.backbone_rate is not None:
    yield 'critic.learning_rate=0.0 must be > 0 where critic.backbone_rate is set'
  if config.sampler.length > config.train.row_length:
    yield (f'sampler.length={config.sampler.length} is more than train.row_length={config.train.row_length}: '
           'the longest path would not fit into a training row')
  if config.loss.importance_cap and config.train.old_logprobs == 'sampler':
    yield (f"loss.importance_cap={config.loss.importance_cap} with train.old_logprobs='sampler' would count the gap between "
           "sampler and trainer twice, since the ratio has it already; set train.old_logprobs='recompute'")
  if config.train.async_steps and config.sampler.release:
    yield 'sampler.release=True with train.async_steps=1 would free what samples while the step trains; set it to None'
  if config.train.async_steps and config.train.old_logprobs == 'recompute' and config.loss.importance_cap == 0:
    yield ("loss.importance_cap=0 with train.async_steps=1 and train.old_logprobs='recompute' corrects nothing for the older "
           "parameters that sampled; leave the cap at None, or set train.old_logprobs='sampler'")
  if config.critic.warm_start and not config.critic.enabled:
    yield f'critic.warm_start={config.critic.warm_start!r} means nothing where critic.enabled=False'
  adaptive, smallest, largest = (config.sizes.get(name) for name in ('adaptive', 'smallest', 'largest'))
  if adaptive and smallest and largest and not 2 <= smallest <= config.group_size <= largest:
    yield (f'sizes.smallest={smallest} <= group_size={config.group_size} <= sizes.largest={largest} must hold where '
           'sizes.adaptive=True, and sizes.smallest >= 2: one chain has nothing to be compared with')
  able = [name for name, backend in tools.declared().items() if backend.by_source]
  if config.search.by_source and config.search.backend not in able:
    yield f'search.by_source=True is for the backends {", ".join(map(repr, able))}, not {config.search.backend!r}'
  for name in config.log:
    if name in load_file(CHECKS).FIELDS['log'] and name not in sys.modules and importlib.util.find_spec(name) is None:
      yield f"log={config.log!r} needs the package {name!r}: pip install 'jaxsearch[{name}]'"
  if config.eval.every and not config.eval.temperatures:
    yield 'eval.temperatures=() must hold at least one temperature where eval.every is set'


def check_files(config: ml_collections.ConfigDict, used: Sequence[str], corpus: str = '') -> None:
  """Raises ValueError that lists the files and folders that a config names and that are not there, before one is loaded.

  Args:
    used: the fields and groups that the command reads.
    corpus: what takes the place of `data.corpus`.
  """
  from jaxsearch.trees import templates
  back_ends, needs = tools.declared().values() if 'search' in used else (), _needs(config)
  mistakes = [mistake for backend in back_ends for mistake in backend.mistakes(config.search)]
  for field, kind in needs.items():
    if any(field == name or field.startswith(f'{name}.') for name in used):
      value = functools.reduce(getattr, field.split('.'), config)
      shown = '--corpus' if corpus and field == 'data.corpus' else field
      mistakes += _missing(shown, kind, corpus if shown == '--corpus' else value)
  if mistakes:
    raise ValueError('; '.join(mistakes))
  if 'judge' in used and 'judge.model' in needs:
    templates.judge_files(config.judge.templates)


def _needs(config: ml_collections.ConfigDict) -> dict[str, str]:
  """Returns the fields that have to be set, with kinds as in `tools.Backend` ('source': of questions or documents)."""
  from jaxsearch import methods
  search, services = config.search, getattr(methods.find_method(config.method), 'SERVICES', ())
  backend, judge = tools.find_backend(search.backend), config.judge.kind if {'judge'} & set(services) & set(config) else ''
  needs = {'data.questions': 'source', 'eval.questions': 'source', 'model': 'policy'}
  needs |= {'data.corpus': 'source'} if backend.corpus(search) else {}
  needs |= {f'search.{name}': kind for name, kind in backend.needs(search).items()}
  needs |= {'reader.model': 'model'} if 'reader' in services else {}
  needs |= {'judge.url': 'url', 'judge.model': 'name'} if judge == 'chat' else {}
  needs |= {'judge.model': 'model'} if judge == 'local' else {}
  needs |= {'classifier.model': 'model'} if config.grow.get('classifier') == 'model' else {}
  optional = {'eval.tiers': config.eval.tiers, 'tokenizer': config.tokenizer, 'critic.warm_start': config.critic.warm_start,
              'critic_warmup.encoder': 'critic_warmup' in config and config.critic_warmup.encoder}
  return needs | {field: 'path' for field, value in optional.items() if value}


def _missing(field: str, kind: str, value: str) -> Iterator[str]:
  """Yields what is missing of a field that has to be set."""
  from jaxsearch.data import sources
  from jaxsearch.models import gguf_files
  from jaxsearch.models.presets import preset
  from jaxsearch.tools.http_client import parse_url
  if not value:
    yield f'{field} is not set'
  elif kind == 'url':
    try:
      list(map(parse_url, value.split(',')))
    except ValueError:
      yield f'{field}={value!r}: not an http address'
  elif kind == 'policy' and value.startswith('random:'):
    preset(value.removeprefix('random:'))
  elif value.startswith(gguf_files.PACKAGE):
    try:
      gguf_files.in_package(value)
    except FileNotFoundError as error:
      yield f'{field}={value!r}: {error}'
  elif kind == 'source':
    if missing := sources.missing_files(value):
      where = f' as {", ".join(missing)}' if missing != [value] else ''
      yield f'{field}={value!r}: no such file or folder{where}'
  elif kind != 'name' and '://' not in value:  # nor in a bucket
    known = [*registry.ENTRIES['models'], *registry.POLICIES] if kind in ('model', 'policy') else []
    if value not in known and not pathlib.Path(value.partition('{source}')[0]).exists():
      yield f'{field}={value!r}: no such file or folder{suggestion(value, known)}'


_PASSWORD = re.compile(r'(?<=://)[^/?#\s]*@')
_KEY = re.compile(r'([?&;][^=&;#\s]*(?:key|token|secret|pass|pwd|auth|cred|sig|session)[^=&;#\s]*=)[^&;#,\s]+', re.IGNORECASE)


def without_secrets(value: Any) -> Any:
  """The value, or what is in it, with '***' for the user and password of URLs, and for parameters such as `api_key`."""
  if isinstance(value, str):
    return _KEY.sub(r'\1***', _PASSWORD.sub('***@', value)) if '://' in value else value
  if isinstance(value, Mapping):
    return {name: without_secrets(one) for name, one in value.items()}
  return type(value)(map(without_secrets, value)) if isinstance(value, (list, tuple)) else value


def to_saved(config: ml_collections.ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
  """What is written of a config, for `from_saved`: without secrets, and with the texts of prompts in files of the user's."""
  from jaxsearch.trees import templates
  saved = without_secrets(config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config)
  for group in (saved.get('grow', {}), saved.get('eval', {}).get('grow', {})):
    group.update(templates.texts(group))
  return saved


ARGUMENTS = ('grow', 'credit', 'sizes', 'eval.grow')  # groups of arguments: what they hold is the method's affair


def from_saved(values: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """The config that a run saved as JSON, with the fields of today.

  A field that it lacks has the value of configs/base.py; a field, or an argument of `grow`, that is gone is left out. Groups
  that base.py does not have, such as `reader`, are as they were. ValueError where a value is of another kind than its field.
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
  from jaxsearch import methods
  with contextlib.suppress(ValueError):  # a method that is not there is for `check` to name
    known = _arguments(methods.find_method(config.method), 'grow', given=2)
    for group in (config.grow, config.eval.grow):
      for gone in set(group) - set(known) if known is not None else ():
        del group[gone]
  return config.lock()


def _from_json(value: Any) -> Any:
  """Groups for dicts, and tuples for lists: configs have no lists."""
  if isinstance(value, Mapping):
    return ml_collections.ConfigDict({name: _from_json(one) for name, one in value.items()})
  return tuple(map(_from_json, value)) if isinstance(value, list) else value


def load_file(path: pathlib.Path) -> types.SimpleNamespace:
  """What a Python file defines; it does not enter sys.modules."""
  return types.SimpleNamespace(**runpy.run_path(str(path)))


def fields(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  """(name with dots, value) of every field, and of every group before its fields."""
  for name, value in config.items():
    yield prefix + name, value
    if isinstance(value, (Mapping, ml_collections.ConfigDict)):
      yield from fields(value, f'{prefix}{name}.')


def suggestion(name: str, known: Iterable[str]) -> str:
  """'; did you mean …?' with the known names of the same last part, or else the nearest; '' if none is near."""
  known, leaf = list(known), name.split('.')[-1]
  near = [one for one in known if one.split('.')[-1] == leaf] or difflib.get_close_matches(name, known, 1, 0.6)
  return f'; did you mean {" or ".join(map(repr, near[:3]))}?' if near else ''
