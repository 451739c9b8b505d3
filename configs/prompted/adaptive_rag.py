"""Adaptive-RAG on the embedded world; presets: see direct.py.

    jaxsearch eval --config configs/prompted/adaptive_rag.py

The policy classifies the questions itself. With a model that was trained for it, one that writes A, B or C:
--config.grow.classifier=model --config.classifier.model=HF_FOLDER.
"""

from ml_collections import config_dict

from configs.prompted.direct import prompted


def get_config(preset: str = ''):
  config = prompted(
    'adaptive_rag', preset, classifier='policy', max_thoughts=8, max_documents=15, reader=True, document_tokens=512,
    paper={'search.topk': 4},
    flashrag={'search.topk': 5, 'grow.max_thoughts': 5, 'grow.max_documents': 30, 'grow.reader': False,
              'grow.max_tokens': 32})
  with config.unlocked():
    config.classifier = config_dict.create(model='', chat=False, slots=16, length=512, max_tokens=4, stop=())
  return config
