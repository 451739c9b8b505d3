"""The one record of a rollout: a tree of token spans.

A method grows a tree (`node.append`) and credits its nodes (`node.advantages`); `layout` alone turns it into
training rows. A span holds the token ids that were sampled or fed: text is tokenised once, when it is
appended. What a span means, and which text is a search, is up to `grammar` and the methods.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees import grammars


class Role(enum.Enum):
  """Who wrote a span."""
  ROOT = 'root'                # the empty span on top of every tree
  PROMPT = 'prompt'
  POLICY = 'policy'            # sampled from the policy: the only role that is trained on by default
  OBSERVATION = 'observation'  # what a tool returned
  CONTEXT = 'context'          # a copy of what the policy wrote elsewhere in the tree, to be seen again


class Stop(enum.StrEnum):
  """Why an episode ended."""
  ANSWERED = 'answered'
  BUDGET = 'budget'              # no turns or tokens left to spend
  CONTEXT_FULL = 'context_full'
  MALFORMED = 'malformed'        # the last span was neither a search nor an answer
  TOOL_FAILED = 'tool_failed'
  DEADLINE = 'deadline'


@dataclass(eq=False)
class Node:
  """A span of tokens that follows its parent's span. Made by `Node.append`, never by hand."""
  tree: Tree = field(repr=False)
  parent: Node | None = field(repr=False)
  role: Role
  tokens: list[int]  # ids of this span only, with the end token where the policy chose to end
  sampler_logprobs: list[float] | None = field(default=None, repr=False)  # per token; None: not sampled
  trained: bool = False  # whether its tokens bear a loss; `layout` builds the loss mask from this alone
  stop: str | None = None  # why it ended: the stop string that was found, or a reason of the sampler
  advantages: float | np.ndarray | None = None  # credit of the span, one number or one per token
  values: np.ndarray | None = field(default=None, repr=False)  # the critic's, of the state before each token
  returns: np.ndarray | None = field(default=None, repr=False)  # the critic's targets, per token
  data: dict[str, Any] = field(default_factory=dict)  # notes of a method
  children: list[Node] = field(default_factory=list, repr=False)  # alternatives to each other

  def append(self, text_or_ids: str | Sequence[int], role: Role, *,
             sampler_logprobs: Sequence[float] | None = None) -> Node:
    """Adds a span after this one and returns it.

    Args:
      text_or_ids: token ids, or text that is tokenised here, once.
      sampler_logprobs: one per token; only sampled (POLICY) spans have them, a demonstration has none.
    Raises:
      ValueError: log-probabilities for a span that was not sampled, or not one per token.
    """
    tokens = self.tree.tokenizer.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    tokens = list(map(int, tokens))
    logprobs = None if sampler_logprobs is None else list(map(float, sampler_logprobs))
    if logprobs is not None and role is not Role.POLICY:
      raise ValueError(f'log-probabilities for a {role.value} span, which was not sampled from the policy')
    if logprobs is not None and len(logprobs) != len(tokens):
      raise ValueError(f'{len(logprobs)} log-probabilities for a span of {len(tokens)} tokens')
    child = Node(self.tree, self, role, tokens, logprobs, trained=role is Role.POLICY)
    self.children.append(child)
    return child

  def absorb(self) -> None:
    """Makes its only child, a span that was sampled after it, a part of this one."""
    child, = self.children
    self.tokens += child.tokens
    if self.sampler_logprobs is not None:
      self.sampler_logprobs += child.sampler_logprobs
    self.stop, self.children = child.stop, child.children

  def split(self, at: int) -> Node:
    """Cuts an untrained span in two before token `at` and returns the first part; this node is the second."""
    first = self.parent.append(self.tokens[:at], self.role)
    siblings = self.parent.children
    siblings[siblings.index(self)] = siblings.pop()
    self.parent, self.tokens, first.children = first, self.tokens[at:], [self]
    return first

  @property
  def text(self) -> str:
    """Returns the text of this span alone, with the end token if the policy chose one."""
    return self.tree.tokenizer.decode(self.tokens)

  @property
  def text_without_end(self) -> str:
    """Returns the text of this span without its end token."""
    tokenizer = self.tree.tokenizer
    return tokenizer.decode([token for token in self.tokens if token not in tokenizer.eos_ids])

  def path(self) -> list[Node]:
    """Returns the nodes from the root to this one."""
    nodes = [self]
    while nodes[-1].parent is not None:
      nodes.append(nodes[-1].parent)
    return nodes[::-1]

  def path_tokens(self) -> list[int]:
    """Returns the tokens from the root to the end of this span: the context in which a child is sampled."""
    return list(itertools.chain.from_iterable(node.tokens for node in self.path()))

  @property
  def length(self) -> int:
    """Counts the tokens of `path_tokens`."""
    return sum(len(node.tokens) for node in self.path())

  def walk(self) -> Iterator[Node]:
    """Yields this node and all below it, depth first, children in the order they were appended."""
    stack = [self]
    while stack:
      node = stack.pop()
      yield node
      stack.extend(reversed(node.children))


class Metrics(dict):
  """Figures of a tree by name; one that is missing reads as 0."""

  def __missing__(self, name: str) -> int:
    return 0


class Tree:
  """Holds all spans of one question; `grow` fills in `answer`, `stop` and `metrics`, `credit` the `reward`.

  `tokenizer` has `encode(text) -> ids` and `decode(ids) -> text`; `rng` is seeded for each tree; `grammar` is
  one of grammars.py, by default that of Search-R1's tags.
  """

  def __init__(self, tokenizer: Any, question: Question | None = None,
               rng: np.random.Generator | None = None, grammar: Any = None):
    self.tokenizer = tokenizer
    self.grammar = grammar or grammars.Tagged(tokenizer)
    self.question = question
    self.root = Node(self, None, Role.ROOT, [])
    self.length = math.inf  # tokens that a path may have, see `room`
    self.answer: str | None = None
    self.reward: float | None = None
    self.judged: float | None = None  # how right a judge finds the answer, 0 to 1, where one was asked
    self.stop: Stop | None = None
    self.metrics = Metrics(searches=0, malformed=0, tool_failures=0)  # every tree has these: others read them
    self.metrics.update({f'malformed_{kind}': 0 for kind in self.grammar.kinds})
    self.rng = np.random.default_rng(0) if rng is None else rng

  def score(self) -> float:
    """Returns how right the answer is, by the judge that was asked, else by the rule of the question."""
    return self.question.score(self.answer) if self.judged is None else self.judged

  def to_json(self) -> dict[str, Any]:
    """Returns the tree as it was grown, without question, values and returns, as JSON holds it.

    Raises TypeError for a note (`node.data`, `metrics`) that is no number, text, list, dict or document.
    """
    nodes = list(self.walk())
    places = {node: place for place, node in enumerate(nodes)}
    rows = []
    for node in nodes:
      rows.append({'parent': places.get(node.parent), 'role': node.role.value})
      rows[-1] |= {name: getattr(node, name) for name in _GROWN}
    record = {'id': self.question and self.question.id, 'answer': self.answer, 'reward': self.reward,
              'stop': self.stop, 'metrics': self.metrics, 'rng': self.rng.bit_generator.state, 'nodes': rows}
    return json.loads(json.dumps(record, default=_plain))

  @classmethod
  def from_json(cls, record: dict[str, Any], tokenizer: Any, question: Question, grammar: Any = None) -> Tree:
    """Returns the tree of `to_json`, to the bit."""
    tree = cls(tokenizer, question, grammar=grammar)
    tree.answer, tree.reward = record['answer'], record['reward']
    tree.stop = record['stop'] and Stop(record['stop'])
    tree.metrics = Metrics(record['metrics'])
    tree.rng.bit_generator.state = record['rng']
    nodes = []
    for row in record['nodes']:
      nodes.append(tree.root if row['parent'] is None else nodes[row['parent']].append((), Role(row['role'])))
      vars(nodes[-1]).update({name: row[name] for name in _GROWN})
      documents = nodes[-1].data.get('documents')
      if documents is not None:
        nodes[-1].data['documents'] = [Document(**document) for document in documents]
    return tree

  def room(self, node: Node) -> float:
    """Returns how many tokens fit behind a span."""
    return max(self.length - node.length, 0)

  def walk(self) -> Iterator[Node]:
    """Yields all nodes, depth first: the order of the training layout."""
    return self.root.walk()

  def leaves(self) -> list[Node]:
    """Returns the nodes without children, depth first."""
    return [node for node in self.walk() if not node.children]

  def nodes(self, role: Role) -> list[Node]:
    """Returns the nodes of one role, depth first."""
    return [node for node in self.walk() if node.role is role]

  def turns(self) -> list[Node]:
    """Returns the spans of the policy, depth first, without summaries of a context (methods/folding.py)."""
    return [node for node in self.nodes(Role.POLICY) if node.data.get('segment') != 'summary']

  def prune(self) -> None:
    """Drops what bears no loss and leads to none, such as an observation that left no room to go on."""
    for node in reversed(list(self.walk())):  # children before their parents
      node.children = [child for child in node.children if child.children or (child.trained and child.tokens)]

  def count(self, role: Role | None = None) -> int:
    """Counts the tokens of one role, or of all; a prefix that several branches share counts once."""
    return sum(len(node.tokens) for node in self.walk() if role is None or node.role is role)


_GROWN = ('tokens', 'sampler_logprobs', 'trained', 'stop', 'advantages', 'data')  # of a node before `credit`


def _plain(value: Any) -> Any:
  """Returns a document or a NumPy value as JSON holds it."""
  if isinstance(value, Document):
    return dataclasses.asdict(value)
  if isinstance(value, (np.generic, np.ndarray)):
    return value.tolist()
  raise TypeError(f'{value!r} on a tree cannot be saved: notes are numbers, texts, lists, dicts or documents')


# Trees as people see them.

def spans(tree: Tree) -> list[dict]:
  """Returns what is shown of a tree: its spans depth first, each with role and text.

  Where present also `said`, a policy span's text as `grammar.content` has it, where that differs; `found`,
  how many documents its search found; `segment`, its kind, with `tokens`, how many; `value`, the critic's
  before the span; `advantage`, if all its tokens share one; `parent`, the index of the span that it follows,
  if not the one before it; `dropped`, true in a branch that was not continued; `folded`, true if a fold
  removed the span from the context; on the first span of the shorter path `fold`, the tokens that it saves,
  and `after`, the index of the last span that both paths share.
  """
  shown, dropped = [], dropped_nodes(tree)
  last = {None: -1}  # node -> index of the last span on its path
  for node in tree.walk():
    # The copy of a context, or of a folded path, follows in time the span before it.
    copied = node.role is Role.CONTEXT or 'fold' in node.data
    parent = len(shown) - 1 if copied else last[node.parent]
    last[node] = len(shown) if node.tokens else parent
    if not node.tokens:
      continue
    span = {'role': node.role.value, 'text': node.text}
    if node.role is Role.POLICY and (said := tree.grammar.content(node)) != node.text_without_end:
      span['said'] = said
    if documents := node.data.get('documents'):
      span['found'] = len(documents)
    if 'segment' in node.data:
      span |= {'segment': node.data['segment'], 'tokens': len(node.tokens)}
    if node.values is not None:
      span['value'] = float(node.values[0])
    if node.advantages is not None and np.ndim(node.advantages) == 0:
      span['advantage'] = float(node.advantages)
    if parent != len(shown) - 1:
      span['parent'] = parent
    if node in dropped:
      span['dropped'] = True
    if 'fold' in node.data:
      span |= {'fold': node.data['fold'], 'after': last[node.parent]}
      for old in range(last[node.parent] + 1, len(shown)):
        shown[old]['folded'] = True
    shown.append(span)
  return shown


def dropped_nodes(tree: Tree) -> set[Node]:
  """Returns the nodes in branches that the rollout did not continue from.

  Of several children one is kept, chosen by these criteria in order: not taken out of training, leads to the
  answer, has spans below it. None is kept if nothing tells them apart. Siblings of a copied context or path
  are not dropped: they were read, then forgotten.
  """
  def rank(child: Node) -> tuple[bool, bool, bool]:
    written = (node.text for node in child.walk() if node.role is Role.POLICY)
    answers = tree.answer is not None and any(tree.answer in text for text in written)
    return child.trained or child.role is not Role.POLICY, answers, bool(child.children)

  dropped = set()
  for node in tree.walk():
    children = node.children
    forgotten = any(child.role is Role.CONTEXT or 'fold' in child.data for child in children)
    if node in dropped or len(children) < 2 or forgotten:
      continue
    ranks = [rank(child) for child in children]
    best = max(ranks)
    kept = children[ranks.index(best)] if any(best[1:]) or ranks.count(best) == 1 else None
    for child in children:
      if child is not kept:
        dropped.update(child.walk())
  return dropped
