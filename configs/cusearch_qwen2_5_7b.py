"""CuSearch with Qwen2.5-7B, for a pod: all else as in configs/cusearch_qwen2_5_3b.py. Not run by us at this size."""

from configs import cusearch_qwen2_5_3b


def get_config():
  config = cusearch_qwen2_5_3b.get_config()
  config.model = 'Qwen2.5-7B'
  config.out = 'runs/cusearch_qwen2_5_7b'
  return config
