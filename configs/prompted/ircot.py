"""IRCoT on the embedded world; presets: see direct.py.

    jaxsearch eval --config configs/prompted/ircot.py

The paper tunes the passages of a search among 2, 4, 6 and 8. FlashRAG makes five rounds, keeps every passage and has no reader.
"""

from configs.prompted.direct import prompted


def get_config(preset: str = ''):
  return prompted(
    'ircot', preset, max_thoughts=8, max_documents=15, reader=True, document_tokens=512,
    paper={'search.topk': 4},
    flashrag={'search.topk': 5, 'grow.max_thoughts': 5, 'grow.max_documents': 30, 'grow.reader': False,
              'grow.max_tokens': 32})
