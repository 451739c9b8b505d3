"""Search-o1 on the embedded world; presets: see direct.py.

    jaxsearch eval --config configs/prompted/search_o1.py

FlashRAG has no Search-o1; the preset is its nearest pipeline (SimpleDeepSearcher), which shows documents as they are.
"""

from configs.prompted.direct import prompted


def get_config(preset: str = ''):
  return prompted(
    'search_o1', preset, max_searches=10, max_turns=15, extract=True, extract_tokens=64, reasoning_tokens=256,
    paper={'search.topk': 10, 'grow.max_tokens': 1024, 'grow.extract_tokens': 512, 'grow.reasoning_tokens': 1024},
    flashrag={'search.topk': 5, 'grow.extract': False, 'grow.max_tokens': 1024, 'grow.max_turns': 10})
