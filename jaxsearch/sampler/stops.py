"""Stop strings over tokens: an automaton that reads a token a step and ends where one has really ended.

Aho–Corasick over bytes, carried from bytes to tokens: `automaton` runs the bytes of every piece of the
vocabulary from every state and keeps where they lead. So the device needs one lookup a token, and a stop
string may lie across tokens or end in the middle of one. A span starts in the first state, so that what stood
before it does not count.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

ENDED = -1  # in place of a state: an end token. -2 - i: the stop string number i


def automaton(pieces: Sequence[bytes], stops: Sequence[str], ends: Iterable[int] = ()) -> np.ndarray:
  """Returns the states that follow, [states, len(pieces)] int16; a span begins in state 0.

  Where several stop strings end in one token, the one that ends first counts, of those that end together the
  first listed.

  Args:
    pieces: the bytes of every token.
    stops: stop strings, not empty.
    ends: tokens that end a span in any state (`ENDED`).
  """
  steps = _bytewise([stop.encode() for stop in stops])
  count = len(steps) - len(stops)
  sizes = np.array([len(piece) for piece in pieces])
  order = np.argsort(-sizes, kind='stable')  # longest first: those with a byte at `place` come first
  letters, starts = np.frombuffer(b''.join(pieces), np.uint8), (np.cumsum(sizes) - sizes)[order]
  having = len(sizes) - np.searchsorted(np.sort(sizes), np.arange(sizes.max(initial=0)), side='right')
  reached = np.repeat(np.arange(count, dtype=np.int16)[:, None], len(sizes), axis=1)
  for place, longer in enumerate(having):
    reached[:, :longer] = steps[reached[:, :longer], letters[starts[:longer] + place]]
  table = np.empty_like(reached)
  table[:, order] = np.where(reached < count, reached, count - 2 - reached)
  table[:, list(ends)] = ENDED
  return table


def _bytewise(stops: Sequence[bytes]) -> np.ndarray:
  """Returns [states + len(stops), 256] int16, the state after a byte; the last ones, ended strings, stay."""
  texts = dict.fromkeys([b'', *(stop[:size] for stop in stops for size in range(len(stop)))])
  kept = [text for text in texts if not any(stop in text for stop in stops)]  # states: how stop strings begin
  after = np.zeros((len(kept) + len(stops), 256), np.int16)
  after[len(kept):] = np.arange(len(kept), len(after))[:, None]
  for (state, text), byte in itertools.product(enumerate(kept), set(b''.join(stops))):
    read = text + bytes([byte])
    ended = (len(kept) + number for number, stop in enumerate(stops) if read.endswith(stop))
    begun = (kept.index(read[at:]) for at in range(len(read) + 1) if read[at:] in kept)
    after[state, byte] = next(itertools.chain(ended, begun))
  return after
