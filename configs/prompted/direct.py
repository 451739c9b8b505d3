"""Direct inference on the embedded world: answers from memory.

    jaxsearch eval --config configs/prompted/direct.py

The configs of this folder take a preset: `direct.py:paper` has the settings of the paper, `direct.py:flashrag` those of FlashRAG.
Without one they are sized for the shipped policy, which knows short contexts only. Instruct models want more than a preset:

    jaxsearch eval --config configs/smollm2.py:prompted.direct --config.model=HF_FOLDER_OR_GGUF --config.folder=DATA
"""

from collections.abc import Mapping

import ml_collections
from ml_collections import config_dict

from configs import base


def get_config(preset: str = ''):
  return prompted('direct', preset, paper={'grow.max_tokens': 64}, flashrag={'grow.max_tokens': 32})


def prompted(method: str, preset: str, *, paper: Mapping, flashrag: Mapping, **grow) -> ml_collections.ConfigDict:
  """The config of a prompted baseline: settings of its `grow` for the world, then those of a preset, by name of the field."""
  presets = {'': {}, 'paper': paper, 'flashrag': flashrag}
  if preset not in presets:
    raise ValueError(f'there is no preset {preset!r}: leave it out, or take paper or flashrag')
  config = base.get_config().unlock()
  config.method = f'prompted.{method}'
  config.out = f'runs/{method}'
  config.search.topk = 1  # of several documents the shipped policy often reads the wrong one
  config.sampler.length = config.train.row_length = 1024
  config.grow = config_dict.create(
    prompts='world',                 # '' for instruct models, or a folder of yours, see trees/templates.py
    chat=False, max_tokens=64, **grow)  # see the method's file
  config.credit = config_dict.create()
  config.update_from_flattened_dict(presets[preset])
  return config.lock()
