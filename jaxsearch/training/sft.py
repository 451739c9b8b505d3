"""Supervised training: demonstrations in, a policy that imitates them out. The warm start of reinforcement learning.

A demonstration is a tree whose POLICY spans carry the loss. It goes through the same layout and the same
step as a rollout, with the negative log-likelihood in place of the surrogate. `train` is `jaxsearch sft`: demonstrations from
a file or from the embedded world, checkpoints, metrics, exact resume. `fit` trains on any stream of forests.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence

import jax
import ml_collections
import numpy as np

from jaxsearch import registry, setup
from jaxsearch.data.jsonl import DataError, read_records
from jaxsearch.models import hub
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.parallel import memory
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import batch as batches
from jaxsearch.training import metrics_log, progress, runs
from jaxsearch.training import step as steps
from jaxsearch.trees.tree import Role, Tree

ROLES = {role.value: role for role in Role if role is not Role.ROOT}


def open_demonstrations(config: ml_collections.ConfigDict, tokenizer) -> tuple[int, Callable[[int], Tree]]:
  """How many demonstrations `config.sft.demonstrations` has, and a function that gives one of them by its index.

  'world:SPLIT' is the gold chain of every question of that split (`data.hops` and `data.arithmetic` choose among them, and
  `grow.template` is their prompt), made when it is asked for; anything else is a file, see `read_demonstrations`.
  """
  name = config.sft.demonstrations
  source = name.partition(':')[0]
  if source not in registry.ENTRIES['demonstrations']:
    found = read_demonstrations(name, tokenizer)
    return len(found), found.__getitem__
  gold_example = registry.find('demonstrations', source)
  questions = setup.load_questions(config, name)
  return len(questions), lambda index: demonstration(*gold_example(questions[index], tokenizer, config.grow.template), tokenizer)


def read_demonstrations(path: str | os.PathLike, tokenizer) -> list[Tree]:
  """Reads JSONL lines `{"spans": [{"role": "prompt" | "policy" | "observation" | "context", "text": …, "parent": …}, …]}`.

  A span follows the one before it, or the one with the index `parent` (-1: none). Each is tokenised by itself, as the sampler
  does. Only policy spans are learned. A DataError names file, line and key.
  """
  forest = []
  for place, record in read_records(path):
    spans = record.get('spans')
    if not isinstance(spans, list) or not spans:
      raise DataError(f"{place}: 'spans' must be a list of spans that is not empty")
    tree = Tree(tokenizer)
    nodes = [tree.root]
    for number, span in enumerate(spans):
      role, text = (span.get('role'), span.get('text')) if isinstance(span, dict) else (None, None)
      if role not in ROLES or not isinstance(text, str):
        raise DataError(f"{place}: span {number} needs a 'role' of {', '.join(ROLES)} and a 'text', not {span!r}")
      parent = span.get('parent', number - 1)
      if type(parent) is not int or not -1 <= parent < number:
        raise DataError(f"{place}: span {number} has the 'parent' {parent!r}, not the index of a span before it")
      nodes.append(nodes[parent + 1].append(text, ROLES[role]))
    if not any(node.trained and node.tokens for node in tree.walk()):
      raise DataError(f'{place}: no policy span, so nothing to learn')
    forest.append(tree)
  if not forest:
    raise DataError(f'{path}: no demonstrations in it')
  return forest


def demonstration(ids: Sequence[int], learned: Sequence[bool], tokenizer=None) -> Tree:
  """A tree of the given tokens; those marked `learned` bear the loss."""
  tree = Tree(tokenizer)
  node = tree.root
  edges = np.flatnonzero(np.diff(np.asarray(learned, np.int8))) + 1
  for start, end in zip([0, *edges], [*edges, len(ids)]):
    node = node.append(ids[start:end], Role.POLICY if learned[start] else Role.OBSERVATION)
  return tree


@memory.named('setting up training', memory.STATE)
def open_imitation(model_config: DecoderConfig, params: dict, optim: ml_collections.ConfigDict, total_updates: int, *,
                   row_length: int, micro_rows: int, pad_id: int, mesh: jax.sharding.Mesh, chunk: int = 1024,
                   aggregate: str = 'token-mean', seed: int = 0, base: dict | None = None,
                   alpha: float | None = None) -> tuple[steps.TrainState, Callable]:
  """(state, `learn(state, forest) -> (state, metrics)`): what does one supervised update of a decoder on one forest.

  With a `base`, its frozen parameters in the compute dtype, `params` are an adapter of it, scaled by `alpha` (models/lora.py).
  """
  optimizer, train_step = steps.make_update(
    functools.partial(steps.imitation_loss, config=model_config, chunk=chunk), params, optim, total_updates, mesh=mesh,
    dtype=model_config.dtype, alpha=alpha, seed=(seed,))

  @memory.named('updating the policy', memory.UPDATE)
  def learn(state: steps.TrainState, forest: Sequence[Tree]) -> tuple[steps.TrainState, dict[str, float]]:
    rows = batches.lay_out_own(forest[meshes.own_part()], row_length, pad_id=pad_id, how=aggregate)
    state, result = train_step(state, batches.place(batches.make_batch(rows, micro_rows, trees=len(forest)), mesh), base)
    return state, metrics_log.to_row(result) | {'padded_share': 1 - rows.fill}

  return steps.create_state(params, optimizer, mesh), learn


def fit(model_config: DecoderConfig, params: dict, forests: Iterable[Sequence[Tree]], *, optim: ml_collections.ConfigDict,
        total_updates: int, report: Callable[[int, dict[str, float], dict], None], **rows: int) -> dict:
  """Trains on `total_updates` forests, one update each, on the first device; returns the trained parameters.

  Args:
    params: nested dict of arrays; they are copied, not changed.
    optim: the `optim` group of a config.
    report: called with (number of the update from 1, its metrics, parameters) after each.
    rows: `row_length`, `micro_rows` and `pad_id` of the training rows.
  """
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  params = steps.place_params(params, setup.param_shardings(model_config, mesh))
  state, learn = open_imitation(model_config, params, optim, total_updates, mesh=mesh, **rows)
  for update, forest in zip(range(1, total_updates + 1), forests):
    state, row = learn(state, forest)
    report(update, row, state.params)
  return state.params


def train(config: ml_collections.ConfigDict) -> dict[str, float]:
  """`jaxsearch sft`: imitates the demonstrations of `config.sft.demonstrations`; returns the last row of metrics.

  A step is one update on `config.sft.per_step` demonstrations; their order is a function of the seed and the step alone.
  """
  meshes.start_distributed(**config.distributed)
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  tokenizer = setup.load_tokenizer(config)
  number, demonstration_of = open_demonstrations(config, tokenizer)
  row = {}
  with runs.RunFolder(config, shown=('loss', 'logprob')) as run:
    model_config, params = setup.load_policy(config, mesh)
    fingerprint, base = hub.fingerprint(params), None
    if config.lora.rank:
      base, params = params, setup.new_adapter(config, model_config, mesh)
    state, learn = open_imitation(
      model_config, params, config.optim, config.steps, row_length=config.train.row_length, micro_rows=config.train.micro_rows,
      pad_id=tokenizer.pad_id, mesh=mesh, chunk=config.train.chunk, aggregate=config.train.aggregate, seed=config.seed, base=base,
      alpha=config.lora.alpha)
    state, _ = run.restore(state, check=lambda host: hub.check_base(host, fingerprint, config.model))
    run.start()
    for step in run.steps():
      clock = progress.Clock()
      with clock('train'):
        indices = shuffled(number, config.sft.per_step, step - 1, config.seed)
        state, row = learn(state, [demonstration_of(index) for index in indices])
      run.finish_step(step, row | clock.row(row['tokens_trained']), state, lambda: {
        'decoder': dataclasses.asdict(model_config), 'reference': fingerprint})
  return row


def shuffled(number: int, per_step: int, step: int, seed: int) -> list[int]:
  """Indices of a step's examples: epoch after epoch of all `number`, each in its own order, steps cut from the line."""
  places = range(step * per_step, (step + 1) * per_step)
  orders = {epoch: np.random.default_rng([seed, epoch]).permutation(number) for epoch in {place // number for place in places}}
  return [int(orders[place // number][place % number]) for place in places]
