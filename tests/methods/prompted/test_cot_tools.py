"""CoT + tools: programs whose output stays, answers before the first program refused with `always`."""

import pytest

from jaxsearch.methods.prompted import cot_tools
from jaxsearch.sampler.requests import RunPython, ToolFailure
from jaxsearch.trees.tree import Stop
from tests.methods.prompted.asking import Q, ask, shown

PROGRAM = 'I count.\n```python\nprint(1)\n```\n'
ANSWER = r'It is \boxed{7}.'


@pytest.mark.parametrize('always, call', [(False, 'may'), (True, 'must')])
def test_the_output_stays(always, call, tmp_path):
  tree, requests, observations = ask(cot_tools, tmp_path, [PROGRAM, PROGRAM, ANSWER], printed='7',
                                     always=always, max_tokens=90)
  output = '<output>7</output>\n'
  assert shown(requests) == [f'{call} {Q}:', f'{call} {Q}:{PROGRAM}{output}',
                             f'{call} {Q}:{(PROGRAM + output) * 2}']
  assert [one.code for one in requests if isinstance(one, RunPython)] == ['print(1)'] * 2
  assert requests[0].max_tokens == 90
  assert (tree.answer, tree.stop, tree.metrics['searches']) == ('7', Stop.ANSWERED, 2)


def test_always_refuses_an_answer_before_the_first_program(tmp_path):
  tree, requests, observations = ask(cot_tools, tmp_path, [ANSWER, PROGRAM, ANSWER], printed='7', always=True)
  assert observations[0] == cot_tools.REFUSED
  assert (tree.answer, tree.metrics['refused'], tree.metrics['searches']) == ('7', 1, 1)
  tree, *_ = ask(cot_tools, tmp_path, [ANSWER] * 2, always=True, max_turns=1)
  assert tree.answer == '7' and tree.metrics['refused'] == 1  # it has to end


@pytest.mark.parametrize('last, printed, stop', [
  (PROGRAM, '7', Stop.BUDGET), ('Hm.', '7', Stop.MALFORMED),
  (PROGRAM, ToolFailure('down'), Stop.TOOL_FAILED)])
def test_turns_are_limited(last, printed, stop, tmp_path):
  tree, requests, observations = ask(cot_tools, tmp_path, [PROGRAM, last], printed=printed, max_turns=1)
  assert (tree.answer, tree.stop, tree.metrics['malformed']) == (None, stop, stop is Stop.MALFORMED)
  failed = stop is Stop.TOOL_FAILED
  assert ('The tool failed: down' in observations[0]) == failed == tree.metrics['tool_failures']


def test_output_can_be_forgotten(tmp_path):
  said = [PROGRAM, '<context> seven </context>', ANSWER]
  tree, requests, _ = ask(cot_tools, tmp_path, said, printed='7', forget=True)
  assert shown(requests)[1:] == [f'may {Q}:{PROGRAM}<output>7</output>\n',
                                 f'may {Q}:{PROGRAM}<context>seven</context>\n']
  assert tree.answer == '7'
