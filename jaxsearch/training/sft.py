"""Supervised training: demonstrations in, a policy that imitates them out.

A demonstration is a tree whose POLICY spans carry the loss. It goes through the same layout and the same step
as a rollout, with the negative log-likelihood in place of the surrogate. `train` is `jaxsearch sft`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxsearch import registry, setup
from jaxsearch.data import sources
from jaxsearch.data.jsonl import DataError, read_records
from jaxsearch.models import hub
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.parallel import memory, mesh as meshes, transfer
from jaxsearch.training import batch as batches, metrics, run_folder, state as states, step as steps
from jaxsearch.trees.tree import Role, Tree

ROLES = {role.value: role for role in Role if role is not Role.ROOT}


def open_demonstrations(config: ConfigDict, tokenizer) -> tuple[int, Callable[[int], Tree]]:
  """Returns the number of demonstrations in `config.sft.demonstrations`, and a function of an index for one.

  'world:SPLIT' is the gold chain of every question of that split: `data.hops` and `data.arithmetic` choose
  among them, and `grow.template` is their prompt. Anything else is a file, see `read_demonstrations`.
  """
  name = config.sft.demonstrations
  source = name.partition(':')[0]
  if source not in registry.ENTRIES['demonstrations']:
    forest = read_demonstrations(name, tokenizer, config.train.row_length)
    # A new tree each time: a batch at the end of an epoch may have the same demonstration twice.
    return len(forest), lambda index: Tree.from_json(forest[index].to_json(), tokenizer, None)
  gold_example, speech = registry.find('demonstrations', source), setup.open_grammar(config, tokenizer)
  questions = setup.load_questions(config, name)
  return len(questions), lambda index: demonstration(
    *gold_example(questions[index], tokenizer, config.grow.template, speech), tokenizer)


def read_demonstrations(path: str | os.PathLike, tokenizer, length: int = 0) -> list[Tree]:
  """Reads JSONL lines `{"spans": [{"role": …, "text": …, "parent": …}, …]}`.

  A role is prompt, policy, observation or context; only policy spans are learned. A span follows the one
  before it, or the one with the index `parent` (-1: none). Each is tokenised by itself, as the sampler does.
  A DataError names file, line and key; it does so too where a path has more than `length` tokens (0: any).
  """
  forest = []
  for place, record in read_records(path):
    spans = record.get('spans')
    if not isinstance(spans, list) or not spans:
      raise DataError(f"{place}: 'spans' must be a list of spans that is not empty")
    tree = Tree(tokenizer)
    nodes = [tree.root]
    for number, span in enumerate(spans):
      where = f'{place}: span {number}'
      role, text = (span.get('role'), span.get('text')) if isinstance(span, dict) else (None, None)
      if not isinstance(role, str) or role not in ROLES or not isinstance(text, str):
        raise DataError(f"{where} needs a 'role' of {', '.join(ROLES)} and a 'text', not {span!r}")
      parent = span.get('parent', number - 1)
      if type(parent) is not int or not -1 <= parent < number:
        raise DataError(f"{where} has the 'parent' {parent!r}, not the index of a span before it")
      nodes.append(nodes[parent + 1].append(text, ROLES[role]))
    if not any(node.trained and node.tokens for node in tree.walk()):
      raise DataError(f'{place}: no policy span, so nothing to learn')
    if 0 < length < (longest := max(leaf.length for leaf in tree.leaves())):
      raise DataError(f'{place}: {longest} tokens, more than train.row_length={length}')
    forest.append(tree)
  if not forest:
    raise DataError(f'{path}: no demonstrations in it')
  return forest


def demonstration(ids: Sequence[int], learned: Sequence[bool], tokenizer=None) -> Tree:
  """Returns a tree of the given tokens; those marked `learned` bear the loss."""
  tree = Tree(tokenizer)
  node = tree.root
  edges = np.flatnonzero(np.diff(np.asarray(learned, np.int8))) + 1
  for start, end in zip([0, *edges], [*edges, len(ids)]):
    node = node.append(ids[start:end], Role.POLICY if learned[start] else Role.OBSERVATION)
  return tree


@memory.named('setting up training', memory.STATE)
def open_imitation(config: ConfigDict, model_config: DecoderConfig, params: dict, mesh: Mesh,
                   base: dict | None = None) -> tuple[states.TrainState, Callable]:
  """Returns (state, `learn(state, forest) -> (state, metrics)`), which makes one update on a forest.

  `config.steps` updates will be made, by `config.train` and `config.optim`. If `base` (frozen parameters in
  the compute dtype) is given, `params` are an adapter of it.
  """
  settings = ConfigDict(dict(config.train) | {'penalties': ''})  # there are none
  loss = functools.partial(steps.imitation_loss, config=model_config, chunk=settings.chunk)
  optimizer, train_step = steps.make_update(
    loss, params, config.optim, config.steps, mesh=mesh, dtype=model_config.dtype, alpha=config.lora.alpha,
    seed=(config.seed,))

  @memory.named('updating the policy', memory.UPDATE)
  def learn(state: states.TrainState, forest: Sequence[Tree]) -> tuple[states.TrainState, dict[str, float]]:
    packed = batches.pack(forest[transfer.local_part()], mesh, settings, at_most=len(forest),
                          attention=model_config.attention)
    state, result = train_step(state, packed.batch, base)
    padded = 1 - packed.tokens_of_all / (packed.rows_of_all * settings.row_length)
    return state, metrics.to_row(result) | {'padded_share': padded}

  return states.create_state(params, optimizer, mesh), learn


def train(config: ConfigDict) -> dict[str, float]:
  """Imitates the demonstrations of `config.sft.demonstrations`; returns the last row of metrics.

  A step is one update on `config.sft.per_step` demonstrations; their order is a function of the seed and the
  step alone. Nothing is learned of values: a critic is off, so that no reader of the run asks for its head.
  """
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.critic.enabled = False
  meshes.start_distributed(**config.distributed)
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  tokenizer = setup.load_tokenizer(config)
  number, demonstration_of = open_demonstrations(config, tokenizer)
  with run_folder.RunFolder(config, shown=('loss', 'logprob')) as run:
    model_config, params = setup.load_policy(config, mesh)
    tokenizer.check_fits(model_config.vocab_size)
    fingerprint, base, row = hub.fingerprint(params), None, {}
    if config.lora.rank:
      base, params = params, setup.new_adapter(config, model_config, mesh)
    state, learn = open_imitation(config, model_config, params, mesh, base)
    del params  # the state has a copy
    digest = sources.hash_of(config.sft.demonstrations)

    def check(host: dict) -> None:
      hub.check_base(host, fingerprint, config.model)
      if 'memory' in host:
        raise ValueError(f'{config.out} holds a run of `jaxsearch train`: set another out')
      if host.get('demonstrations', digest) != digest:
        raise ValueError(f'sft.demonstrations={config.sft.demonstrations!r} has changed since this run began')

    state, _ = run.restore(state, check=check)
    run.start()
    for step in run.steps():
      clock = metrics.Clock()
      with clock('train'):
        indices = shuffled(number, config.sft.per_step, step - 1, config.seed)
        state, row = learn(state, [demonstration_of(index) for index in indices])
      run.finish_step(step, row | clock.row(row['tokens_trained']), state, lambda: {
        'decoder': dataclasses.asdict(model_config), 'reference': fingerprint, 'demonstrations': digest})
  return row


def shuffled(number: int, per_step: int, step: int, seed: int) -> list[int]:
  """Returns the indices of a step's examples, cut from a line of epochs, each in an order of its own."""
  places = range(step * per_step, (step + 1) * per_step)
  epochs = {place // number for place in places}
  orders = {epoch: np.random.default_rng([seed, epoch]).permutation(number) for epoch in epochs}
  return [int(orders[place // number][place % number]) for place in places]
