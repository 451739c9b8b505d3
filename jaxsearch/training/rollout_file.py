"""The rollouts of a run: DIR/rollouts.jsonl.gz, which `jaxsearch view` shows.

A JSON line for each tree, see `record`; a gzip member for each question of a step. A member that is cut short
is ignored, so the file may be read while the run writes it and after the run was killed. `zcat` reads it.
"""

import codecs
import json
import math
import numbers
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsearch.data.jsonl import DataError, check_unpacked
from jaxsearch.files import naming, no_link
from jaxsearch.sampler.requests import Request
from jaxsearch.trees.tree import Node, Role, Tree, spans

FILE = 'rollouts.jsonl.gz'
# Of a node, per token.
SIGNALS = ('sampler_logprobs', 'old_logprobs', 'ref_logprobs', 'advantages', 'values', 'returns')
_GZIP = 31  # zlib's name of the format


def note_call(tree: Tree, request: Request | None, reply: Any) -> None:
  """Adds what was asked to `data['calls']` of its span, by default the last: the observer of a rollout."""
  if request is not None and not isinstance(reply, Node):
    last = lambda: next((node for node in reversed(tree.nodes(Role.POLICY)) if node.tokens), None)
    if node := request.node or last():
      node.data.setdefault('calls', []).append(request.describe(reply))


def sample(groups: Sequence[Sequence[Tree]], number: int) -> list[Sequence[Tree]]:
  """Selects the groups of `number` questions (-1: all), by hash: where questions come again, the same."""
  by_hash = lambda group: zlib.crc32(group[0].question.id.encode())
  return sorted(filter(None, groups), key=by_hash)[:None if number < 0 else number]


def record(tree: Tree, step: int) -> dict[str, Any]:
  """Describes a tree: its question, outcome and spans, see `trees.tree.spans`.

  Spans also have `ids`; `lengths`, how many UTF-16 units of `text` each token stands for (not with a
  tokenizer whose tokens are no bytes); `trained`, whether they bear a loss; `stop`; `calls`; `notes`, the
  numbers in `node.data`; and of `SIGNALS` those that they have: a number for each token, or one advantage
  for all.
  """
  nodes, shown = [node for node in tree.walk() if node.tokens], spans(tree)
  try:
    pieces = tree.tokenizer.pieces()
  except (AttributeError, ValueError):
    pieces = None
  for span, node in zip(shown, nodes, strict=True):
    for shorter in ('value', 'advantage', 'tokens', 'said'):  # of `SIGNALS`, `ids` and `text`
      span.pop(shorter, None)
    span |= {'ids': node.tokens, 'trained': node.trained}
    span |= {'lengths': _lengths(node.tokens, pieces)} if pieces else {}
    span |= {'stop': node.stop} if node.stop else {}
    span |= {'calls': node.data['calls']} if 'calls' in node.data else {}
    notes = {name: _rounded(note) for name, note in node.data.items()
             if isinstance(note, numbers.Real) and name not in span}
    span |= {'notes': notes} if notes else {}
    span |= {name: _rounded(value) for name in SIGNALS if (value := getattr(node, name, None)) is not None}
  question = tree.question
  return {'step': step, 'id': question.id, 'source': question.metadata.get('source', ''),
          'question': question.question, 'golden_answers': list(question.golden_answers),
          'prediction': tree.answer, 'em': question.score(tree.answer),
          'reward': None if tree.reward is None else _rounded(tree.reward), 'stop': tree.stop,
          'searches': tree.metrics['searches'],
          'tokens': sum(len(node.tokens) for node in nodes if node.sampler_logprobs),
          'metrics': {name: _rounded(value) for name, value in tree.metrics.items()}, 'spans': shown}


def _lengths(ids: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
  decoder = codecs.getincrementaldecoder('utf-8')('replace')
  texts = [decoder.decode(pieces[token] if token < len(pieces) else b'', final=place == len(ids) - 1)
           for place, token in enumerate(ids)]
  return [len(text) + sum(letter > '\uffff' for letter in text) for text in texts]


def _rounded(value: Any) -> Any:
  """Rounds numbers to four digits after the point; None for what is not finite, as JSON has none."""
  if isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value):
    return [_rounded(number) for number in np.asarray(value).tolist()]
  if isinstance(value, str):
    return value
  value = float(value)
  return (int(value) if value.is_integer() else round(value, 4)) if math.isfinite(value) else None


def pack(records: Sequence[Mapping[str, Any]]) -> bytes:
  """Packs records into a gzip member, a line for each; the same bytes whenever it is made."""
  text = ''.join(json.dumps(record, ensure_ascii=False, separators=(',', ':')) + '\n' for record in records)
  packer = zlib.compressobj(wbits=_GZIP)
  return packer.compress(text.encode(errors='replace')) + packer.flush()


def append(folder: str | os.PathLike, step: int, groups: Sequence[Sequence[Tree]]) -> None:
  """Appends the trees of these questions; an OSError names the file."""
  path = pathlib.Path(folder) / FILE
  with naming(path), open(path, 'ab', opener=no_link) as file:
    file.write(b''.join(pack([record(tree, step) for tree in group]) for group in groups))


def members(path: str | os.PathLike) -> Iterator[tuple[int, int, list[dict]]]:
  """Yields (first byte, end, records) of every whole member, if there is such a file; stops at what is none.

  Raises DataError as `check_unpacked` does.
  """
  if not os.path.exists(path):
    return
  with open(path, 'rb') as file:
    start, size, packed = 0, 0, os.fstat(file.fileno()).st_size
    while True:
      unpacker, lines = zlib.decompressobj(wbits=_GZIP), []
      try:
        while not unpacker.eof and (data := unpacker.unconsumed_tail or file.read(1 << 16)):
          lines.append(unpacker.decompress(data, 1 << 20))
          size += len(lines[-1])
          check_unpacked(path, packed, size)
        if not unpacker.eof:
          return
        records = [json.loads(line) for line in b''.join(lines).splitlines()]
      except DataError:
        raise
      except (zlib.error, ValueError, RecursionError):
        return
      end = file.tell() - len(unpacker.unused_data)
      yield start, end, records
      start = file.seek(end)


def keep_steps(folder: str | os.PathLike, last_step: int) -> None:
  """Drops rollouts of steps after `last_step`, all of them if that is 0, and an end that was cut short."""
  path, kept = pathlib.Path(folder) / FILE, 0
  for _, end, records in members(path) if last_step else ():
    if records and records[0]['step'] > last_step:
      break
    kept = end
  if path.exists():
    with naming(path), open(path, 'rb+', opener=no_link) as file:
      file.truncate(kept)
