"""Folds the context of a chain, so that an episode may be longer than the context of the model.

`folding` wraps the `grow` of any method whose trees are chains. Before a turn behind a path that is too long,
it makes a shorter one, from which the method goes on without noticing:

  oldest   what tools gave is dropped, the oldest first, down to half of the limit; thoughts and calls stay
  summary  the policy is asked for a summary while it still sees everything; prompt and summary stay

In the tree, what is folded stays a branch. So each span is trained once, where it was sampled; copies of it
that are seen again bear no loss. A summary is a span of the policy like others, with the credit of the chain:
if it were not trained, it would shrink to nothing useful.
"""

import dataclasses
from collections.abc import Callable

from jaxsearch.data.questions import Question
from jaxsearch.methods.actions import write_context
from jaxsearch.rewards.match import answer_found
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node, Role, Tree

SETTINGS = ('fold', 'fold_at', 'fold_tokens')  # of config.grow: those that are not for a method's `grow`
REQUEST = ('Call no tool now: write between <context> and </context> what is known and what is still to be '
           'found. All else will be forgotten.\n')
DROPPED = 'Dropped to save space.\n'


def folding(grow: Callable[..., Growth[None]], question: Question, tree: Tree, *, fold: str = 'never',
            fold_at: float = 0.75, fold_tokens: int = 128, **settings) -> Growth[None]:
  """Grows a chain as `grow(question, tree, **settings)` does, and folds paths before turns.

  tree.metrics counts `folds`, `tokens_saved` by them, and `answers_lost`: folds before which a gold answer
  stood behind the prompt, and after which none does.

  Args:
    fold: 'never', 'oldest' or 'summary'.
    fold_at: share of the context that a path may fill before a turn. 'summary' also reserves room for its
      request and summary: observations are cut and turns end before they reach into it.
    fold_tokens: the most tokens of a summary.
  """
  if fold == 'never':
    return (yield from grow(question, tree, **settings))
  tree.metrics.update(folds=0, tokens_saved=0, answers_lost=0)
  limit = fold_at * tree.length
  if fold == 'summary':
    tree.length -= len(tree.tokenizer.encode(tree.grammar.aside(None, REQUEST))) + fold_tokens
  growth, reply = grow(question, tree, **settings), None
  while True:
    try:
      request = growth.send(reply)
    except StopIteration:
      return
    if isinstance(request, Generate):
      node = request.node
      if node.role is Role.OBSERVATION and node.length >= min(limit, tree.length):
        if fold == 'summary':
          shorter = yield from summarised(node, fold_tokens)
        else:
          shorter = thinned(node, limit / 2)
        if shorter is not node:
          count(tree, node, shorter)
          request = dataclasses.replace(request, node=shorter, forgets=True)
      if fold == 'summary' and (room := tree.room(request.node)):
        request = dataclasses.replace(request, max_tokens=min(request.max_tokens, room))
    reply = yield request


def summarised(node: Node, fold_tokens: int) -> Growth[Node]:
  """Summarises the path to `node`; returns a copy of the summary behind the prompt, or `node` without one."""
  speech = node.tree.grammar
  end, prompt = before_opening(node), before_opening(node.path()[1])
  asked = end.append(speech.aside(end, REQUEST), Role.PROMPT)
  written = yield from write_context(asked, fold_tokens, speech.stops)
  written.data['segment'] = 'summary'
  said = speech.content(written)
  notes = grammar.context_block(said)[0] or said.strip()
  if not notes:
    return node
  if end is not node:
    end.children.remove(node)  # the turn that it opened is not to come
  return prompt.append(speech.resume(prompt, notes), Role.CONTEXT)


def before_opening(node: Node) -> Node:
  """Splits the frame that opens the policy's turn, if any, off `node`'s end; returns the span before it."""
  opening = node.tree.tokenizer.encode(node.tree.grammar.opening)
  return node.split(-len(opening)) if opening and node.tokens[-len(opening):] == opening else node


def thinned(node: Node, most: float) -> Node:
  """Copies the path to `node` without its oldest results; returns the end of the copy, or `node` if none can
  be dropped. Drops results until the path has at most `most` tokens, but never the last one."""
  path, speech, length, dropped = node.path(), node.tree.grammar, node.length, {}
  for result in [span for span in path if span.role is Role.OBSERVATION][:-1]:
    calls = speech.read(result.parent).calls
    ids = node.tree.tokenizer.encode(speech.observe(result.parent, [(call, DROPPED) for call in calls]))
    if length > most and len(ids) < len(result.tokens):
      dropped[result], length = ids, length + len(ids) - len(result.tokens)
  if not dropped:
    return node
  first = path.index(next(iter(dropped)))
  copy = path[first].parent
  for span in path[first:]:
    role = Role.CONTEXT if span.role is Role.POLICY else span.role
    copy = copy.append(dropped.get(span, span.tokens), role)
  return copy


def count(tree: Tree, long: Node, short: Node) -> None:
  """Notes a fold in the metrics, and on the first span of the short path that the long path lacks."""
  text = lambda node: ''.join(span.text for span in node.path()[2:])
  held = lambda node: answer_found(tree.question.golden_answers, text(node))
  saved = long.length - short.length
  first = next(span for span in short.path() if span not in long.path())
  first.data['fold'] = saved
  tree.metrics['folds'] += 1
  tree.metrics['tokens_saved'] += saved
  tree.metrics['answers_lost'] += held(long) > held(short)
