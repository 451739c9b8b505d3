"""Policies and the agents that answer questions with them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from jaxsearch import setup
from jaxsearch.models import hub
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import memory, mesh as meshes, transfer
from jaxsearch.sampler.driver import Agent
from jaxsearch.training import batch as batches, step as steps
from jaxsearch.training.saved_policies import is_run, load_params, load_trained
from jaxsearch.trees.tree import Role, Tree


@dataclasses.dataclass(frozen=True)
class Policy:
  """A decoder with its tokenizer, and the step of its run; None where that is not known."""
  config: DecoderConfig
  params: dict
  tokenizer: Tokenizer
  step: int | None


@memory.named('loading the policy', 'set dtype=bfloat16')
def load_policy(config: ml_collections.ConfigDict, checkpoint: str = '') -> Policy:
  """Loads the policy of a run folder, checkpoint, adapter, Hugging Face folder or GGUF file.

  '' is `config.model`. The tokenizer is the checkpoint's, unless `config.tokenizer` names one. The base of
  a run or adapter is `config.model`, unless it began with a model that we ship. FileNotFoundError for none.
  """
  if checkpoint and (is_run(checkpoint) or hub.is_adapter(checkpoint)):
    model_config, params, host = load_params(checkpoint, base=config.model, dtype=config.dtype)
    setup.check_positions(config, model_config, f'checkpoint={checkpoint!r}')
    model_config = dataclasses.replace(model_config, dtype=config.dtype)
    return Policy(model_config, params, tokenizer_of(config, host, checkpoint), host['step'])
  if checkpoint:
    decoder, run = hub.load(checkpoint, config.dtype, mesh=meshes.of_host()), hub.read_run(checkpoint) or {}
    setup.check_positions(config, decoder.config, f'checkpoint={checkpoint!r}')
    transfer.check_finite(decoder.params, checkpoint)
    tokenizer = Tokenizer.load(config.tokenizer or checkpoint)
    return Policy(decoder.config, decoder.params, tokenizer, run.get('step'))
  model_config, params = setup.load_policy(config, meshes.of_host())
  return Policy(model_config, params, setup.load_tokenizer(config), None)


def tokenizer_of(config: ml_collections.ConfigDict, host: Mapping[str, Any], checkpoint: str) -> Tokenizer:
  """Loads the tokenizer that `config.tokenizer` names, else a checkpoint's, else of what it began with."""
  if host.get('tokenizer') and not config.tokenizer:
    return Tokenizer.from_json(host['tokenizer'])
  base = setup.base_of(host, config.model, checkpoint)
  return Tokenizer.load(config.tokenizer or setup.tokenizer_of(host, base, checkpoint))


def open_agent(config: ml_collections.ConfigDict, checkpoint: str = '', corpus: str = '',
               policy: Policy | None = None, **changes) -> Agent:
  """Opens the agent of a config as it answers questions.

  Args:
    checkpoint: see `load_policy`; unless there is a `policy`.
    corpus: passages to search; '' is `config.data.corpus`.
    changes: of the arguments of `grow`, beside those of `config.eval.grow`.
  """
  policy = policy or load_policy(config, checkpoint)
  engine = setup.open_engine(config, policy.config, policy.tokenizer)
  engine.load(policy.params)
  tools = setup.open_tools(config, corpus, services=setup.answering_services(config))
  return setup.make_agent(config, engine, tools, **dict(config.eval.grow) | changes)


def open_critic(config: ml_collections.ConfigDict,
                checkpoint: str) -> Callable[[Sequence[Tree]], None] | None:
  """Returns what writes the values of a checkpoint's critic onto finished trees.

  None unless the critic shares the backbone of the policy.
  """
  if not (checkpoint and is_run(checkpoint)):
    return None
  mesh = meshes.of_host()
  model_config, params, _ = load_trained(checkpoint, mesh, warn=False)  # `load_policy` warns
  if steps.HEAD not in params:
    return None
  model_config = dataclasses.replace(model_config, dtype=config.dtype)
  value_step = steps.make_value_step(model_config, mesh=mesh, shared=True)
  length = max(config.train.row_length, config.sampler.length)  # which may be that of the checkpoint
  settings = ml_collections.ConfigDict(dict(config.train) | {'micro_rows': 1, 'row_length': length})

  def assess(trees: Sequence[Tree]) -> None:
    if trees := [tree for tree in trees if any(node.tokens for node in tree.nodes(Role.POLICY))]:
      packed = batches.pack(trees, mesh, settings, attention=model_config.attention)
      with transfer.issuing():  # beside them a writer may decode, on another thread
        values = value_step(params, packed.batch)
      batches.note(packed, values, 'values')

  return assess
