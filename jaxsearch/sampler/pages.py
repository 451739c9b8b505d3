"""The host's record of the KV cache: which page holds which tokens of which path, who uses it, what goes
first.

Keys and values lie in pages of PAGE tokens, in one pool a lane. The pages of all paths are a tree: below a
page are those that follow it, so that paths which begin alike share whole pages. A page that is partly filled
is never shared but copied, since its owner goes on to write behind what is there. Pages that no path in a
slot uses stay until others need the room; those of episodes that have ended go first, then the oldest.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsearch.trees.layout import common_prefix

PAGE = 32  # tokens
SHORT = 16  # a common beginning of fewer tokens is computed again, and not waited for
SCRATCH = 0  # the page for what a program has to write but nobody wants


@dataclasses.dataclass(eq=False)
class Page:
  """Some tokens of a path whose keys and values lie in page `number` of the pool, or are about to."""
  number: int
  owner: int = -1  # the episode that filled it
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  parent: 'Page | None' = None  # None while it is in no tree
  children: dict[bytes, 'Page'] = dataclasses.field(default_factory=dict)  # by their tokens
  ready: bool = False  # whether they are computed
  users: int = 0  # paths that are prefilled, scored or decoded


@dataclasses.dataclass(eq=False)
class Path:
  """A path that wants its tokens but the last one cached: that is a program's next input.

  `Pool.place` gives it `pages`. They hold `shared` of its tokens already, the last of them once `source` is
  copied.
  """
  tokens: np.ndarray
  most: int  # tokens that it may come to have
  owner: int  # its episode
  lane: int = 0
  pending: Any = None  # the request
  slot: Any = None  # of a span: what its first segment knows of it
  targets: Sequence[np.ndarray] = ()  # of a score: the tokens of its continuations
  pages: list[Page] | None = None
  numbers: np.ndarray | None = None  # of its pages
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
    if self._longest(path.context, soon=True)[2] - shared >= SHORT:
      return False
    missing = -(-path.most // PAGE) - len(pages)
    kept = [page for page in (*pages, source) if page is not None]
    if self.used + missing + sum(not page.users for page in kept) >= self.count:
      return False
    for page in kept:
      self._use(page)
    path.pages = [*pages, *(self._new(path.owner) for _ in range(missing))]
    path.numbers = np.array([page.number for page in path.pages], np.int32)
    path.shared, path.source = shared, source
    self.ends.setdefault(path.owner, [])
    self._record(path, path.context)
    return True

  def filled(self, path: Path) -> None:
    """Notes that the context of a path is computed."""
    for page in path.pages:
      page.ready = True
    if path.source is not None:
      self._leave(path.source)

  def leave(self, path: Path, tokens: np.ndarray) -> None:
    """Takes the pages of a path back, which hold `tokens` now; they stay for whoever goes on from there."""
    self._record(path, tokens)
    for page in path.pages:
      if page.parent is None:
        self.used -= 1
        self.free.append(page.number)
      else:
        self._leave(page)
    self.ends[path.owner] += [page for page in path.pages if page.number in self.idle]

  def release(self, owner: int) -> None:
    """Lets the pages of an episode that has ended go before all others."""
    for page in self.ends.pop(owner, ()):
      if self.idle.get(page.number) is page:
        self.idle.move_to_end(page.number, last=False)

  def _longest(self, tokens: np.ndarray, soon: bool = False) -> tuple[list[Page], Page | None, int]:
    """Returns (whole pages that begin a path, the page to copy a part of, tokens in both).

    If `soon`, those too that are computed now.
    """
    page, pages = self.root, []
    while (following := page.children.get(_key(tokens, len(pages)))) and (following.ready or soon):
      if len(following.tokens) < PAGE:
        break
      page = following
      pages.append(page)
    size, source, rest = 0, None, tokens[PAGE * len(pages):PAGE * (len(pages) + 1)]
    for child in page.children.values():
      if (child.ready or soon) and (common := common_prefix(child.tokens, rest)) > size:
        size, source = common, child
    shared = PAGE * len(pages) + size
    return (pages, source, shared) if shared >= SHORT else ([], None, 0)

  def _record(self, path: Path, tokens: np.ndarray) -> None:
    """Puts the pages that hold a path's tokens into the tree, where the same tokens are not there already."""
    parent = self.root
    for place, page in enumerate(path.pages[:-(-len(tokens) // PAGE)]):
      key, inside = _key(tokens, place), page.parent is not None
      if not (inside and len(page.tokens) == len(key) // tokens.itemsize):
        if inside:
          del page.parent.children[page.tokens.tobytes()]
        page.parent, page.tokens = None, tokens[PAGE * place:PAGE * (place + 1)]
        if key not in parent.children:
          parent.children[key], page.parent = page, parent
          self.idle.pop(parent.number, None)
      parent = parent.children[key]

  def _new(self, owner: int) -> Page:
    """Returns a page with a user; takes it from what is idle if none is free."""
    if not self.free and self.unused < self.count:
      self.free.append(self.unused)
      self.unused += 1
    if not self.free:
      number, page = self.idle.popitem(last=False)
      parent = page.parent
      del parent.children[page.tokens.tobytes()]
      if parent is not self.root and not parent.children and not parent.users:
        self.idle[parent.number] = parent
        self.idle.move_to_end(parent.number, last=False)  # the path goes from its end
      self.evicted += page.owner in self.ends
      self.free.append(number)
    self.used += 1
    return Page(self.free.pop(), owner, users=1)

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


def _key(tokens: np.ndarray, place: int) -> bytes:
  return tokens[PAGE * place:PAGE * (place + 1)].tobytes()


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
