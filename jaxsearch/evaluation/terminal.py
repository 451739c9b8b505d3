"""One agent at work on the terminal: thoughts, queries, documents and the answer, in colour, as they come."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.trees.tree import Node, Tree

STYLES = {'think': 'dim', 'search': 'bold cyan', 'answer': 'bold green'}
_ELEMENT = re.compile(r'<(\w+)>(.*?)</\1>', re.DOTALL)


class Transcript:
  """Shows every reply that a growing tree gets; `show` is the `watch` of `sampler.rollout.rollout`."""

  def __init__(self, console: Console):
    self.console = console

  def show(self, tree: Tree, reply) -> None:
    if isinstance(reply, Node):
      self.console.print(coloured(reply.text))
    elif isinstance(reply, ToolFailure):
      self.console.print(Text(f'  search failed: {reply.reason}', 'red'))
    else:
      for document in reply:
        self.console.print(document_line(document))
      if not reply:
        self.console.print(Text('  nothing found', 'yellow'))

  def close(self, tree: Tree) -> None:
    """The last line: the answer, or why there is none; right or wrong where the question has golds."""
    if tree.answer is None:
      self.console.print(Text(f'no answer: {tree.stop.value.replace("_", " ")}', 'bold red'))
      return
    verdict = ''
    if tree.question.golden_answers:
      verdict = '  right' if tree.question.score(tree.answer) else '  wrong'
    self.console.print(Text(f'{tree.answer}{verdict}', 'bold green'))


def coloured(text: str) -> Text:
  """What the policy wrote, its elements in their colours; anything outside of them as it is."""
  shown, end = Text(), 0
  for element in _ELEMENT.finditer(text):
    shown.append(text[end:element.start()])
    shown.append(f'{element[1]:>8}  ', 'dim')
    shown.append(element[2].strip() + '\n', STYLES.get(element[1], ''))
    end = element.end()
  shown.append(text[end:])
  shown.rstrip()
  return shown


def document_line(document: Document) -> Text:
  return Text.assemble(('          ', ''), (document.title, 'bold yellow'), (f'  {document.text}', 'yellow'))
