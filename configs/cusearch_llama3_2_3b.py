"""CuSearch with Llama-3.2-3B, for a pod: all else as in configs/cusearch_qwen2_5_3b.py.

The base model has no chat template. Not run by us at this size."""

from configs import cusearch_qwen2_5_3b


def get_config():
  config = cusearch_qwen2_5_3b.get_config()
  config.model = 'Llama-3.2-3B'
  config.out = 'runs/cusearch_llama3_2_3b'
  config.grow.chat = False
  return config
