"""A rollout on the terminal as it grows: thoughts, queries, documents and the answer, each behind a word that says what it is."""

import re
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.trees.tree import Node, Tree

STYLES = {'think': 'dim', 'search': 'bold cyan', 'answer': 'bold green'}


def show(console: Console, reply: Any) -> None:
  """Prints a reply that a growing tree gets."""
  match reply:
    case Node():
      say_policy(console, reply.text)
    case ToolFailure():
      say(console, 'failed', reply.reason, 'bold red')
    case str():  # what a program printed
      say(console, 'output', reply)
    case []:
      say(console, 'found', 'nothing')
    case [Document(), *_]:
      for document in reply:
        say(console, 'found', f'{document.title}: {document.text}')


def close(console: Console, tree: Tree) -> None:
  """Prints the last line: the answer, right or wrong where gold answers are known, or why there is none."""
  if tree.answer is None:
    console.print(Text(f'no answer: {tree.stop.value.replace("_", " ")}', 'bold red'))
    return
  verdict, style = '', 'bold green'
  if tree.question.golden_answers:
    verdict, style = ('  right', style) if tree.question.score(tree.answer) else ('  wrong', 'bold red')
  console.print(Text(printable(tree.answer) + verdict, style))


def say_policy(console: Console, text: str) -> None:
  """Prints policy text: its elements behind their names, the text around them as it is."""
  before, *parts = re.split(r'<(\w+)>(.*?)</\1>', text, flags=re.DOTALL)  # name, content and the text behind each element
  for name, content, after in [('', before, ''), *zip(*[iter(parts)] * 3)]:
    for label, part in ((name, content), ('', after)):
      if part.strip():
        say(console, label, part, STYLES.get(label, ''))


def say(console: Console, label: str, text: str, style: str = '') -> None:
  """Prints a text behind its label; the lines that it is wrapped into are indented."""
  grid = Table.grid(padding=(0, 2))
  grid.add_column(justify='right', min_width=8, no_wrap=True)
  grid.add_column(overflow='fold')
  grid.add_row(Text(label, 'dim'), Text(printable(text.strip()), style))
  console.print(grid)


def printable(text: str) -> str:
  """The text without characters that would steer a terminal: models and tools wrote it."""
  return ''.join(letter if letter.isprintable() or letter == '\n' else ' ' for letter in text)
