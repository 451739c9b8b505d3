"""Opens what training works on: the policy, its sampler, its critic and the compiled programs.

A critic is on the backbone of the policy, its head among the policy's parameters (CARL), or a decoder of its
own that starts as a copy. Either has an optimizer and a step of its own. A shared critic's gradient into the
backbone is not added to the policy's: AdamW normalises gradients, so a factor in front of one would not act
as a learning rate. This costs a second pair of moments, forward and backward pass, not a second decoder.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from optax import GradientTransformation

from jaxsearch import setup
from jaxsearch.methods import find_method
from jaxsearch.models import hub, value_head
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.parallel import memory, mesh as meshes
from jaxsearch.sampler.driver import Agent
from jaxsearch.training import batch as batches, judging, saved_policies, state as states, step as steps

FROZEN = ('embedding', 'unembedding')  # of the policy, for the critic on its backbone


@dataclasses.dataclass
class Learner:
  """The policy, its sampler, and the compiled programs that train it."""
  config: ConfigDict
  model_config: DecoderConfig
  mesh: Mesh
  agent: Agent              # the policy as it samples; `update.prepare` it before a rollout
  state: states.TrainState  # of the policy, or of its adapter; with that of its critic
  base: dict | None         # the frozen parameters under the adapter; None without one
  policy: Callable          # (base, what is trained) -> parameters of the policy, in the compute dtype
  reference: dict | None    # of the frozen initial policy, in the compute dtype; None if there is no KL
  fingerprint: list[float]  # of the initial policy
  train_step: Callable
  score: Callable
  critic_step: Callable | None
  values: Callable | None   # (parameters of the critic, batch) -> values; None without a critic
  recomputes: bool          # see `recomputes`
  releases: bool            # see `releases`
  verdicts: dict[tuple, float] = dataclasses.field(default_factory=dict)  # of judges, see judging.py
  memory: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the method, see methods.Context


@memory.named('setting up training', memory.STATE)
def make_learner(config: ConfigDict) -> Learner:
  """Builds all that training needs before its first step."""
  mesh = meshes.make_mesh(**config.mesh)
  batches.check_rows(config.train.micro_rows, mesh)
  model_config, params = setup.load_policy(config, mesh)
  adapted, shared = bool(config.lora.rank), is_shared(config)
  critic, critic_step, values, warm = None, None, None, None
  if config.critic.enabled:
    if config.critic.warm_start:
      _, warm, host = saved_policies.load_trained(config.critic.warm_start, mesh)
      check_warm_start(config, host, hub.fingerprint(params))
    critic, critic_step = open_critic(config, model_config, params, mesh, total_updates(config), warm)
    values = steps.make_value_step(model_config, mesh=mesh, shared=shared)
  if adapted:
    trained = setup.new_adapter(config, model_config, mesh)
    policy = setup.merger(config, model_config, mesh)
  else:
    trained = critic.params if shared else params
    policy = jax.jit(lambda _, params: states.cast(states.without_head(params), model_config.dtype))
  optimizer, train_step = make_update(config, model_config, mesh, trained)
  state = dataclasses.replace(states.create_state(trained, optimizer, mesh),
                              critic=dataclasses.replace(critic, params={}) if shared else critic)
  local = meshes.local_mesh(mesh)
  engine = setup.open_engine(config, model_config, setup.load_tokenizer(config), local)
  services = dict.fromkeys((*getattr(find_method(config.method), 'SERVICES', ()), *judging.services(config)))
  tools = setup.open_tools(config, mesh=local, services=tuple(services))
  score = steps.make_score_step(
    model_config, mesh=mesh, temperature=config.sampler.temperature, chunk=config.train.chunk)
  return Learner(
    config=config, model_config=model_config, mesh=mesh, agent=setup.make_agent(config, engine, tools),
    state=state, base=params if adapted else None, policy=policy,
    reference=states.cast(params, model_config.dtype) if config.loss.kl_coef else None,
    fingerprint=hub.fingerprint(params), train_step=train_step, score=score, critic_step=critic_step,
    values=values, recomputes=recomputes(config), releases=releases(config, jax.default_backend()))


def check_warm_start(config: ConfigDict, host: dict[str, Any], fingerprint: list[float]) -> None:
  """Raises ValueError unless the critic of a checkpoint with this `host` was warmed up for such a run, whose
  model has this fingerprint."""
  name, saved = config.critic.warm_start, host['config']
  was_shared = saved['critic']['enabled'] and saved['critic']['shared']
  if not (was_shared or host.get('critic')):
    raise ValueError(f'critic.warm_start={name!r} has no warmed-up critic: name a run of '
                     '`jaxsearch critic-warmup`')
  if saved['model'] != config.model or was_shared != is_shared(config):
    raise ValueError(
      f'critic.warm_start={name!r} was warmed up for the model {saved["model"]!r}, '
      f'critic.shared={was_shared}; here they are {config.model!r}, {is_shared(config)}')
  if 'reference' in host and setup.param_dtype(saved) == setup.param_dtype(config):
    hub.check_base(host, fingerprint, config.model, f'critic.warm_start={name!r}')
  learned, aggregate = saved['train']['aggregate'], config.train.aggregate
  if 'step-mean' in (learned, aggregate) and learned != aggregate:
    raise ValueError(
      f'critic.warm_start={name!r} was warmed up with train.aggregate={learned!r}, here it is {aggregate!r}: '
      "with 'step-mean' a critic learns starts of spans alone, else every token")


def make_update(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh,
                trained: dict) -> tuple[GradientTransformation, Callable]:
  """Returns (optimizer, compiled training step) for parameters: arrays, or structs with shardings."""
  weights = dict(config.loss, temperature=config.sampler.temperature, chunk=config.train.chunk,
                 importance_cap=importance_cap(config))
  loss = functools.partial(steps.policy_loss, config=model_config, **weights)
  return steps.make_update(loss, trained, config.optim, total_updates(config), mesh=mesh,
                           dtype=model_config.dtype, alpha=config.lora.alpha,
                           factor=lambda name: float(name != states.HEAD), seed=(config.seed, 2))


def open_critic(config: ConfigDict, model_config: DecoderConfig, params: dict, mesh: Mesh, total_updates: int,
                warm: dict | None = None) -> tuple[states.TrainState, Callable]:
  """Returns (state, compiled step) of a critic: {'decoder', 'head'}, or the policy with its head.

  Args:
    params: of the policy (or of the base of its adapter), on `mesh`; they are copied.
    warm: the parameters of a critic that was warmed up, to start from in place of `params`.
  """
  # A warm start may have another dtype, what is frozen under an adapter has that of computing.
  dtype = jnp.dtype('float32' if config.optim.master_weights else config.dtype)
  params = states.cast(warm or params, dtype)
  if not warm and is_shared(config):
    size, key = model_config.hidden_size, jax.random.fold_in(jax.random.key(config.seed), 1)
    placed = meshes.shardings(value_head.MLP_AXES, value_head.mlp_shapes(size), mesh)
    create = jax.jit(lambda key: value_head.initial_mlp(size, key, dtype), out_shardings=placed)
    params = params | {states.HEAD: create(key)}
  elif not warm:
    head = value_head.initial_head(model_config.hidden_size, params['embedding'].dtype)
    placed, _ = saved_policies.critic_layout(model_config, mesh)
    params = {'decoder': params, 'head': jax.device_put(head, placed['head'])}
  optimizer, train_step = make_critic_update(config, model_config, params, mesh, total_updates)
  return states.create_state(params, optimizer, mesh), train_step


def make_critic_update(config: ConfigDict, model_config: DecoderConfig, params: dict, mesh: Mesh,
                       total_updates: int) -> tuple[GradientTransformation, Callable]:
  """Returns (optimizer, compiled step) of a critic with these parameters, arrays or ShapeDtypeStructs."""
  settings = config.critic
  rates = {name: settings[name] for name in ('learning_rate', 'lr_warmup_updates', 'weight_decay')}
  backbone = 1.0 if settings.backbone_rate is None else settings.backbone_rate / settings.learning_rate
  kind = dict(coef=2 * settings.coef) if settings.shared else dict(value_clip=settings.value_clip)
  loss_fn = functools.partial(
    steps.critic_loss, config=model_config, frozen=not backbone, shared=settings.shared, **kind)
  factors = {states.HEAD: 1.0, 'head': 1.0} | dict.fromkeys(FROZEN, 0.0)
  return steps.make_update(
    loss_fn, params, ConfigDict(dict(config.optim) | rates), total_updates, mesh=mesh,
    dtype=model_config.dtype, factor=lambda name: factors.get(name, backbone), seed=(config.seed, 3))


def is_shared(config: ConfigDict) -> bool:
  """Tells whether the critic is on the backbone of the policy."""
  return config.critic.enabled and config.critic.shared


def importance_cap(config: ConfigDict) -> float:
  """Returns the cap of `losses.importance_weights` between sampler and trainer; 0 is off."""
  if config.loss.importance_cap is not None:
    return config.loss.importance_cap
  apart = (config.dtype == 'bfloat16' or config.train.async_steps or config.train.carry
           or config.sampler.weights != 'same' or config.sampler.engine != 'jax'
           or config.loss.importance != 'token')
  return 2.0 if apart and config.train.old_logprobs != 'sampler' else 0.0


def recomputes(config: ConfigDict) -> bool:
  """Tells whether the ratio is to the trainer's own log-probabilities, and not to the sampler's."""
  return config.train.old_logprobs == 'recompute' or bool(importance_cap(config))


def score_passes(config: ConfigDict) -> int:
  """Counts the passes of `score` over a batch: for the reference, and for the ratios of several updates."""
  one_update = config.train.epochs == 1 and not config.train.mini_batch
  return bool(config.loss.kl_coef) + (recomputes(config) and not one_update)


def total_updates(config: ConfigDict) -> int:
  """Counts the updates of a whole run in which every tree, or as many as are selected, is trained on."""
  trees = config.questions_per_step * config.group_size
  if config.credit.get('strategy', 'full') != 'full':
    trees = min(config.credit.keep, trees)
  return config.steps * config.train.epochs * -(-trees // (config.train.mini_batch or trees))


def releases(config: ConfigDict, platform: str) -> bool:
  """Tells whether the sampler's weights and cache are freed while the step trains."""
  release = config.sampler.release
  return not config.train.async_steps and (platform != 'cpu' if release is None else release)
