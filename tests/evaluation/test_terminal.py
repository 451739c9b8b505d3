import io

from rich.console import Console

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import terminal
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.trees.tree import Stop, Tree


def shown(act):
  console = Console(file=io.StringIO(), width=100, color_system=None)
  act(console)
  return console.file.getvalue()


def test_elements_stand_on_lines_of_their_own_and_nothing_is_lost():
  text = terminal.coloured('so <think> Find it.</think><search> [bold]Oviedo</search> end').plain
  assert [line.split() for line in text.splitlines()] == [
    ['so', 'think', 'Find', 'it.'], ['search', '[bold]Oviedo'], ['end']]


def test_documents_failures_and_answers():
  tree = Tree(None, Question('1', 'Who?', ('Ada',)))
  tree.answer = 'ada'

  def act(console):
    terminal.show(console, tree, [Document('1', 'Title [x]', 'Text.', 1.0)])
    terminal.show(console, tree, [])
    terminal.show(console, tree, ToolFailure('down'))
    terminal.show(console, tree, [[Document('2', 'Second', 'More.')], ToolFailure('busy')])  # replies to a list of requests
    terminal.show(console, tree, 'printed')
    terminal.show(console, tree, [[-0.5], None])  # scores are not shown
    terminal.close(console, tree)

  lines = shown(act).splitlines()
  assert [line.strip() for line in lines] == [
    'Title [x]  Text.', 'nothing found', 'search failed: down', 'Second  More.', 'search failed: busy', 'printed', 'ada  right']


def test_no_answer_says_why():
  tree = Tree(None, Question('1', 'Who?', ()))
  tree.stop = Stop.CONTEXT_FULL
  assert 'no answer: context full' in shown(lambda console: terminal.close(console, tree))
