"""Search-R1 with GRPO (Jin et al. 2025, arXiv 2503.09516): search while reasoning, earn the right answer.

`grow` is the rollout of the paper's algorithm 1, as its code runs it (`llm_agent/generation.py`): up to
`max_turns` actions, then one last span in which a search is no longer served. An action that is neither a
search nor an answer costs a turn and gets an observation that says so.
"""

import math
from collections.abc import Callable

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import NO_ROOM, Action, finish, read, search
from jaxsearch.methods.credit import credit_relative, rewarded
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees.tree import Node, Role, Tree

JUDGED = True


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500,
         template: str = 'search_r1', chat: bool = False) -> Growth[None]:
  """Grows one chain below the root: prompt, policy span, observation, policy span, …

  tree.metrics counts `searches`, `found` (those that returned documents), `malformed` and `tool_failures`. A
  span that searched has its documents in node.data['documents'].

  Args:
    max_turns: actions that get an observation; one more span follows.
    max_tokens: of each policy span.
    template: a name or a file, see trees/templates.py.
    chat: puts the prompt into the tokenizer's chat template, for instruct models.
  """
  tree.metrics['found'] = 0
  node = start(tree, question, template, chat, tools=max_turns > 0)
  yield from act(tree, node, turns=max_turns, max_tokens=max_tokens)


def start(tree: Tree, question: Question, template: str, chat: bool, tools: bool = True) -> Node:
  """Appends the prompt of a question, neutralised, below the root; `tools`: whether it offers any."""
  return tree.root.append(tree.grammar.prompt(question.question, template, chat, tools), Role.PROMPT)


def act(tree: Tree, node: Node, *, turns: int, max_tokens: int, max_response: float = math.inf,
        each_turn: Callable[[Action, Node], Growth[Node]] | None = None) -> Growth[Node]:
  """Acts and observes to an answer or the end of the budget; sets what `grow` sets; returns the last span.

  Args:
    max_response: tokens of all policy spans on the path, those before `node` included.
    each_turn: called with an action and its observation's node; may request more, such as a score that
      becomes the action's reward. Returns the node to go on from, which allows forgetting.
  """
  for turn in range(turns + 1):
    left = max_response - sum(len(span.tokens) for span in node.path() if span.role is Role.POLICY)
    node = yield Generate(node, stop=tree.grammar.stops, max_tokens=min(max_tokens, left))
    action, spent = read(node), len(node.tokens) >= left
    if action.answer is not None or node.stop in NO_ROOM or spent or turn == turns:
      break
    yield from search([action], tree)
    tree.metrics['searches'] += action.asked
    tree.metrics['found'] += action.found
    if action.ends:
      break
    node = node.append(action.observation, Role.OBSERVATION)
    if each_turn:
      node = yield from each_turn(action, node)
  finish(tree, node, action.answer, spent=spent or (action.is_valid and not action.ends))
  return node


def reward(tree: Tree) -> float:
  """Returns 1 if the answer is right by its question's rule (mostly a normalised exact match), else 0;
  or a judge's score."""
  return tree.score()


def credit(groups: Groups, context: Context, *, normalize_std: bool = True, singleton: str = 'raw') -> None:
  """Credits the policy spans of a chain with its reward relative to the others of its question (GRPO)."""
  rewarded(groups, reward)
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
