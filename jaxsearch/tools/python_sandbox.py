"""A sandbox for Python that a model wrote: CARL's tool.

The interpreter is `pydantic-monty`, a subset of Python in subprocesses of its own: no files, no network, no
imports but a few of the standard library (`MODULES`), limits on time, memory, recursion and calls of host
functions. A program can call only the host functions that `run` is given, and those of `statistics`, which
monty does not have. `fractions` it cannot have: objects with operators do not cross. Whatever a program does
ends as text, never as an exception of ours.

Host functions run without the sandbox's limits, so they take only a few flat, short values: whatever a
program passes, their work is small. Errors are cut inside the sandbox, and a program that prints more than is
kept is ended.
"""

import ast
import contextlib
import datetime
import os
import re
import signal
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic_monty

CALLS = 32  # of host functions and look-ups of their names, in one program
# A program's output depends on its text alone: the clock stands, nothing sleeps, random numbers are seeded.
MODULES = ('math', 're', 'json', 'datetime', 'decimal', 'statistics', 'itertools', 'collections', 'functools',
           'random')
# What a host function takes. Thirty calls of the slowest one, a deviation of floats of all sizes, take 0.1 s.
ARGUMENTS, ITEMS, BITS, CHARACTERS = 8, 1000, 256, 1000
POLICY = {'datetime': datetime.datetime(2026, 1, 1), 'sleep': 'zero', 'random_start': {'seed': 0}}


_starting = threading.Lock()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
  """A context in which a new process does not get our stderr. A worker opens /dev/null in its place, and what
  it says when it crashes does not end up on the terminal."""
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
  """The function, for numbers, texts and lists of these within the limits above.

  Raises ValueError for anything else.
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


# Runs a program among names of its own, from which it reaches neither `run` nor the host. What it raises is
# cut here: 30 MB of a message would be 85 MiB on the host.
RUN = """
def run(code, names, most):
  try:
    exec(code, names)
  except BaseException as error:
    text = str(error)[:most]
    return type(error).__name__ + (': ' if text else '') + text
names = {'value__': None, %s}
run(code, names, most)
"""
SHOW_VALUE = "run('if value__ is not None: print(value__, end=\"\")', names, most)"


class PythonSandbox:
  """Runs programs, several at a time, each from a clean state.

  Args:
    seconds: of computing for one program; time in host functions does not count.
    memory: MiB of its heap.
    output: characters of its output that are kept; a program that prints more is ended.
    workers: programs at a time.
  """

  def __init__(self, *, seconds: float = 2.0, memory: int = 64, output: int = 4000, workers: int = 4):
    if seconds <= 0 or memory < 1 or output < 1 or workers < 1:
      raise ValueError(f'a sandbox of {seconds} s, {memory} MiB, {output} characters, {workers} workers: '
                       'all more than 0')
    self._limits = {'max_feed_duration_secs': float(seconds), 'max_memory': memory << 20,
                    'max_recursion_depth': 101, 'max_suspensions': CALLS}  # RUN is one call of these
    self._output = output
    self._pool = pydantic_monty.Monty(min_processes=0, max_processes=workers)  # they start when needed
    self._pool.__enter__()

  def run(self, code: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """What a program printed, and its error if it failed (`ZeroDivisionError: division by zero`).

    As at a prompt, the value of a last line that is an expression is shown if nothing was printed. May be
    called from several threads. The program may call the `functions` by name; they run on the caller's
    thread.
    """
    functions, printed, error = functions or {}, '', None

    def show(_: str, text: str) -> None:
      nonlocal printed
      if len(printed) > self._output:
        return  # it was sent before the program ended
      printed = (printed + text)[:self._output + 1]  # one too many tells that there was more
      if len(printed) > self._output:
        os.kill(worker, signal.SIGKILL)  # nothing else stops it at once; the pool starts another

    try:
      with contextlib.ExitStack() as stack:
        with _quiet_start():
          session = stack.enter_context(self._pool.checkout(limits=self._limits, os_policy=POLICY,
                                                            external_modules={'statistics': STATISTICS}))
        worker = session.worker_pid
        names = ', '.join(f'{name!r}: {name}' for name in functions)
        error = session.feed_run(
          RUN % names, inputs={'code': _value_kept(code), 'most': self._output}, print_callback=show,
          external_lookup={name: _bounded(function) for name, function in functions.items()})
        if not printed and not error:
          error = session.feed_run(SHOW_VALUE, print_callback=show)
    except pydantic_monty.MontyRuntimeError as failure:
      # The time or memory that it took differs from run to run.
      error = re.sub(r'(limit exceeded): .*', r'\1', failure.display('type-msg'))
    except pydantic_monty.MontyError:  # its worker died; the pool has another
      error = 'CrashedError: the program was ended'
    if len(printed) > self._output:
      return printed + '… (output cut)\n'
    return printed + (f'{error[:self._output]}\n' if error else '')

  def close(self) -> None:
    """Ends the workers; nothing can be run any more."""
    self._pool.__exit__(None, None, None)


_PARSING = threading.Lock()  # filters of warnings are of the whole process


def _value_kept(code: str) -> str:
  """The program with the value of its last line, if that is an expression, as `value__`, to be printed in the
  sandbox.

  A value that leaves the sandbox is written out whole: a list that holds a text a million times would be
  gigabytes here.
  """
  try:
    with _PARSING, warnings.catch_warnings(action='ignore'):
      last = ast.parse(code).body[-1]
  except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError, SystemError):
    return code  # it is broken, or of a newer syntax
  if not isinstance(last, ast.Expr):
    return code
  lines = code.encode().splitlines(keepends=True)
  at = lambda line, column: sum(map(len, lines[:line - 1])) + column
  start, end = at(last.lineno, last.col_offset), at(last.end_lineno, last.end_col_offset)
  content = code.encode()
  return (content[:start] + b'value__ = (' + content[start:end] + b')' + content[end:]).decode()
