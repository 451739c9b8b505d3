"""The one door to the embedded world: what names such as 'world:rl', 'world-tiny' and kind='world' stand for.

Nothing else imports `jaxsearch.world`. What an entry points to is imported when it is looked up.
"""

import importlib
from typing import Any

ENTRIES: dict[str, dict[str, str]] = {  # what is looked up -> name -> 'module:attribute'
  'questions': {'world': 'jaxsearch.world.files:questions'},  # (split, hops, arithmetic) -> the questions of 'world:SPLIT'
  'corpora': {'world': 'jaxsearch.world.files:corpus'},  # () -> documents
  'models': {  # Hugging Face folders
    'world-tiny': 'jaxsearch.world.files:POLICY',
    'world-review': 'jaxsearch.world.files:REVIEWER',
    'world-carl': 'jaxsearch.world.files:CODER',
    'world-reader': 'jaxsearch.world.files:READER',
  },
  'tokenizers': {'world': 'jaxsearch.world.files:POLICY'},  # the folder for all of these models, and for random parameters
  'judges': {'world': 'jaxsearch.world.judge:judge'},  # items -> scores, see rewards/judge.py
  'writers': {'world': 'jaxsearch.world.writer:WorldWriter'},  # (corpus, engine) -> writer, see tools/simulated.py
  'demonstrations': {'world': 'jaxsearch.world.chains:gold_example'},  # (question, tokenizer, template) -> ids, which are learned
  'policy_template': {  # the prompts that the shipped models were trained with, see trees/templates.py
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
  'recipe': {  # makes the files and the models again
    'files': 'jaxsearch.world.recipe.build:build',
    'policy': 'jaxsearch.world.recipe.policies:make',
  },
}


def find(what: str, name: str) -> Any:
  """What `name` stands for; KeyError if there is no such entry."""
  module, _, attribute = ENTRIES[what][name].partition(':')
  return getattr(importlib.import_module(module), attribute)
