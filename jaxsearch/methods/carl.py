r"""CARL (Kumar et al. 2026, arXiv 2605.27788): a critic that knows what the model knows credits segments.

A chain of segments: invoke (a thought, then a closed block of Python; no other block ends it), assimilate (a
`<context>`, written while the program's raw output is seen), …, commit (the answer in `\boxed{}`). The raw
output is then forgotten: in the tree it hangs beside the main path, with the context that was written below
it, and the main path continues after the invoke with a clean copy of the context. The cache of the invoke is
kept, so forgetting costs only the tokens of that copy.

The critic's states s_0, s~_1, s_2, … (appendix B) are those in which the first tokens of the segments are
chosen; the training layout holds them all. `train.aggregate='step-mean'` is the objective of section 3.4.
"""

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from jaxsearch.advantages import smdp_td
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import Action, count_malformed, finish, read, write_context, write_until
from jaxsearch.methods.credit import (
  credit_relative,
  credit_with_critic,
  explained,
  padded,
  rewarded,
  valued_spans,
)
from jaxsearch.methods.search_r1 import reward, start
from jaxsearch.rewards import formats
from jaxsearch.sampler.requests import Growth, RunPython, ToolFailure
from jaxsearch.tools import faults
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node, Role, Stop, Tree

BRANCHES = True
JUDGED = True
ONE_TREE = True
TAGS = grammar.CARL
TOOLS = ('python',)
_smdp_td = jax.jit(smdp_td, static_argnames=('gamma', 'lam'))


def grow(question: Question, tree: Tree, *, max_segments: int = 15, max_tokens: int = 512,
         context_tokens: int = 256, template: str = 'carl', chat: bool = False, tools: bool = True,
         fault: str = 'working') -> Growth[None]:
  """Grows invokes and assimilates until the policy commits to an answer; figure 1 of the paper.

  tree.metrics counts calls (`searches`) and contexts missing or cut.

  `tools=False` runs no block, for closed-book rollouts; `fault` replaces a program's output, see
  tools/faults.py. configs/carl.py explains the other settings.
  """
  faults.check(fault, question)
  tree.metrics.update(no_context=0, context_cut=0)
  node = start(tree, question, template, chat, tools)
  yield from proceed(tree, node, max_segments, max_tokens, context_tokens, tools=tools, fault=fault)


def proceed(tree: Tree, node: Node, segments: int, max_tokens: int, context_tokens: int, *,
            tools: bool = True, fault: str = 'working') -> Growth[None]:
  """Grows at most `segments` after a persistent state, or after a raw output, which is assimilated first."""
  if node.role is Role.OBSERVATION:
    node, segments = (yield from remember(tree, node, context_tokens)), segments - 1
  for left in range(segments, 0, -2):
    node = yield from think(node, tools, max_tokens)
    action = read(node)
    if not action.calls or not tools or left < 3 or action.ends:
      return commit(tree, action)
    raw = yield from invoke(action, fault)
    node = yield from remember(tree, raw, context_tokens)


def remember(tree: Tree, raw: Node, context_tokens: int) -> Growth[Node]:
  """Grows the context of a raw output and forgets the output; a clean copy, empty without one, goes on."""
  written = yield from write_context(raw, context_tokens)
  context, closed = grammar.context_block(tree.grammar.content(written))
  written.data.update(segment='assimilate', context=context)
  tree.metrics['no_context'] += not context
  tree.metrics['context_cut'] += bool(context) and not closed
  return raw.parent.append(tree.grammar.recall(raw.parent, context), Role.CONTEXT)


def think(node: Node, tools: bool, max_tokens: int) -> Growth[Node]:
  """Grows an invoke or commit segment, past stop strings that close no call (```json, a bare fence)."""
  return write_until(node, node.tree.grammar.stops if tools else (), max_tokens,
                     lambda span: bool(read(span).calls) or span.tree.grammar.closed(span))


def invoke(action: Action, fault: str) -> Growth[Node]:
  """Runs the program that a segment ends with, several as one; returns the raw output below it."""
  node, tree, question = action.node, action.node.tree, action.node.tree.question
  observe = lambda text: tree.grammar.observe(node, [(action.calls[0], tree.grammar.safe(text.strip()))])
  if malformed := action.malformed:
    count_malformed(tree, malformed)
    node.data.update(segment='invoke', code='', output=malformed.message)
    return node.append(observe(malformed.message), Role.OBSERVATION)
  code = '\n'.join(str(call.arguments['code']) for call in action.calls)
  table = tuple(question.metadata.get('table') or ())
  output = yield RunPython(node, faults.program(fault, code, question), table, observe)
  tree.metrics['searches'] += 1
  if isinstance(output, ToolFailure):
    tree.metrics['tool_failures'] += 1
    output = f'The tool failed: {output.reason}'
  output = faults.apply(fault, output, tree.rng)
  node.data.update(segment='invoke', code=code, output=output)
  return node.append(observe(output), Role.OBSERVATION)


def commit(tree: Tree, action: Action) -> None:
  """Ends the episode with the answer of the segment, if it has one."""
  action.node.data['segment'] = 'commit'
  answer = formats.last_boxed(tree.grammar.content(action.node))
  finish(tree, action.node, answer, spent=bool(action.calls) and not action.ends)
  if action.ends:
    count_malformed(tree, action.malformed)
  else:
    tree.metrics['malformed'] += tree.stop is Stop.MALFORMED


def credit(groups: Groups, context: Context, *, gamma: float = 1.0, lam: float = 0.0,
           level: str = 'segment') -> None:
  """Sets `A = V(s_{k+1}) - V(s_k)`, of the last segment `R - V(s_N)` (eq. 1); returns are R in every state.

  Args:
    level: 'segment', or what the paper compares it with: 'token' (PPO: GAE over tokens), 'trajectory' (GRPO).
  """
  trees = rewarded(groups, reward)  # exact match only, no format reward (section 3.1)
  if level == 'trajectory':
    return credit_relative(groups)
  if level == 'token':
    return context.metrics.update(credit_with_critic(trees, gamma=gamma, lam=lam))
  chains = [chain for tree in trees if (chain := valued_spans(tree))]
  rows = padded(len(chains))
  values = np.zeros((rows, padded(max(map(len, chains), default=1))), np.float32)
  rewards, lengths = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
  for row, chain in enumerate(chains):
    values[row, :len(chain)] = [node.values[0] for node in chain]
    rewards[row], lengths[row] = chain[0].tree.reward, len(chain)
  advantages = np.asarray(_smdp_td(values, rewards, lengths, gamma=gamma, lam=lam))
  for chain, of_chain in zip(chains, advantages):
    for node, advantage in zip(chain, of_chain):
      node.advantages = float(advantage)
      node.returns = np.full(len(node.tokens), node.tree.reward, np.float32)
  context.metrics.update(of_segments(chains))


def of_segments(chains: Sequence[Sequence[Node]]) -> dict[str, float]:
  """Describes CARL's segments under the critic; each chain holds the segments of one tree.

  advantage_KIND: mean advantage of a kind of segment. opposed_pairs_share: share of assimilates with an
  advantage of the opposite sign to their invoke's. gained_then_lost_pairs: number of assimilates with a
  negative advantage whose invoke's is positive (appendix I.1).
  """
  nodes = [node for chain in chains for node in chain]
  returns = np.array([node.tree.reward for node in nodes])
  figures = explained(np.array([node.values[0] for node in nodes]), returns)
  for kind in ('invoke', 'assimilate', 'commit'):
    advantages = [node.advantages for node in nodes if node.data['segment'] == kind]
    if advantages:
      figures[f'advantage_{kind}'] = float(np.mean(advantages))
  pairs = [(a.advantages, b.advantages) for chain in chains for a, b in itertools.pairwise(chain)
           if (a.data['segment'], b.data['segment']) == ('invoke', 'assimilate')]
  if pairs:
    figures['opposed_pairs_share'] = float(np.mean([a * b < 0 for a, b in pairs]))
    figures['gained_then_lost_pairs'] = sum(a > 0 > b for a, b in pairs)
  return figures
