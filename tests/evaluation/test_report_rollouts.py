"""Rollouts on the page of a run: credit as colours, branches below their parents, nothing of a model's as HTML."""

import html.parser
import json

import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.evaluation import report
from jaxsearch.evaluation.run import predictions
from jaxsearch.trees.spans_shown import spans
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.evaluation.test_competence import RIGHT, Letters, grown

ROW = {'temperature': 0.0, 'em': 1.0, 'f1': 1.0, 'searches': 1.0, 'n': 1}


def page_of(folder, first, last):
  """The page of a run whose evaluations have one sample each."""
  folder.mkdir()
  rows = [ROW | {'step': step, 'samples': [sample]} for step, sample in ((0, first), (5, last))]
  (folder / 'evaluations.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return report.write_report(folder).read_text()


class Balance(html.parser.HTMLParser):
  """Which elements are open, and the text."""

  def __init__(self):
    super().__init__()
    self.open, self.text = [], ''

  def handle_starttag(self, tag, attrs):
    self.open += [tag] if tag not in ('br', 'meta', 'img', 'source') else []

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def test_a_strip_shows_every_advantage_and_escapes_what_was_written(tmp_path):
  (record,) = predictions([grown([('<script>x</script>', '<b>kept</b>')], [0.3, 0.72, 0.45], 0.0, answer='x')])
  plain = {'question': '?', 'golden_answers': [], 'em': 0.0, 'spans': []}
  page = page_of(tmp_path / 'run', plain, record)
  balance = Balance()
  balance.feed(page[page.index('<body>'):page.index('</html>')])
  assert not balance.open and '<script' not in page and '<b>kept' not in page and '&lt;script&gt;' in page
  for shown in ('+0.42', '−0.27', '−0.45'):
    assert balance.text.count(shown) == 2  # in the cell and at the text
  assert all(shown in balance.text for shown in ('V 0.30', 'V 0.72', 'V 0.45', 'forgotten'))
  assert 'R0' in balance.text  # the outcome
  assert report.colour(0.42) in page and 'Where is' not in balance.text  # no prompt
  assert balance.text.count('forgotten') == 1  # the clean copy stays
  assert 'branch' not in balance.text  # reading and forgetting is no branch


def test_colours_grow_with_the_advantage_and_part_at_nothing():
  def channels(advantage):
    return [int(report.colour(advantage)[i:i + 2], 16) for i in (1, 3, 5)]
  assert channels(0.0) == [255] * 3 and report.colour(0.5) == report.colour(0.9)
  for sign, strong in ((1, 2), (-1, 0)):  # blue, red
    weak, full = channels(0.1 * sign), channels(0.5 * sign)
    assert sum(full) < sum(weak) < 3 * 255 and full[strong] == max(full)


def test_the_report_shows_the_strips_of_credited_rollouts_and_old_files_as_before(tmp_path):
  credited, plain = grown([RIGHT], [0.3, 0.5, 0.8]), grown([RIGHT])
  per_token = grown([], [0.5])
  per_token.nodes(Role.POLICY)[0].advantages = np.ones(3)
  records = json.loads(json.dumps(predictions([credited, plain, per_token])))
  spans = [record['spans'] for record in records]
  invoke = next(span for span in spans[0] if span.get('segment') == 'invoke')
  assert (invoke['value'], invoke['advantage']) == pytest.approx((0.3, 0.2))
  assert not any({'advantage', 'value'} & span.keys() for span in spans[1])
  assert 'advantage' not in spans[2][-1] and spans[2][-1]['value'] == 0.5
  assert not any({'parent', 'dropped'} & span.keys() for own in spans for span in own)
  old = records[1] | {'spans': [{'role': s['role'], 'text': s['text']} for s in spans[1]]}
  new_page, old_page = page_of(tmp_path / 'new', old, records[0]), page_of(tmp_path / 'old', old, old)
  assert '+0.30' in new_page and new_page.count('forgotten after') == 1
  assert 'advantage' not in old_page and 'class="text observation">&lt;output&gt;He died' in old_page


def siblings(steps, answer=None):
  """A tree of SLATE: at each step as many siblings as letters, of which the capital one is continued."""
  tree = Tree(Letters(), Question('q', 'Who?', ('x',)))
  node = tree.root.append('Who?', Role.PROMPT)
  for letters in steps:
    found = {letter: node.append(f'<search> {letter} </search>', Role.POLICY) for letter in letters}
    chosen = next((own for letter, own in found.items() if letter.isupper()), None)
    node = chosen and chosen.append(f'found {chosen.text}', Role.OBSERVATION)
  if node and answer:
    node.append('<answer> y </answer>', Role.POLICY)
    node.append(f'<answer> {answer} </answer>', Role.POLICY)
  tree.answer, tree.stop, tree.metrics = answer, Stop.ANSWERED, {'searches': len(steps)}
  return tree


def shown(tree):
  recorded = json.loads(json.dumps(spans(tree)))
  return [(block['text'], block['depth'], block['branch'], block['dropped']) for block in report.blocks(recorded)]


def test_siblings_stand_below_their_parent_and_before_the_one_that_was_kept():
  search = '<search> {} </search>'.format
  assert shown(siblings(['aBc', 'De'], 'x')) == [
    (search('a'), 1, '1 of 3', True), (search('c'), 1, '3 of 3', True), (search('B'), 0, '2 of 3', False),
    ('found ' + search('B'), 0, '', False),
    (search('e'), 1, '2 of 2', True), (search('D'), 0, '1 of 2', False), ('found ' + search('D'), 0, '', False),
    ('<answer> y </answer>', 1, '1 of 2', True), ('<answer> x </answer>', 0, '2 of 2', False)]


def test_without_an_answer_the_branch_that_grew_on_was_kept_and_dead_ends_were_not():
  assert [row[1:] for row in shown(siblings(['aB', 'cd']))] == [
    (1, '1 of 2', True), (0, '2 of 2', False), (0, '', False), (1, '1 of 2', True), (1, '2 of 2', True)]


def test_a_revision_stands_behind_the_draft_that_it_replaces():
  tree = siblings(['A', 'B'])  # a draft whose second step is cut off by a review
  first, cut = tree.nodes(Role.POLICY)
  review = tree.leaves()[0].append('Which step is flawed?', Role.PROMPT).append(' 2', Role.POLICY)
  for node in cut.walk():
    node.trained = node is review
  first.children[0].append('<answer> x </answer>', Role.POLICY)
  tree.answer = 'x'
  assert [(text, depth, branch) for text, depth, branch, _ in shown(tree)] == [
    ('<search> A </search>', 0, ''), ('found <search> A </search>', 0, ''),
    ('<search> B </search>', 1, '1 of 2'), ('found <search> B </search>', 1, ''), ('Which step is flawed?', 1, ''), (' 2', 1, ''),
    ('<answer> x </answer>', 0, '2 of 2')]


def test_the_best_path_of_a_tree_search_is_the_one_with_the_answer():
  tree = siblings(['A'])
  wrong = tree.nodes(Role.OBSERVATION)[0].append('<search> w </search>', Role.POLICY)
  for text in ('deeper', 'and deeper'):
    wrong = wrong.append(text, Role.POLICY)
  other = tree.root.children[0].append('<search> o </search>', Role.POLICY).append('found o', Role.OBSERVATION)
  dead, good = other.append('nothing', Role.POLICY), other.append('<answer> x </answer>', Role.POLICY)
  tree.answer = 'x'
  rows = {text: (depth, dropped) for text, depth, _, dropped in shown(tree)}
  assert rows['<search> A </search>'] == rows['and deeper'] == (1, True)
  assert rows['<search> o </search>'] == rows['<answer> x </answer>'] == (0, False) and rows['nothing'] == (1, True)
  assert good.parent is dead.parent


def test_the_page_says_which_branch_was_kept(tmp_path):
  tree = siblings(['aB'], 'x')
  for number, node in enumerate(tree.nodes(Role.POLICY)):
    node.advantages = 0.1 * number
  (record,) = predictions([tree])
  page = page_of(tmp_path / 'run', record, record)
  assert page.count('branch 1 of 2, dropped') == 4 and page.count('branch 2 of 2, kept') == 4
  assert page.count('class="span dropped"') == 4 and 'The solid line is the path that was kept' in page
