import io

from rich.console import Console

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import terminal
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.trees.tree import Stop, Tree


def shown(act, width=80):
  console = Console(file=io.StringIO(), width=width, color_system=None)
  act(console)
  return [line.rstrip() for line in console.file.getvalue().splitlines()]


def answered(answer, *gold):
  tree = Tree(None, Question('1', 'Who?', gold))
  tree.answer = answer
  return shown(lambda console: terminal.close(console, tree))


def test_elements_stand_on_lines_of_their_own_behind_their_names_and_nothing_is_lost():
  text = 'so <think> Find it.</think><search> [bold]Oviedo</search> end <original_evidence>e</original_evidence>'
  lines = shown(lambda console: terminal.say_policy(console, text))
  assert [line.split() for line in lines] == [
    ['so'], ['think', 'Find', 'it.'], ['search', '[bold]Oviedo'], ['end'], ['original_evidence', 'e']]


def test_every_reply_has_a_word_that_says_what_it_is():
  def act(console):
    terminal.show(console, [Document('1', 'Title [x]', 'Text.', 1.0)])
    terminal.show(console, [])
    terminal.show(console, ToolFailure('down'))
    terminal.show(console, 'printed')
    terminal.show(console, [[-0.5], None])  # scores are not shown

  assert [line.strip() for line in shown(act)] == [
    'found  Title [x]: Text.', 'found  nothing', 'failed  down', 'output  printed']


def test_long_text_is_wrapped_behind_its_word():
  lines = shown(lambda console: terminal.show(console, [Document('1', 'T', 'word ' * 30 + 'x' * 90)]))
  assert len(lines) > 3 and max(map(len, lines)) <= 80
  assert lines[0].startswith('   found  T: word') and all(line.startswith(' ' * 10) for line in lines[1:])
  assert ''.join(lines).count('x') == 90


def test_what_a_tool_wrote_cannot_steer_the_terminal():
  lines = shown(lambda console: terminal.show(console, ToolFailure('\x1b[2J\x07gone\rover')))
  assert '\x1b' not in lines[0] and '\r' not in lines[0] and 'gone over' in lines[0]


def test_the_last_line_says_right_or_wrong_where_that_is_known():
  assert answered('ada', 'Ada') == ['ada  right'] and answered('bob', 'Ada') == ['bob  wrong'] and answered('bob') == ['bob']


def test_no_answer_says_why():
  tree = Tree(None, Question('1', 'Who?', ()))
  tree.stop = Stop.CONTEXT_FULL
  assert shown(lambda console: terminal.close(console, tree)) == ['no answer: context full']
