"""Stop strings over tokens: an automaton that reads a token a step and ends where one has really ended.

Aho–Corasick over bytes, carried from bytes to tokens: `automaton` runs the bytes of every piece of the
vocabulary from every state and keeps where they lead. So the device needs one lookup a token, and a stop
string may lie across tokens or end in the middle of one. A span starts in the first state, so that what stood
before it does not count.

A stop rule of another kind is a tuple of names with a method `automaton(pieces, ends)` that returns such a
table: give it to `Generate` as `stop`, and `node.stop` is the name that it ended by. Only our engine has it.
"""

import collections
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
  order = np.argsort(-sizes, kind='stable')  # the longest first: those with another byte come first
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
  # Of the nodes of a trie: next nodes by byte, and the first listed stop string that ends here.
  children, ended = [{}], [None]
  for number, stop in enumerate(stops):
    node = 0
    for byte in stop:
      if byte not in children[node]:
        children[node][byte] = len(children)
        children.append({})
        ended.append(None)
      node = children[node][byte]
    ended[node] = number if ended[node] is None else ended[node]
  goto, queue = np.zeros((len(children), 256), np.int16), collections.deque([(0, 0)])
  while queue:  # breadth first, each node with the longest other one that ends alike
    node, alike = queue.popleft()
    ended[node] = min((number for number in (ended[node], ended[alike]) if number is not None), default=None)
    if node:
      goto[node] = goto[alike]
    for byte, child in children[node].items():
      queue.append((child, int(goto[alike, byte]) if node else 0))
      goto[node, byte] = child
  kept = [node for node, number in enumerate(ended) if number is None]
  states = [kept.index(node) if number is None else len(kept) + number for node, number in enumerate(ended)]
  stay = np.arange(len(kept), len(kept) + len(stops), dtype=np.int16)
  return np.concatenate([np.array(states, np.int16)[goto[kept]], np.repeat(stay[:, None], 256, axis=1)])
