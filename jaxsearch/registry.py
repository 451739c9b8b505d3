"""The one door to the embedded world: what names such as 'world:rl', 'world-tiny' and kind='world' stand for.

Nothing else imports `jaxsearch.world`. What an entry points to is imported when it is asked for.
"""

import importlib
from typing import Any

ENTRIES: dict[str, dict[str, str]] = {  # what is looked for -> name -> 'module:attribute'
  'recipe': {'files': 'jaxsearch.world.recipe.build:build', 'policy': 'jaxsearch.world.recipe.policies:make'},
}


def find(what: str, name: str) -> Any:
  """What `name` stands for; KeyError if there is no such entry."""
  module, _, attribute = ENTRIES[what][name].partition(':')
  return getattr(importlib.import_module(module), attribute)
