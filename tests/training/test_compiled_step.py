"""Reads off the compiled training step what it computes and sends, on simulated devices or for GPUs."""

import dataclasses

import jax
import pytest

from configs import search_r1_grpo_qwen2_5_3b
from jaxsearch import setup
from jaxsearch.models.architecture import DecoderConfig, preset
from jaxsearch.parallel import mesh as meshes
from jaxsearch.parallel.compiled import collectives
from jaxsearch.planning import programs
from tests.parallel.compilers import devices_of

# The proportions of Qwen2.5-3B at 1/32 of its width, with a number of layers that no other loop has.
LAYERS = 7
SMALL = DecoderConfig(vocab_size=37 * 128, hidden_size=64, intermediate_size=344, num_layers=LAYERS, num_heads=4, num_kv_heads=2,
                      head_dim=16, qkv_bias=True, tie_embeddings=True)


def compiled(config, model_config, mesh):
  """The training step of a config on `mesh`, for four micro-batches in which every token is trained."""
  config.mesh.update(mesh.shape)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(setup, 'architecture', lambda config: dataclasses.replace(
      model_config, dtype=config.dtype, remat=config.remat))
    return programs.of_config(config, list(mesh.devices.flat)).programs['update'].lower().compile()


def pod_config(**train):
  config = search_r1_grpo_qwen2_5_3b.get_config().unlock()
  config.train.update(train)
  return config


def check_traffic(text, model_config):
  """The vocabulary sends less than four layers, and nothing of its size in a loop."""
  found = collectives(text)
  layers = [one for one in found if one.times == model_config.num_layers]
  others = [one for one in found if one.times != model_config.num_layers and one.bytes > 64]
  assert sum(one.kind == 'all-gather' for one in layers) >= 2
  layer, rest = (sum(one.bytes * one.times for one in part) for part in (layers, others))
  assert rest < 4 * layer / model_config.num_layers
  table = 2 * model_config.vocab_size * model_config.hidden_size
  assert max(one.bytes for one in others if one.times > 1) < table / 8
  return rest


def test_the_vocabulary_sends_less_than_four_layers_and_nothing_large_in_a_loop():
  config = pod_config(micro_rows=8, row_length=128, chunk=32)
  check_traffic(compiled(config, SMALL, meshes.make_mesh(2, 2, 2)).as_text(), SMALL)


@pytest.mark.slow
def test_search_r1_on_16_h100():
  model_config, devices = preset('qwen2.5-3b'), devices_of('cuda:h100:1x16')
  program = compiled(pod_config(), model_config, meshes.make_mesh(1, 16, 1, devices=devices))
  assert check_traffic(program.as_text(), model_config) < 1.2e9
  assert program.memory_analysis().temp_size_in_bytes < 5 * 2**30


def flops_of_a_micro_batch(rank):
  """Operations of loss and gradient: of all parameters, or of an adapter with this rank (0: none)."""
  config = pod_config(micro_rows=1, row_length=256, chunk=256)
  config.dtype, config.remat, config.optim.master_weights = 'float32', 'none', True
  config.lora.rank = rank
  model_config = dataclasses.replace(SMALL, hidden_size=512, intermediate_size=1376, head_dim=128, num_layers=2)
  return compiled(config, model_config, meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])).cost_analysis()['flops']


def test_an_adapter_costs_no_gradient_of_a_matrix():
  full, adapter = (flops_of_a_micro_batch(rank) for rank in (0, 4))
  assert 0.6 * full < adapter < 0.72 * full
