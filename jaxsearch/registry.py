"""The one door to the embedded world: what names such as 'world:rl', 'world-tiny' and kind='world' stand for.

Nothing else imports `jaxsearch.world`. What an entry points to is imported when it is looked up.
"""

import importlib
from typing import Any

ENTRIES: dict[str, dict[str, str]] = {  # what is looked for -> name -> 'module:attribute'
  'models': {  # Hugging Face folders
    'world-tiny': 'jaxsearch.world.files:POLICY',
    'world-review': 'jaxsearch.world.files:REVIEWER',
    'world-carl': 'jaxsearch.world.files:CODER',
    'world-reader': 'jaxsearch.world.files:READER',
  },
  'tokenizers': {'world': 'jaxsearch.world.files:FOLDER'},  # of all of these models, and of random parameters
  'judges': {'world': 'jaxsearch.rewards.judge:world_judge'},
}


def find(what: str, name: str) -> Any:
  """What `name` stands for; KeyError if there is no such entry."""
  module, _, attribute = ENTRIES[what][name].partition(':')
  return getattr(importlib.import_module(module), attribute)
