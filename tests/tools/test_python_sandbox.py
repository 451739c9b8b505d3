"""Programs that models write: what they may do, and that whatever they try ends as text."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pydantic_monty
import pytest

from jaxsearch.tools.python_sandbox import CALLS, MODULES, PythonSandbox
from jaxsearch.trees import templates


@pytest.fixture(scope='module')
def sandbox():
  found = PythonSandbox(seconds=0.5, memory=16, output=500, workers=2)
  yield found
  found.close()


def search(query, k=3):
  return f'{k} documents on {query}'


@pytest.mark.parametrize('code, printed', [
  ('print(347 * 28)', '9716\n'),
  ('import math\nprint(math.sqrt(16))', '4.0\n'),
  ('print(search("France", 2))', '2 documents on France\n'),
  ('print(sum(float(row[1]) for row in table()))', '4.5\n'),
  ('6 * 7', '42'),  # as at a prompt
  ('x = "é"; (x +\n "ü")  # said', 'éü'),
  ('print("a")\n6 * 7', 'a\n'),
  ('None', ''),
  ('for _ in range(3): x = _', ''),
])
def test_it_computes_searches_and_reads_tables(sandbox, code, printed):
  assert sandbox.run(code, {'search': search, 'table': lambda: [['a', '1.5'], ['b', '3']]}) == printed


@pytest.mark.parametrize('code, told', [
  ('while True: pass', 'TimeoutError'),
  ('[0] * 10**8', 'MemoryError'),
  ('10 ** 10 ** 8', 'MemoryError'),
  ('def f(n): return f(n + 1)\nf(0)', 'RecursionError'),
  ('import os\nprint(os.listdir("/"))', 'PermissionError'),
  ('open("/etc/passwd").read()', 'PermissionError'),
  ('__import__("os").system("ls")', 'NameError'),
  ('().__class__.__bases__[0].__subclasses__()', 'AttributeError'),
  ('eval("__import__(\'os\')")', 'Error'),
  ('for i in range(1000): search("x")', f'suspension limit {CALLS}'),
  ('1 / 0', 'ZeroDivisionError: division by zero'),
  ('print("hi"', 'SyntaxError'),
])
def test_hostile_and_broken_programs_end_as_text(sandbox, code, told):
  started = time.monotonic()
  assert told in sandbox.run(code, {'search': search})
  assert time.monotonic() - started < 10
  assert sandbox.run('print("still here")') == 'still here\n'


@pytest.mark.parametrize('code, printed', [
  ('from datetime import date\n(date(2020, 3, 1) - date(2020, 2, 1)).days', '29'),
  ('import json\njson.loads("{\\"a\\": [1]}")["a"]', '[1]'),
  ('import statistics\nprint(statistics.mean([1, 2, 4.5]), statistics.median([3, 1, 2]))', '2.5 2\n'),
  ('from statistics import stdev as s\nround(s([1, 2, 3, 4]), 4)', '1.291'),
  ('import statistics\nstatistics.mean([])', 'Error: mean requires at least one data point'),
  ('import statistics\nstatistics.mean([10**100] * 3)', 'ValueError'),
  ('import statistics\nstatistics.stdev([1] * 20000)', 'lists of at most 1000'),
])
def test_modules_that_models_use(sandbox, code, printed):
  assert printed in sandbox.run(code)


def test_every_prompt_names_every_function_and_module(sandbox):
  assert sandbox.run(''.join(f'import {name}\n' for name in MODULES)) == ''
  for name in ('carl', 'carl_forced', 'carl_multi_hop'):
    text = templates.find(name, 'policy')
    assert all(word in text for word in ('search(query, k)', 'table()', 'print', *MODULES)), name


def test_a_flood_of_output_ends_the_program_at_once():
  flooded, started = PythonSandbox(seconds=60, output=500), time.monotonic()
  text = flooded.run('while True: print("a" * 100)')
  assert time.monotonic() - started < 30 and len(text) < 1000
  assert text.startswith('aaaa') and text.endswith('… (output cut)\n')
  assert flooded.run('print("still here")') == 'still here\n'
  flooded.close()


@pytest.mark.parametrize('arguments', [
  '[[1]]', '{}', '"x" * 1001', '["x" * 1001]', '[1] * 1001', '[2 ** 256]', '*[1] * 9', 'k=[[1]]'])
def test_host_functions_take_a_few_flat_short_values(sandbox, arguments):
  seen = []
  functions = {'f': lambda *values, **named: seen.append(values)}
  assert 'ValueError: a function takes' in sandbox.run(f'f({arguments})', functions) and not seen
  assert sandbox.run('f("x" * 1000, [2 ** 255] * 1000, 1.5, None, True, ("a", 1))', functions) == ''
  assert len(seen) == 1


def test_what_was_printed_before_a_failure_is_kept(sandbox):
  assert sandbox.run('print("so far")\n1 / 0') == 'so far\nZeroDivisionError: division by zero\n'


def test_programs_share_nothing_and_are_functions_of_their_text(sandbox):
  sandbox.run('x = 5')
  assert 'NameError' in sandbox.run('print(x)')
  program = 'import random, datetime\nprint(random.random(), datetime.datetime.now())'
  assert sandbox.run(program) == sandbox.run(program)
  started = time.monotonic()
  sandbox.run('import time\ntime.sleep(30)')
  assert time.monotonic() - started < 10


def test_without_workers_it_is_no_program_that_fails(monkeypatch):
  monkeypatch.setenv('MONTY_BIN', '/bin/true')
  with pytest.raises(pydantic_monty.MontyError):
    PythonSandbox().run('1 + 1')


def test_several_programs_run_at_once(sandbox):
  both = threading.Barrier(2, timeout=20)  # passes only if two programs are in it at the same time

  def meet():
    both.wait()
    return 'met'

  with ThreadPoolExecutor(2) as pool:
    assert list(pool.map(sandbox.run, ['print(meet())'] * 2, [{'meet': meet}] * 2)) == ['met\n'] * 2


@pytest.mark.parametrize('code', ['while True: pass', 'print("a")\nfor i in range(10**9): pass'])
def test_what_is_told_of_a_limit_does_not_depend_on_the_clock(sandbox, code):
  told = {sandbox.run(code) for _ in range(2)}
  assert len(told) == 1 and 'limit exceeded\n' in told.pop()


@pytest.mark.parametrize('code', ['[s] * 20000', 'a = [1]\nfor i in range(30): a = [a, a]\na'])
def test_a_value_of_gigabytes_does_not_leave_the_sandbox(sandbox, code):
  before = psutil.Process().memory_info().rss
  started = time.monotonic()
  assert sandbox.run("s = 'x' * 100000\n" + code).count('x') < 600
  assert time.monotonic() - started < 10 and psutil.Process().memory_info().rss - before < 2**28
