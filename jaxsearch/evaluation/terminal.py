"""A rollout on the terminal as it grows: thoughts, queries, documents and answer, each after its name."""

import re
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxsearch.data.corpus import Document
from jaxsearch.tools.calls import NoRoom, ToolFailure
from jaxsearch.trees.tree import Node, Tree

STYLES = {'think': 'dim', 'search': 'bold cyan', 'answer': 'bold green'}


def show(console: Console, reply: Any) -> None:
  """Prints a reply that a growing tree gets; each element of policy text after its name."""
  match reply:
    case Node():
      # name, content and the text behind each element
      before, *parts = re.split(r'<(\w+)>(.*?)</\1>', reply.text, flags=re.DOTALL)
      say(console, '', before)
      for label, content, after in zip(*[iter(parts)] * 3):
        say(console, label, content, STYLES.get(label, ''))
        say(console, '', after)
    case ToolFailure():
      say(console, 'failed', reply.reason, 'bold red')
    case str():  # what a program printed
      say(console, 'output', reply)
    case []:
      say(console, 'found', 'no room to show it' if isinstance(reply, NoRoom) else 'nothing')
    case [Document(), *_]:
      for document in reply:
        say(console, 'found', f'{document.title}: {document.text}')


def close(console: Console, tree: Tree) -> None:
  """Prints the last line: the answer, right or wrong where gold answers are known, or why there is none."""
  if tree.answer is None:
    console.print(Text(f'no answer: {tree.stop.value.replace("_", " ")}', 'bold red'))
    return
  right = tree.question.score(tree.answer) if tree.question.golden_answers else None
  verdict = '' if right is None else '  right' if right else '  wrong'
  console.print(Text(printable(tree.answer) + verdict, 'bold red' if verdict == '  wrong' else 'bold green'))


def say(console: Console, label: str, text: str, style: str = '') -> None:
  """Prints a text, unless it is blank, behind its label; the lines that it is wrapped into are indented."""
  if text.strip():
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify='right', min_width=8, no_wrap=True)
    grid.add_column(overflow='fold')
    grid.add_row(Text(label, 'dim'), Text(printable(text.strip()), style))
    console.print(grid)


def printable(text: str) -> str:
  """Returns the text without characters that would steer a terminal: models and tools wrote it."""
  return ''.join(letter if letter.isprintable() or letter == '\n' else ' ' for letter in text)
