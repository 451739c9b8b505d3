"""Makes the files of the embedded world: corpus, questions, tokenizer, notice. Needs the extra `world`."""

import gzip
import io
import json
import os
import random
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxsearch.data.corpus import Document, join_contents
from jaxsearch.data.questions import Question
from jaxsearch.files import write_whole
from jaxsearch.world import chains, files as world
from recipes.world import choose
from recipes.world.gather import gather

VOCABULARY = 4096
SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
NAMES = ('think', 'search', 'information', 'answer', 'observation', 'original_evidence', 'context', 'python')
TAGS = tuple(f'<{slash}{name}>' for name in NAMES for slash in ('', '/'))
# Qwen2.5's pattern: a word takes the space before it, every digit stands alone
PATTERN = (r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"""
           r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")


def build(out: str | os.PathLike, seed: int = 0, *, cities: int = 4000,
          sizes: dict[str, int] | None = None) -> None:
  """Writes all files of the world to the folder `out`, the same bytes for the same seed and package versions.

  Raises ImportError, naming the extra to install, if the packages with the facts are absent.
  """
  out = Path(out)
  entities = gather(cities)
  documents = [Document(entity.id, entity.title, entity.text) for entity in entities if entity.text]
  questions = choose.questions(entities, seed, sizes)
  out.mkdir(parents=True, exist_ok=True)
  passages = ({'id': d.id, 'contents': join_contents(d.title, d.text)} for d in documents)
  _write_lines(out / 'corpus.jsonl.gz', passages)
  for split, items in questions.items():
    _write_lines(out / f'questions_{split}.jsonl.gz', map(vars, items))
  save_tokenizer(train_tokenizer(_tokenizer_texts(documents, questions['warm'], seed)), out)
  shutil.copyfile(world.folder() / 'NOTICE', out / 'NOTICE')  # whose facts they are


def _write_lines(path: Path, records: Iterable[dict]) -> None:
  text = ''.join(json.dumps(record, ensure_ascii=False, separators=(',', ':')) + '\n' for record in records)
  packed = io.BytesIO()
  with gzip.GzipFile('', 'wb', 9, packed, mtime=0) as file:
    file.write(text.encode())
  write_whole(path, packed.getvalue())


def train_tokenizer(texts: Sequence[str]):
  """A byte-level BPE `tokenizers.Tokenizer`: lossless, a token a digit, a token a tag."""
  from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  words = pre_tokenizers.Split(Regex(PATTERN), 'isolated')
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  size = VOCABULARY - len(SPECIAL) - len(TAGS)
  trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
  tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
  return tokenizer


def _tokenizer_texts(documents: Sequence[Document], questions: Sequence[Question], seed: int) -> list[str]:
  """Returns what the tokenizer learns from: the corpus and chains without observations, tags left out."""
  texts = [f'(Title: {document.title}) {document.text}' for document in documents]
  tags = re.compile('|'.join(map(re.escape, TAGS)))
  for question in random.Random(f'tokenizer {seed}').sample(questions, min(4000, len(questions))):
    texts.append('Question: ' + question.question)
    for role, text in chains.full_chain(question):
      texts += filter(str.strip, tags.split(text)) if role == 'policy' else ()
  return texts


def save_tokenizer(tokenizer, folder: Path) -> None:
  """Writes tokenizer.json and what `transformers.AutoTokenizer.from_pretrained(folder)` reads beside it."""
  write_whole(folder / 'tokenizer.json', tokenizer.to_str(pretty=False))
  end, others = SPECIAL[0], SPECIAL[1:]
  special = {'eos_token': end, 'pad_token': end, 'additional_special_tokens': others}
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': None, 'eos_token': end,
              'pad_token': end, 'unk_token': None, 'additional_special_tokens': others,
              'clean_up_tokenization_spaces': False, 'add_prefix_space': False, 'model_max_length': 32768}
  for name, content in (('tokenizer_config.json', settings), ('special_tokens_map.json', special)):
    write_whole(folder / name, json.dumps(content, indent=2) + '\n')
