"""Answering questions with a policy, and scoring the answers: `jaxsearch eval`, `ask`, and held-out questions during training."""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax
import ml_collections
import numpy as np

import jaxsearch
from jaxsearch import setup
from jaxsearch.data.jsonl import DataError, read_records, shortened
from jaxsearch.evaluation import competence, report
from jaxsearch.models import hub
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.rewards.match import answer_found, entity_match, f1
from jaxsearch.sampler.requests import Sampling
from jaxsearch.sampler.rollout import Agent, rollout
from jaxsearch.training.checkpoint import is_run, load_params
from jaxsearch.trees.tree import Role, Tree

SAMPLES = 24  # rollouts kept of an evaluation during training


def open_agent(config: ml_collections.ConfigDict, checkpoint: str = '', corpus: str = '', **changes) -> Agent:
  """The agent of a config as it answers: with the arguments of `grow` that `config.eval.grow` and then `changes` change.

  Args:
    checkpoint: run folder, checkpoint in it, Hugging Face folder or GGUF file, else FileNotFoundError; '' is `config.model`.
    corpus: passages to search; '' is `config.data.corpus`.
  """
  if checkpoint and is_run(checkpoint):
    model_config, params, host = load_params(checkpoint)
    model_config = dataclasses.replace(model_config, dtype=config.dtype)
    tokenizer = setup.load_tokenizer(ml_collections.ConfigDict(host['config']))  # that of the run, not of `config`
  elif checkpoint:
    decoder = hub.load(checkpoint, config.dtype)
    model_config, params, tokenizer = decoder.config, decoder.params, Tokenizer.load(config.tokenizer or checkpoint)
  else:
    model_config, params = setup.load_policy(config, meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1]))
    tokenizer = setup.load_tokenizer(config)
  engine = setup.open_engine(config, model_config, tokenizer)
  engine.load(params)
  return setup.make_agent(config, engine, setup.open_tools(config, corpus), **dict(config.eval.grow) | changes)


def scores(trees: Sequence[Tree]) -> dict[str, float]:
  """Means over finished trees: em, em_entity (CARL's looser rule), f1, searches, retrieval_recall (the share that found a gold
  answer); their number n."""
  values = {
    'em': [tree.question.score(tree.answer) for tree in trees],
    'em_entity': [max(tree.question.score(tree.answer), entity_match(tree.answer, tree.question.golden_answers))
                  for tree in trees],
    'f1': [f1(tree.answer, tree.question.golden_answers) for tree in trees],
    'searches': [tree.metrics['searches'] for tree in trees],
    'retrieval_recall': [any(answer_found(tree.question.golden_answers, node.text) for node in tree.nodes(Role.OBSERVATION))
                         for tree in trees],
  }  # fmt: skip
  return {name: float(np.mean(own)) for name, own in values.items()} | {'n': len(trees)}


def predictions(trees: Sequence[Tree]) -> list[dict]:
  """A record for each tree: the question, what was answered and how it was found."""
  return [
    {'id': tree.question.id, 'source': tree.question.metadata.get('source', ''), 'question': tree.question.question,
     'golden_answers': list(tree.question.golden_answers), 'prediction': tree.answer, 'em': tree.question.score(tree.answer),
     'f1': f1(tree.answer, tree.question.golden_answers), 'searches': tree.metrics['searches'], 'stop': tree.stop,
     'spans': report.spans(tree)}
    for tree in trees]


def manifest(config: ml_collections.ConfigDict, **files: str) -> dict:
  """What an evaluation was made with: versions, device, config, and the SHA-256 of the files that it read."""
  return {'jaxsearch': jaxsearch.__version__, 'jax': jax.__version__, 'device': jax.devices()[0].device_kind,
          'config': json.loads(config.to_json_best_effort()),
          'files': {name: {'path': path, 'sha256': _sha256(path)} for name, path in files.items() if path}}


def held_out(agent: Agent, config: ml_collections.ConfigDict, step: int,
             assess: Callable[[Sequence[Tree]], None] | None = None) -> Iterator[dict]:
  """Evaluates on `config.eval` at each of its temperatures; yields the rows of evaluations.jsonl.

  The questions and the random key are the same at every step, so that runs and steps can be compared. With `config.eval.tiers`
  the rows say what tools were used for; with `assess`, which writes a critic's values onto the spans, how good the critic is.
  """
  tiers = read_tiers(config.eval.tiers) if config.eval.tiers else {}
  questions = setup.load_questions(config, config.eval.questions)[:config.eval.number or None]
  for temperature in config.eval.temperatures:
    trees, _ = rollout(agent, questions, jax.random.key(config.seed), sampling=Sampling(temperature))
    trees = _of_first_process(trees)
    figures = {}
    if assess is not None:
      assess(trees)
      figures |= competence.critic_figures(trees, tiers) | competence.sign_figures(trees)
    if tiers:
      figures |= competence.use_figures(trees, tiers)
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}  # JSON has no NaN
    yield {'step': step, 'temperature': temperature} | scores(trees) | finite | {'samples': predictions(trees[:SAMPLES])}


def _of_first_process(trees: list[Tree]) -> list[Tree]:
  """The trees of the first process on all: what each grew for the same questions may differ where the clock decides."""
  if jax.process_count() == 1:
    return trees
  tokenizer = trees[0].tokenizer
  trees = meshes.gather_objects(trees if jax.process_index() == 0 else [])[0]
  for tree in trees:
    tree.tokenizer = tokenizer
  return trees


def read_tiers(path: str) -> dict[str, int]:
  """Question id -> tier, from the file that `jaxsearch tiers` writes."""
  tiers = {}
  for place, record in read_records(path):
    if record.get('tier') not in (1, 2) or 'id' not in record:
      raise DataError(f"{place}: an 'id' and a 'tier' of 1 or 2 are wanted, not {shortened(record)}")
    tiers[record['id']] = record['tier']
  return tiers


def _sha256(path: str) -> str | None:
  if not pathlib.Path(path).is_file():
    return None
  with open(path, 'rb') as stream:
    return hashlib.file_digest(stream, 'sha256').hexdigest()
