"""Stop strings over tokens: which tokens may complete one (a flag per vocabulary entry), and whether one did.

The device pauses a row at any flagged token; the host then looks at the bytes of the span (`found`). A flag is set
where the stop string can end inside the token: the token's bytes up to there are the tail of the stop string, or the
token contains all of it.
"""

from collections.abc import Sequence

import numpy as np


def flags(pieces: Sequence[bytes], stops: Sequence[str]) -> np.ndarray:
  """[len(pieces)] bool: tokens in which one of `stops` can be completed."""
  encoded = [stop.encode() for stop in stops]
  return np.array([any(_can_complete(piece, stop) for stop in encoded) for piece in pieces], bool)


def _can_complete(piece: bytes, stop: bytes) -> bool:
  end = piece.find(stop[-1:]) + 1
  while end:
    size = min(end, len(stop))
    if piece[end - size:end] == stop[-size:]:
      return True
    end = piece.find(stop[-1:], end) + 1
  return False


def found(pieces: Sequence[bytes], tokens: Sequence[int], stops: Sequence[str]) -> str | None:
  """The stop string that ends in the last of `tokens` and lies within them, the one that ends first if several do."""
  if not stops or not tokens:
    return None
  text = b''.join(pieces[token] for token in tokens)
  before = len(text) - len(pieces[tokens[-1]])
  ends = {}
  for stop in stops:
    encoded = stop.encode()
    start = text.find(encoded, max(0, before - len(encoded) + 1))
    if start >= 0:
      ends[stop] = start + len(encoded)
  return min(ends, key=ends.get, default=None)
