"""Parameter counts as published (model cards, or safetensors metadata of the checkpoints)."""

import math

import jax

from jaxsearch.models.architecture import PRESETS, parameter_shapes, preset

PUBLISHED = {
  'smollm2-135m': 134_515_008,
  'llama3.2-1b': 1_235_814_400, 'llama3.2-3b': 3_212_749_824, 'llama3.1-8b': 8_030_261_248,
  'qwen2.5-0.5b': 494_032_768, 'qwen2.5-1.5b': 1_543_714_304, 'qwen2.5-3b': 3_085_938_688,
  'qwen2.5-7b': 7_615_616_512, 'qwen2.5-14b': 14_770_033_664, 'qwen2.5-32b': 32_763_876_352,
  'qwen3-0.6b': 596_049_920, 'qwen3-1.7b': 1_720_574_976, 'qwen3-4b': 4_022_468_096, 'qwen3-8b': 8_190_735_360,
}  # fmt: skip


def test_parameter_counts():
  assert PRESETS.keys() - PUBLISHED.keys() == {'world-tiny', 'world-reader'}
  for name, count in PUBLISHED.items():
    shapes = jax.tree.leaves(parameter_shapes(preset(name)), is_leaf=lambda shape: isinstance(shape, tuple))
    assert sum(map(math.prod, shapes)) == count, name
