"""A rollout on the terminal as it grows: thoughts, queries, documents and the answer, in colour."""

import re

from rich.console import Console
from rich.text import Text

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.trees.tree import Node, Tree

STYLES = {'think': 'dim', 'search': 'bold cyan', 'answer': 'bold green'}


def show(console: Console, tree: Tree, reply) -> None:
  """Prints a reply that a growing tree gets: with a console, the `watch` of a rollout."""
  match reply:
    case Node():
      console.print(coloured(reply.text))
    case ToolFailure():
      console.print(Text(f'  search failed: {reply.reason}', 'red'))
    case str():  # what a program printed
      console.print(Text(reply, 'yellow'))
    case []:
      console.print(Text('  nothing found', 'yellow'))
    case [Document(), *_]:
      for document in reply:
        console.print(Text.assemble(' ' * 10, (document.title, 'bold yellow'), (f'  {document.text}', 'yellow')))
    case list():  # the replies to a list of requests
      for one in reply:
        show(console, tree, one)


def close(console: Console, tree: Tree) -> None:
  """Prints the last line: the answer, right or wrong where gold answers are known, or why there is none."""
  if tree.answer is None:
    console.print(Text(f'no answer: {tree.stop.value.replace("_", " ")}', 'bold red'))
  else:
    verdict = ('  right' if tree.question.score(tree.answer) else '  wrong') if tree.question.golden_answers else ''
    console.print(Text(f'{tree.answer}{verdict}', 'bold green'))


def coloured(text: str) -> Text:
  """Policy text with its elements in colour, each on a line of its own; the text around them unchanged."""
  before, *parts = re.split(r'<(\w+)>(.*?)</\1>', text, flags=re.DOTALL)  # name, content and the text behind each element
  shown = Text(before)
  for name, content, after in zip(*[iter(parts)] * 3):
    shown.append(f'{name:>8}  ', 'dim').append(content.strip() + '\n', STYLES.get(name, '')).append(after)
  shown.rstrip()
  return shown
