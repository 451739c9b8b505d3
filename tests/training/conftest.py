"""A random decoder, random forests and an optimizer small enough for every test of a step; and a tiny run."""

import functools
import sys
import types

import jax
import ml_collections
import numpy as np
import pytest

from jaxsearch.models.architecture import DecoderConfig, initial_params, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import state as states, step as steps
from jaxsearch.trees.tree import Role, Tree
from tests.training import child

VOCAB = 64

HYPER = dict(temperature=1.0, chunk=16, clip_low=0.2, clip_high=0.2, dual_clip=None, kl_coef=0.0,
             entropy_coef=0.0)
# Sizes that eight devices divide in some dimensions and not in others (2 key/value heads, width 24).
DECODER = DecoderConfig(vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=4,
                        num_kv_heads=2, head_dim=8, qkv_bias=True, tie_embeddings=True)


def optim_config(**changes):
  fields = dict(learning_rate=1e-2, schedule='constant', lr_warmup_updates=0, b1=0.9, b2=0.99, eps=1e-8,
                weight_decay=0.0, clip_norm=1.0)
  return ml_collections.ConfigDict(fields | changes)


def random_forest(seed, trees=6, *, advantages=None, branch=False):
  """Chains prompt, policy, observation, policy of ragged lengths, with random log-probabilities and advantages."""
  rng = np.random.default_rng(seed)
  ids = lambda size: rng.integers(1, VOCAB, size).tolist()
  forest = []
  for index in range(trees):
    tree = Tree(tokenizer=None)
    node = tree.root.append(ids(rng.integers(2, 5)), Role.PROMPT)
    for turn in range(2):
      tokens = ids(rng.integers(2, 7))
      parent = node
      for _ in range(2 if branch and turn else 1):
        node = parent.append(tokens, Role.POLICY, sampler_logprobs=rng.normal(-3, 0.3, len(tokens)))
        node.advantages = float(rng.normal()) if advantages is None else advantages[index]
        tokens = ids(len(tokens))
      if turn == 0:
        node = node.append(ids(rng.integers(2, 6)), Role.OBSERVATION)
    forest.append(tree)
  return forest


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_params(decoder, seed):
  return initial_params(decoder, jax.random.key(seed))


def setup(*, decoder=DECODER, mesh=None, hyper=HYPER, loss_fn=None, seed=0, **optim):
  """(state, train_step, params, mesh) for a random model on `mesh` (one device by default)."""
  mesh = mesh or meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  shardings = meshes.shardings(parameter_axes(decoder), parameter_shapes(decoder), mesh)
  params = jax.device_get(random_params(decoder, seed))
  optim = optim_config(**optim)
  if loss_fn is None:
    loss_fn = lambda params, batch: steps.policy_loss(params, batch, config=decoder, **hyper)
  placed = states.place_params(params, shardings)
  optimizer, train_step = steps.make_update(loss_fn, placed, optim, 100, mesh=mesh, dtype=decoder.dtype)
  state = states.create_state(placed, optimizer, mesh)
  return types.SimpleNamespace(
    state=state, train_step=train_step, params=params, mesh=mesh, optimizer=optimizer)


@pytest.fixture
def config(tmp_path, monkeypatch):
  """A run of child.py in tmp_path/run with one update a step, on all devices."""
  child.make_inputs(tmp_path)
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  config = child.get_config(tmp_path, str(tmp_path / 'run'))
  config.mesh.fsdp = 8
  config.train.update(micro_rows=8, mini_batch=0, epochs=1)
  return config


@pytest.fixture
def tiny():
  """The functions and sizes of this file."""
  return types.SimpleNamespace(decoder=DECODER, hyper=HYPER, vocab=VOCAB, random_forest=random_forest,
                               setup=setup, random_params=random_params, optim_config=optim_config)
