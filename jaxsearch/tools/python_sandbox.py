"""The tool `python`, CARL's: Python that the policy wrote, and the sandbox that runs it.

The interpreter is `pydantic-monty`, a subset of Python in subprocesses of its own: no files, no network, a
few modules (`MODULES`), limits on time, memory, recursion and calls of host functions. Those are what `run`
is given and `statistics`, which monty lacks; they run outside the limits, so they take only a few flat, short
values. Whatever a program does ends as text, never as an exception of ours.
"""

import ast
import dataclasses
import datetime
import os
import re
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic_monty
from pydantic import Field

from jaxsearch.tools.calls import ToolCall
from jaxsearch.tools.tool import Arguments, declare
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Node

MAX_TOPK = 10  # documents of a search in a program
CALLS = 32  # of host functions and look-ups of their names, in one program
# A program's output depends on its text alone: the clock stands, nothing sleeps, random numbers are seeded.
# A last value is shown where this Python can parse the text: 3.11 knows less syntax than the sandbox.
MODULES = ('math', 're', 'json', 'datetime', 'decimal', 'statistics', 'itertools', 'collections', 'functools',
           'random')
POLICY = {'datetime': datetime.datetime(2026, 1, 1), 'sleep': 'zero', 'random_start': {'seed': 0}}
# What a host function takes. Thirty calls of the slowest one, a deviation of floats of all sizes, take 0.1 s.
ARGUMENTS, ITEMS, BITS, CHARACTERS = 8, 1000, 256, 1000
warnings.filterwarnings('ignore', module='<program>')  # of odd escapes


class PythonArguments(Arguments):
  __doc__ = ('Runs a program of Python and shows what it prints. It has no files and no network. It may '
             f'import {", ".join(MODULES)}; search(query, k) returns passages as text, table() the rows of '
             "the question's table.")
  code: str = Field(pattern=r'\S', description='The program.')


@dataclasses.dataclass(frozen=True)
class RunPython(ToolCall):
  """Runs a program; the reply is what it printed, cut to the room after `node`.

  It may call `search(query, k)`, which returns documents as text, and `table()`, which returns `table`.
  """
  node: Node
  code: str
  table: Sequence[Sequence[str]] = ()
  show: Callable[[str], str] | None = None
  tool = 'python'

  @property
  def query(self) -> str:
    return self.code

  def run(self, tools):
    """Raises the last search's error if all searches of the program failed: then the tool failed."""
    end = time.monotonic() + tools.deadline

    def search(query: str, k: int = tools.topk) -> str:
      if not isinstance(query, str):  # an error of the program's
        raise ValueError('a query is a text')
      if time.monotonic() > end:
        raise TimeoutError('no time left for a search')
      documents = tools.find(self.node, query, min(max(int(k), 1), MAX_TOPK))
      return grammar.listed(documents) or grammar.NOTHING

    table = lambda: [list(row) for row in self.table]
    printed = tools.python.run(self.code, {'search': search, 'table': table})
    if tools.searches and None not in tools.searches:
      raise tools.searches[-1]
    return printed


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function for numbers, texts and lists of these within the limits above.

  It raises ValueError for anything else.
  """
  def short(value: Any) -> bool:
    if isinstance(value, int):
      return value.bit_length() <= BITS
    return value is None or isinstance(value, float) or (isinstance(value, str) and len(value) <= CHARACTERS)

  def flat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= ITEMS and all(map(short, value))

  def call(*arguments, **named):
    values = (*arguments, *named.values())
    if len(values) > ARGUMENTS or not all(short(value) or flat(value) for value in values):
      raise ValueError(f'a function takes numbers of at most {BITS} bits, texts of {CHARACTERS} characters, '
                       f'and lists of at most {ITEMS} of these')
    return function(*arguments, **named)
  return call


STATISTICS = pydantic_monty.ExternalModule({name: _bounded(getattr(statistics, name)) for name in (
  'mean', 'fmean', 'median', 'median_low', 'median_high', 'mode', 'stdev', 'pstdev', 'variance',
  'pvariance')})


SHOW_VALUE = 'if value__ is not None: print(value__, end="")'


class PythonSandbox:
  """Runs programs, several at a time, each from a clean state.

  Args:
    seconds: of computing for one program; time in host functions does not count.
    memory: MiB of its heap.
    output: characters of its output that are kept; a program that prints more is ended.
    workers: programs at a time.
  """

  def __init__(self, *, seconds: float = 2.0, memory: int = 64, output: int = 4000, workers: int = 4):
    self._limits = {'max_feed_duration_secs': float(seconds), 'max_memory': memory << 20,
                    'max_recursion_depth': 100, 'max_suspensions': CALLS}
    self._output, self._started = output, False
    self._pool = pydantic_monty.Monty(min_processes=0, max_processes=workers)  # they start when needed
    self._pool.__enter__()

  def run(self, code: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """Returns what a program printed, and its error if it failed (`ZeroDivisionError: division by zero`).

    As at a prompt, the value of a last line that is an expression is shown if nothing was printed. May be
    called from several threads. The program may call the `functions` by name; they run on the caller's
    thread.
    """
    printed, error = '', ''

    def show(_: str, text: str) -> None:
      nonlocal printed
      if len(printed) > self._output:
        return  # it was sent before the program ended
      printed = (printed + text)[:self._output + 1]  # one too many tells that there was more
      if len(printed) > self._output:
        os.kill(worker, signal.SIGKILL)  # nothing else stops it at once; the pool starts another

    bounded = {name: _bounded(function) for name, function in (functions or {}).items()}
    try:
      with self._pool.checkout(limits=self._limits, os_policy=POLICY,
                               external_modules={'statistics': STATISTICS}) as session:
        worker, self._started = session.worker_pid, True
        session.feed_run(_value_kept(code), inputs={'value__': None}, print_callback=show,
                         external_lookup=bounded)
        if not printed:
          session.feed_run(SHOW_VALUE, print_callback=show)
    except (pydantic_monty.MontyRuntimeError, pydantic_monty.MontySyntaxError) as failure:
      # The time or memory that it took differs from run to run.
      error = re.sub(r'(limit exceeded): .*', r'\1', failure.display('type-msg'))
    except pydantic_monty.MontyError:  # its worker died; the pool has another
      if not self._started:  # none has ever lived: $MONTY_BIN is no Monty, and every program would fail
        raise
      error = 'CrashedError: the program was ended'
    if len(printed) > self._output:
      return printed + '… (output cut)\n'
    return printed + (f'{error[:self._output]}\n' if error else '')

  def close(self) -> None:
    """Ends the workers; nothing can be run any more."""
    self._pool.__exit__(None, None, None)


def _value_kept(code: str) -> str:
  """Returns the program with the value of its last line, if that is an expression, as `value__`, to be
  printed in the sandbox: a list that holds a text a million times would be gigabytes here."""
  try:
    program = ast.parse(code, '<program>')
    if program.body and isinstance(last := program.body[-1], ast.Expr):
      target = ast.Name('value__', ast.Store())
      program.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
      return ast.unparse(ast.fix_missing_locations(program))
  except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
    pass  # it is broken, or of a newer syntax
  return code


TOOL = declare('python', PythonArguments, lambda node, arguments, show: [
  RunPython(node, arguments.code, tuple(node.tree.question.metadata.get('table') or ()), show)])
