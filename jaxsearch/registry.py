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
  'recipe': {  # how the files and the models were made
    'files': 'jaxsearch.world.recipe.build:build',
    'policy': 'jaxsearch.world.recipe.policies:make',
  },
  'policy_template': {
    'world': 'jaxsearch.world.templates:POLICY',
    'world_direct': 'jaxsearch.world.templates:POLICY_DIRECT',
    'world_evidence': 'jaxsearch.world.templates:POLICY_EVIDENCE',
    'world_carl': 'jaxsearch.world.templates:CARL',
    'world_carl_direct': 'jaxsearch.world.templates:CARL_DIRECT',
    'world_carl_forced': 'jaxsearch.world.templates:CARL_FORCED',
  },
  'reader_template': {'world': 'jaxsearch.world.templates:READER'},
  'reader_alone_template': {'world': 'jaxsearch.world.templates:READER_ALONE'},
  'passage_template': {'world': 'jaxsearch.world.templates:PASSAGE'},
  'reviewer_template': {'world': 'jaxsearch.world.templates:REVIEWER'},
}


def find(what: str, name: str) -> Any:
  """What `name` stands for; KeyError if there is no such entry."""
  module, _, attribute = ENTRIES[what][name].partition(':')
  return getattr(importlib.import_module(module), attribute)
