"""CoT + tools, optional, on the embedded world; presets: see direct.py.

    jaxsearch eval --config configs/prompted/cot_tools.py                              # tools are the model's choice
    jaxsearch eval --config configs/prompted/cot_tools.py --config.grow.always=True    # tools on every question

The paper is CARL's. FlashRAG has no tools but search; the preset is its number of passages.
"""

from configs.prompted.direct import prompted


def get_config(preset: str = ''):
  config = prompted(
    'cot_tools', preset, always=False, max_turns=7, forget=True,
    paper={'search.topk': 3, 'grow.max_tokens': 512, 'grow.forget': False},
    flashrag={'search.topk': 5, 'grow.max_tokens': 512, 'grow.forget': False})
  config.model = 'world-carl'  # which knows what a program looks like
  config.eval.right = 'em_entity'
  return config
