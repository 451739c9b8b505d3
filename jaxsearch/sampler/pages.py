"""The host's record of the KV cache: which page holds which tokens of which path, who uses it, what goes
first.

Keys and values lie in pages of PAGE tokens, in one pool a lane. The pages of all paths are a tree: below a
page are those that follow it, so that paths which begin alike share whole pages. A page that is partly filled
is never shared but copied, since its owner goes on to write behind what is there. Pages that no path in a
slot uses stay until others need the room; those of episodes that have ended go first, then the oldest.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

PAGE = 32  # tokens
SIZE = 4 * PAGE  # bytes of them
SHORT = 16  # a common beginning of fewer tokens is computed again, and not waited for
SCRATCH = 0  # the page for what a program has to write but nobody wants


@dataclasses.dataclass(eq=False)
class Page:
  """Tokens of a path whose keys and values lie in page `number` of the pool, or are about to."""
  number: int
  tokens: bytes = b''
  owner: int = -1  # the episode that filled it
  parent: 'Page | None' = None
  children: dict[bytes, 'Page'] = dataclasses.field(default_factory=dict)  # by their tokens
  ordered: list[bytes] = dataclasses.field(default_factory=list)  # those in order: what begins alike is close
  ready: bool = False  # whether they are computed
  users: int = 0  # paths that are prefilled, scored or decoded

  def add(self, child: 'Page') -> None:
    self.children[child.tokens] = child
    bisect.insort(self.ordered, child.tokens)

  def drop(self, child: 'Page') -> None:
    del self.children[child.tokens], self.ordered[bisect.bisect_left(self.ordered, child.tokens)]


@dataclasses.dataclass(eq=False)
class Path:
  """A path whose tokens are to be cached, all but the last, which is a program's next input.

  `Pool.place` gives it pages. They hold its first `shared` tokens; the end of these only once `source`
  is copied.
  """
  tokens: np.ndarray
  most: int  # tokens that it may come to have
  owner: int  # its episode
  lane: int = 0
  pending: Any = None  # the request
  slot: Any = None  # of a span: what its first segment knows of it
  targets: Sequence[np.ndarray] = ()  # of a score: the tokens of its continuations
  numbers: np.ndarray | None = None  # of its pages
  pages: list[Page | None] | None = None  # the same in the tree of pages; None where one is not there
  shared: int = 0
  source: Page | None = None
  seat: int = -1  # among the slots, see device.py

  @property
  def context(self) -> np.ndarray:
    """Returns the tokens that are to be cached."""
    return self.tokens[:-1]


class Pool:
  """The pages of a lane, `count` with the scratch page; `evicted` are those taken from episodes under way."""

  def __init__(self, count: int):
    self.count, self.evicted = count, 0
    self.forget()

  def forget(self) -> None:
    """Drops all that is cached, as after a change of the parameters."""
    self.root = Page(SCRATCH)
    self.free: list[int] = []  # given back
    self.unused = SCRATCH + 1  # the first page that nobody has had yet
    self.used = 0  # pages with users
    self.idle: collections.OrderedDict[int, Page] = collections.OrderedDict()  # neither users nor children
    self.ends: dict[int, list[Page]] = {}  # of the paths of episodes under way

  def shared(self, tokens: np.ndarray) -> int:
    """Returns how many tokens of the beginning of a path are cached."""
    return self._longest(tokens)[2]

  def place(self, path: Path) -> bool:
    """Gives a path its pages; False where it has to wait: for room, or for a beginning that is computed now.

    Follow it with the copy of `source` and what is missing in the pages, then `filled`.
    """
    pages, source, shared = self._longest(path.context)
    coming, _, soon = self._longest(path.context, soon=True)
    # Wait for a whole page that another path fills now, however little it saves: no copy can join the tree.
    if soon - shared >= SHORT or len(coming) > len(pages):
      return False
    missing = -(-path.most // PAGE) - len(pages)
    kept = [page for page in (*pages, source) if page is not None]
    if self.used + missing + sum(not page.users for page in kept) >= self.count:
      return False
    for page in kept:
      self._use(page)
    path.numbers = np.array([*(page.number for page in pages), *self._take(missing)], np.int32)
    path.pages, path.shared, path.source = pages, shared, source
    self.ends.setdefault(path.owner, [])
    self._record(path, path.context)
    return True

  def filled(self, path: Path) -> None:
    """Notes that the context of a path is computed."""
    for page in filter(None, path.pages):
      page.ready = True
    if path.source is not None:
      self._leave(path.source)

  def leave(self, path: Path, tokens: np.ndarray) -> None:
    """Takes the pages of a path back, which hold `tokens` now; they stay for whoever goes on from there."""
    self._record(path, tokens, ready=True)
    for number, page in itertools.zip_longest(path.numbers.tolist(), path.pages):
      if page is None:
        self.used -= 1
        self.free.append(number)
      else:
        self._leave(page)
    if path.owner in self.ends:  # episodes of one seed share this number: another may have released it
      self.ends[path.owner] += [page for page in path.pages if page and page.number in self.idle]

  def release(self, owner: int) -> None:
    """Lets the pages of an episode that has ended, or has forgotten what they hold, go before all others."""
    for page in self.ends.pop(owner, ()):
      if self.idle.get(page.number) is page:
        self.idle.move_to_end(page.number, last=False)
      while page.owner == owner:
        page.owner, page = -1, page.parent

  def _longest(self, tokens: np.ndarray, soon: bool = False) -> tuple[list[Page], Page | None, int]:
    """Returns (whole pages that begin a path, the page to copy a part of, tokens in both).

    If `soon`, those too that are computed now.
    """
    page, pages, rest = self.root, [], tokens.tobytes()
    while (following := page.children.get(rest[:SIZE])) and (following.ready or soon):
      if len(following.tokens) < SIZE:
        break
      page, rest = following, rest[SIZE:]
      pages.append(page)
    size, source, rest = 0, None, rest[:SIZE]
    place = bisect.bisect(page.ordered, rest)
    for others in reversed(page.ordered[:place]), page.ordered[place:]:  # the nearest one shares the most
      child = next((child for child in map(page.children.get, others) if child.ready or soon), None)
      if child and (common := _common(child.tokens, rest)) > size:
        size, source = common, child
    shared = PAGE * len(pages) + size
    return (pages, source, shared) if shared >= SHORT else ([], None, 0)

  def _record(self, path: Path, tokens: np.ndarray, ready: bool = False) -> None:
    """Puts the pages that hold a path's tokens into the tree, where the same tokens are not there already."""
    whole, data = path.shared // PAGE, tokens.tobytes()
    parent = path.pages[whole - 1] if whole else self.root
    for place in range(whole, -(-len(data) // SIZE)):
      key = data[SIZE * place:SIZE * (place + 1)]
      page = path.pages[place] if place < len(path.pages) else None
      if page is None or len(page.tokens) < len(key):
        if page:
          page.parent.drop(page)
        else:
          page = Page(int(path.numbers[place]), owner=path.owner, ready=ready, users=1)
        path.pages[place:place + 1] = [None if key in parent.children else page]
        if key not in parent.children:
          page.tokens, page.parent = key, parent
          parent.add(page)
          self.idle.pop(parent.number, None)
      parent = parent.children[key]

  def _take(self, count: int) -> list[int]:
    """Returns the numbers of pages that get a user, of idle ones where none are free."""
    self.used += count
    fresh = min(max(count - len(self.free), 0), self.count - self.unused)
    self.free += range(self.unused, self.unused + fresh)
    self.unused += fresh
    while len(self.free) < count:
      number, page = self.idle.popitem(last=False)
      parent = page.parent
      parent.drop(page)
      if parent is not self.root and not parent.children and not parent.users:
        self.idle[parent.number] = parent
        self.idle.move_to_end(parent.number, last=False)  # the path goes from its end
      self.evicted += page.owner in self.ends
      self.free.append(number)
    taken = self.free[len(self.free) - count:]
    del self.free[len(self.free) - count:]
    return taken

  def _use(self, page: Page) -> None:
    self.used += not page.users
    page.users += 1
    self.idle.pop(page.number, None)

  def _leave(self, page: Page) -> None:
    page.users -= 1
    if not page.users:
      self.used -= 1
      if not page.children:
        self.idle[page.number] = page


def _common(tokens: bytes, others: bytes) -> int:
  """Returns how many leading tokens two pages share."""
  size = min(len(tokens), len(others))
  differ = int.from_bytes(tokens[:size], 'little') ^ int.from_bytes(others[:size], 'little')
  return ((differ & -differ).bit_length() - 1) // 32 if differ else size // 4


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
  """Tokens of a path to prefill after the first `start`, and targets whose log-probabilities are wanted."""
  path: Path
  start: int
  tokens: np.ndarray
  targets: np.ndarray | None = None  # as many as tokens, each predicted by the token at its place
  temperature: float = 1.0
  logprobs: list[float] = dataclasses.field(default_factory=list)  # of the targets, once prefilled


def pages_of(paths: Sequence[Path], width: int) -> np.ndarray:
  """Returns the table [paths, width] of their pages, the scratch page behind the last of each."""
  table = np.full((len(paths), width), SCRATCH, np.int32)
  for row, path in zip(table, paths):
    row[:len(path.numbers)] = path.numbers[:width]
  return table
