"""Lines that `ask` prints of a growing tree."""

import io

import pytest
from rich.console import Console

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import terminal
from jaxsearch.tools.calls import NoRoom, ToolFailure
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import Letters


def shown(act, *arguments):
  console = Console(file=io.StringIO(), width=80, color_system=None)
  act(console, *arguments)
  return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_elements_stand_on_lines_of_their_own_behind_their_names_and_nothing_is_lost():
  text = 'so <think> Find it.</think><search> [bold]Oviedo</search> end <answer>e</answer>'
  node = Tree(Letters(), Question('1', 'Who?', ())).root.append(text, Role.POLICY)
  assert [line.split() for line in shown(terminal.show, node)] == [
    ['so'], ['think', 'Find', 'it.'], ['search', '[bold]Oviedo'], ['end'], ['answer', 'e']]


@pytest.mark.parametrize(('reply', 'lines'), [
  ([Document('1', 'Title [x]', 'Text.', 1.0)], ['found  Title [x]: Text.']), ([], ['found  nothing']),
  (NoRoom(), ['found  no room to show it']),
  (ToolFailure('down'), ['failed  down']), ('printed', ['output  printed']), ([[-0.5], None], []),  # scores
  (ToolFailure('\x1b[2J\x07gone\rover'), ['failed   [2J gone over'])])  # cannot steer the terminal
def test_every_reply_has_a_word_that_says_what_it_is(reply, lines):
  assert [line.strip() for line in shown(terminal.show, reply)] == lines


@pytest.mark.parametrize(('answer', 'golds', 'line'), [
  ('ada', ('Ada',), 'ada  right'), ('bob', ('Ada',), 'bob  wrong'), ('bob', (), 'bob'),
  (None, ('Ada',), 'no answer: context full')])
def test_the_last_line_says_right_or_wrong_where_that_is_known(answer, golds, line):
  tree = Tree(None, Question('1', 'Who?', golds))
  tree.answer, tree.stop = answer, Stop.CONTEXT_FULL
  assert shown(terminal.close, tree) == [line]
