"""Both directions of config.json. That the numbers mean the same to transformers is tested in test_hub.py."""

import json

import pytest

from jaxsearch.models import families
from jaxsearch.models.architecture import PRESETS, DecoderConfig, RopeScaling

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
BASE = dict(
  model_type='llama', vocab_size=10, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip


@pytest.fixture
def read(tmp_path):
  """(**changes to BASE, None removes a key) -> DecoderConfig."""
  def read(**changes):
    config = {key: value for key, value in (BASE | changes).items() if value is not None}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    return families.from_hugging_face(tmp_path / 'config.json')

  return read


@pytest.mark.parametrize('name', PRESETS)
def test_round_trip_of_every_preset(name, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(families.to_hugging_face(PRESETS[name], 'bfloat16')))
  assert families.from_hugging_face(tmp_path / 'config.json') == PRESETS[name]


def test_defaults(read):
  assert read() == DecoderConfig(
    vocab_size=10, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=1e4, max_position=128)
  assert read(num_key_value_heads=None).num_kv_heads == 4
  assert read(model_type='qwen3').head_dim == 128
  assert read(model_type='qwen2').qkv_bias and read(model_type='qwen3').qk_norm


@pytest.mark.parametrize('rope', [
  dict(rope_theta=5e5, rope_scaling=LLAMA3 | dict(rope_type='llama3')),
  dict(rope_theta=5e5, rope_scaling=LLAMA3 | dict(type='llama3')),
  dict(rope_parameters=LLAMA3 | dict(rope_type='llama3', rope_theta=5e5)),
  dict(rope_parameters=LLAMA3 | dict(rope_type='llama3', rope_theta=5e5), rope_theta=1.0),
])
def test_older_and_newer_rope_keys(rope, read):
  config = read(**rope)
  assert config.rope_theta == 5e5
  assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize('changes, words', [
  (dict(model_type='mistral'), "model_type 'mistral' is not supported"),
  (dict(model_type=None), 'model_type None is not supported'),
  (dict(partial_rotary_factor=0.5), r'partial_rotary_factor=0\.5'),
  (dict(rope_parameters=dict(partial_rotary_factor=0.5)), r'partial_rotary_factor=0\.5'),
  (dict(hidden_size=None), 'the key hidden_size is missing'),
  (dict(max_position_embeddings=None), 'the key max_position_embeddings is missing'),
  (dict(hidden_act='gelu'), "hidden_act='gelu'"),
  (dict(layer_types=['full_attention', 'sliding_attention']), 'layer_types'),
  (dict(model_type='qwen2', use_sliding_window=True, sliding_window=64, max_window_layers=2), 'use_sliding_window'),
  (dict(rope_parameters=dict(rope_type='default', rope_theta=1e6), rope_scaling=dict(type='yarn', factor=4.0)),
   'rope_parameters and rope_scaling differ'),
  (dict(rope_scaling=dict(type='yarn', factor=4.0)), r"rope_scaling\.rope_type 'yarn'"),
  (dict(rope_parameters=dict(rope_type='dynamic')), r"rope_parameters\.rope_type 'dynamic'"),
])
def test_what_is_not_computed_is_refused_by_name(changes, words, read):
  with pytest.raises(ValueError, match=rf'config\.json: .*{words}'):
    read(**changes)


def test_a_window_that_no_layer_uses_is_fine(read):
  assert read(model_type='qwen2', use_sliding_window=True, sliding_window=64, max_window_layers=4).num_layers == 4
  assert read(model_type='qwen2', use_sliding_window=False, sliding_window=64, max_window_layers=2).num_layers == 4


def test_a_combination_without_a_family():
  config = DecoderConfig(10, 32, 48, 4, 4, 2, 8, qkv_bias=True, qk_norm=True)
  with pytest.raises(ValueError, match='qkv_bias and qk_norm at once'):
    families.to_hugging_face(config, 'float32')
