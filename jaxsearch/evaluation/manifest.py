"""The manifest of a result: what its scores depend on, as JSON can hold it.

`table.py` compares manifests before it puts scores into one column, and an evaluation resumes only under the
same.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_collections

import jaxsearch
from jaxsearch.config_check import to_saved, without_secrets
from jaxsearch.data import benchmarks, sources
from jaxsearch.data.questions import Question
from jaxsearch.evaluation.question_sets import QuestionSet
from jaxsearch.sampler.assistants import first_requests
from jaxsearch.sampler.driver import Agent
from jaxsearch.sampler.requests import Sampling
from jaxsearch.tools import find_backend
from jaxsearch.trees import templates

# Raise the number when a score may change.
METRIC = 'SQuAD 1.1 normalisation, strict EM, numbers for GSM8K and FinQA; 2'
# What methods call the limit of their turns.
TURNS = ('max_turns', 'budget', 'max_segments', 'max_steps', 'rounds', 'max_searches', 'max_thoughts',
         'max_sentences')


def made_with(config: ml_collections.ConfigDict, **files: str) -> dict[str, Any]:
  """Returns what a result was made with: versions, device, config, and the SHA-256 of files."""
  read = {name: {'path': without_secrets(path), 'sha256': sources.hash_of(path)}
          for name, path in files.items() if path}
  return {'jaxsearch': jaxsearch.__version__, 'jax': jax.__version__, 'device': jax.devices()[0].device_kind,
          'config': to_saved(config), 'files': read}


def manifest(config: ml_collections.ConfigDict, sets: Sequence[QuestionSet], agent: Agent, *,
             corpus: str, sampling: Sampling, samples: int = 1, tiers: str = '') -> dict[str, Any]:
  """Returns the manifest of an evaluation; `corpus` is what is searched, '' for none of ours."""
  grow = dict(config.grow) | dict(config.eval.grow)
  search = {name: config.search[name] for name in ('backend', 'by_source')}
  search |= {'words': config.search.words} if config.search.words else {}
  search |= find_backend(config.search.backend).identity(config.search)
  made = made_with(config, questions=sets[0].source if len(sets) == 1 else '', corpus=corpus, tiers=tiers)
  corpus_hash = search.pop('corpus_hash', None) or made['files'].get('corpus', {}).get('sha256')
  if corpus and not corpus_hash:  # the world's
    corpus_hash = _digest(f'{document.title}\n{document.text}' for document in sources.load_corpus(corpus))
  tokenizer = agent.engine.tokenizer
  return made | {
    'method': config.method, 'metric': METRIC, 'corpus': {'name': corpus, 'sha256': corpus_hash},
    'index': search, 'k': config.search.topk, 'questions': {one.name: _about(one) for one in sets},
    'turns': next((grow[name] for name in TURNS if name in grow), None),
    # Nothing is truncated; older results say so too.
    'decoding': dataclasses.asdict(sampling) | {'top_p': 1.0, 'top_k': 0, 'samples': samples},
    'limits': {'context': config.sampler.length, 'max_tokens': grow.get('max_tokens')},
    'prompt': prompt_hash(agent, grow),
    'tokenizer': {'size': tokenizer.vocab_size, 'sha256': _digest([tokenizer.backend.to_str()])},
  }


def _about(one: QuestionSet) -> dict[str, Any]:
  golds = (f'{question.question}\n{question.golden_answers}' for question in one.questions)
  return {'source': one.source, 'split': benchmarks.split_of(one.source), 'n': len(one.questions),
          'ids': _digest(question.id for question in one.questions), 'golds': _digest(golds)}


def prompt_hash(agent: Agent, grow: Mapping[str, Any]) -> str:
  """Returns the hash of the first prompt of a made-up question, and of all templates that `grow` names."""
  tokenizer = agent.engine.tokenizer
  first = first_requests(agent.grow, Question('probe', 'QUESTION', ('ANSWER',)), tokenizer, agent.grammar)
  prompts = [tokenizer.decode(request.node.path_tokens()) for request in first[:1]]
  prompts += [templates.find(grow[field], kind) for field, kind in templates.SETTINGS.items()
              if field in grow]
  prompts += templates.files('prompted', grow['prompts']).values() if 'prompts' in grow else []
  return _digest(prompts)


def weights(path: str, step: int | None = None) -> dict[str, Any]:
  """Identifies weights by path, size and time of their last change; those of a run's `step` without size."""
  folder = pathlib.Path(path)
  files = [file.stat() for file in ([folder] if folder.is_file() else folder.glob('*.safetensors'))]
  of_run = folder / 'checkpoints' / str(step), folder / str(step), folder.parent / str(step)
  saved = [place.stat() for place in of_run if place.is_dir()]
  return {'path': path, 'step': step, 'bytes': sum(file.st_size for file in files),
          'modified': max((file.st_mtime for file in (*files, *saved)), default=None)}


def _digest(texts: Iterable[str]) -> str:
  digest = hashlib.sha256()
  for text in texts:
    digest.update(f'{len(text)}\n{text}'.encode())
  return digest.hexdigest()
