"""The one door to the embedded world: what names such as 'world:rl', 'world-tiny' and kind='world' stand for.

registry.toml lists them: what is looked up -> name -> 'module:attribute'. Nothing else imports `jaxsearch.world`. What an entry
points to is imported when it is looked up.
"""

import importlib
import pathlib
import tomllib
from typing import Any

ENTRIES: dict[str, dict[str, str]] = tomllib.loads(pathlib.Path(__file__).with_suffix('.toml').read_text(encoding='utf-8'))


def find(what: str, name: str) -> Any:
  """What `name` stands for; KeyError if there is no such entry."""
  module, _, attribute = ENTRIES[what][name].partition(':')
  return getattr(importlib.import_module(f'jaxsearch.world.{module}'), attribute)
