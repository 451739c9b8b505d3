"""A sandbox for Python that a model wrote: CARL's tool.

The interpreter is `pydantic-monty`, a subset of Python in subprocesses of its own: no files, no network, no imports but a few
of the standard library (`MODULES`), limits on time, memory, recursion and calls of host functions. A program can call only the
host functions that `run` is given, and those of `statistics`, which monty does not have. `fractions` it cannot have: objects
with operators do not cross. Whatever a program does ends as text, never as an exception of ours.
"""

import ast
import contextlib
import datetime
import os
import re
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic_monty

CALLS = 32  # of host functions and look-ups of their names, in one program
# A program's output depends on its text alone: the clock stands, nothing sleeps, random numbers are seeded.
MODULES = ('math', 're', 'json', 'datetime', 'decimal', 'statistics', 'itertools', 'collections', 'functools', 'random')
NUMBERS = 10_000  # of a call of `statistics`, which runs here, without the sandbox's limits
POLICY = {'datetime': datetime.datetime(2026, 1, 1), 'sleep': 'zero', 'random_start': {'seed': 0}}


_starting = threading.Lock()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
  """A context in which a new process does not get our stderr. A worker opens /dev/null in its place, and what it says when it
  crashes does not end up on the terminal."""
  with _starting:
    try:
      before = os.get_inheritable(2)
      os.set_inheritable(2, False)
    except OSError:  # we have none either
      before = None
    try:
      yield
    finally:
      if before is not None:
        os.set_inheritable(2, before)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
  def call(*arguments, **named):
    for numbers in (*arguments, *named.values()):
      if isinstance(numbers, (list, tuple)) and (len(numbers) > NUMBERS or any(
          isinstance(number, int) and number.bit_length() > 256 for number in numbers)):
        raise ValueError(f'statistics takes at most {NUMBERS} numbers of 256 bits')
    return function(*arguments, **named)
  return call


STATISTICS = pydantic_monty.ExternalModule({name: _bounded(getattr(statistics, name)) for name in (
  'mean', 'fmean', 'median', 'median_low', 'median_high', 'mode', 'stdev', 'pstdev', 'variance', 'pvariance')})


class PythonSandbox:
  """Runs programs, several at a time, each from a clean state.

  Args:
    seconds: of computing for one program; time in host functions does not count.
    memory: MiB of its heap.
    output: characters of its output that are kept.
    workers: programs at a time.
  """

  def __init__(self, *, seconds: float = 2.0, memory: int = 64, output: int = 4000, workers: int = 4):
    if seconds <= 0 or memory < 1 or output < 1 or workers < 1:
      raise ValueError(f'a sandbox of {seconds} s, {memory} MiB, {output} characters, {workers} workers: all more than 0')
    self._limits = {'max_feed_duration_secs': float(seconds), 'max_memory': memory << 20,
                    'max_recursion_depth': 100, 'max_suspensions': CALLS}
    self._output, self._pool = output, pydantic_monty.Monty(min_processes=0, max_processes=workers)  # workers start when needed
    self._pool.__enter__()

  def run(self, code: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """What a program printed, and its error if it failed (`ZeroDivisionError: division by zero`).

    As at a prompt, the value of a last line that is an expression is shown if nothing was printed. May be called from
    several threads. The program may call the `functions` by name; they run on the caller's thread.
    """
    printed, error = '', ''

    def show(_: str, text: str) -> None:
      nonlocal printed
      printed = (printed + text)[:self._output + 1]  # one too many tells below that there was more

    try:
      with contextlib.ExitStack() as stack:
        with _quiet_start():
          session = stack.enter_context(self._pool.checkout(limits=self._limits, os_policy=POLICY,
                                                            external_modules={'statistics': STATISTICS}))
        session.feed_run(_value_kept(code), external_lookup=dict(functions or {}), print_callback=show)
        if not printed:
          session.feed_run('print("" if value__ is None else value__, end="")', print_callback=show)
    except (pydantic_monty.MontySyntaxError, pydantic_monty.MontyRuntimeError) as failure:
      # The time or memory that it took differs from run to run.
      error = re.sub(r'(limit exceeded): .*', r'\1', failure.display('type-msg'))
    except pydantic_monty.MontyError:  # its worker died; the pool has another
      error = 'CrashedError: the program was ended'
    cut = '… (output cut)\n' if len(printed) > self._output else ''
    return printed + cut + (f'{error[:self._output]}\n' if error else '')

  def close(self) -> None:
    """Ends the workers; nothing can be run any more."""
    self._pool.__exit__(None, None, None)


_PARSING = threading.Lock()  # filters of warnings are of the whole process


def _value_kept(code: str) -> str:
  """The program with the value of its last line, if that is an expression, as `value__`, to be printed in the sandbox.

  A value that leaves the sandbox is written out whole: a list that holds a text a million times would be gigabytes here.
  """
  try:
    with _PARSING, warnings.catch_warnings(action='ignore'):
      last = ast.parse(code).body[-1]
  except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError, SystemError):  # or a newer syntax: no value then
    return f'value__ = None\n{code}\nNone'
  if not isinstance(last, ast.Expr):
    return f'value__ = None\n{code}'
  lines = code.encode().splitlines(keepends=True)
  at = lambda line, column: sum(map(len, lines[:line - 1])) + column
  start, end = at(last.lineno, last.col_offset), at(last.end_lineno, last.end_col_offset)
  content = code.encode()
  return (b'value__ = None\n' + content[:start] + b'value__ = (' + content[start:end] + b')' + content[end:]).decode()
