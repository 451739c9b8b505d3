"""Baselines that only prompt, one file each: a `grow` for any model, without `credit`.

Every call of the policy is a branch below the root: a prompt, the documents that it shows, what the policy
said so far (a CONTEXT span), and what it says now. The sampler prefills the common prefix of two prompts
only once. This file holds what the methods share: prompts, searches, sentences, answers. docs/prompted.md
lists the settings of the papers. All methods have these:

  prompts      '' for ours, which suit instruct models; 'world' for the shipped policies; or a folder, see
               trees/templates.py
  chat         puts prompts into the tokenizer's chat template
  max_tokens   of an answer, or of a span of the chain
"""

import re
from collections.abc import Callable, Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.methods import actions
from jaxsearch.rewards import formats
from jaxsearch.sampler.requests import Generate, Growth, Search, ToolFailure
from jaxsearch.tools.calls import shorten
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Node, Role, Stop, Tree

# A policy that writes tags stops at these; only methods with turns serve the search.
ENDS = ('</answer>', '</search>')
SENTENCE_ENDS = ('. ', '.\n', '? ', '?\n', '! ', '!\n', *ENDS)
_SENTENCE = re.compile(r'(?<!\b[A-Z])[.?!](?=\s)|(?<=\S)\n|</answer>|</search>')  # not behind J. of J. Doe
_ANSWER_IS = re.compile(r'answer is\b:?', re.IGNORECASE)


def write(tree: Tree, call: str, prompts: str, chat: bool, *, documents: Sequence[Document] | None = None,
          said: str = '', **fields: object) -> Node:
  """Appends the prompt of a call about the tree's question below the root; returns its last span.

  Args:
    call: a file of trees/prompts/prompted.
    documents: an OBSERVATION span, in the place of {documents}.
    said: what the policy goes on from, a CONTEXT span.
    fields: fill in others than {question}; texts are neutralised.
  """
  fields = {'question': tree.question.question} | fields
  safe = tree.grammar.safe
  fields = {name: safe(value) if isinstance(value, str) else value for name, value in fields.items()}
  text = templates.turns(templates.files('prompted', prompts)[call], tree.tokenizer if chat else None)
  head, shown, tail = text.partition('{documents}')
  node = tree.root.append(templates.fill(head, **fields), Role.PROMPT)
  if shown:
    listed = grammar.listed(documents, safe) or grammar.NOTHING
    node = node.append(listed, Role.OBSERVATION).append(templates.fill(tail, **fields), Role.PROMPT)
  return node.append(said, Role.CONTEXT) if said else node


def find(tree: Tree, query: str) -> Growth[list[Document]]:
  """Searches and counts; a search that fails finds nothing."""
  reply = yield Search(tree.root, query)
  tree.metrics['searches'] += 1
  if isinstance(reply, ToolFailure):
    tree.metrics['tool_failures'] += 1
    return []
  return reply


def fit(tree: Tree, documents: Sequence[Document], tokens: int) -> list[Document]:
  """Cuts the texts of documents so that all together have at most that many tokens."""
  return shorten(documents, tokens, grammar.listed, tree.tokenizer)


def say_sentence(node: Node, max_tokens: int) -> Growth[tuple[Node, str]]:
  """Grows one sentence after `node`: (the span, the sentence). The span may hold a little more."""
  ended = lambda span: bool(_SENTENCE.search(span.text_without_end))
  span = yield from actions.write_until(node, SENTENCE_ENDS, max_tokens, ended)
  return span, first_sentence(span.text_without_end)


def say_answer(tree: Tree, node: Node, max_tokens: int,
               read: Callable[[str], str | None] | None = None) -> Growth[None]:
  """Ends the episode with the answer that `read` (by default `short_answer`) finds in a span after `node`."""
  span = yield Generate(node, stop=ENDS, max_tokens=max_tokens)
  finish(tree, span, (read or short_answer)(span.text_without_end))


def first_sentence(text: str) -> str:
  """Returns the text up to the end of its first sentence or line; all of it if none ends."""
  end = _SENTENCE.search(text)
  return text[:end.end()].rstrip('\n') if end else text


def joined(text: str, sentence: str) -> str:
  """Adds a sentence to a text, after a space where one is missing."""
  return text + (sentence if not text or sentence[:1].isspace() else f' {sentence}')


def plain(text: str) -> str:
  """Returns a thought as a query: the search in it if there is one, else its words without tags."""
  return grammar.search_query(text) or ' '.join(re.sub(r'</?\w+>', ' ', text).split())


def marked_answer(text: str) -> str | None:
  r"""Returns the answer in tags, or in \boxed{…} or on the line after the last 'the answer is'."""
  if '</answer>' in text:  # the opening tag may stand in the prompt
    return text.split('</answer>')[0].split('<answer>')[-1].strip() or None
  *before, rest = _ANSWER_IS.split(text)
  return formats.last_boxed(rest) or _bare(rest.strip().split('\n')[0]) if before else None


def short_answer(text: str) -> str | None:
  """Returns a marked answer, else the first line; None if that is empty or begins a search."""
  line = next((line for line in text.splitlines() if line.strip()), '').removeprefix('Answer:')
  return marked_answer(text) or (None if '<search>' in line else _bare(line))


def _bare(text: str) -> str | None:
  return text.strip().strip('*"').rstrip('.').strip('*"') or None


def finish(tree: Tree, node: Node, answer: str | None, *, spent: bool = False) -> None:
  """Ends the episode as `actions.finish` does, and counts a span without an answer as malformed."""
  actions.finish(tree, node, answer, spent=spent)
  tree.metrics['malformed'] += tree.stop is Stop.MALFORMED
