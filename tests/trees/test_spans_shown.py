"""Branches of a tree that are shown as dropped."""

from jaxsearch.data.questions import Question
from jaxsearch.trees.spans_shown import spans
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters


def siblings(steps, answer=None):
  """A tree of SLATE: at each step as many siblings as letters, of which the capital one is continued."""
  tree = Tree(Letters(), Question('q', 'Who?', ('x',)))
  node = tree.root.append('Who?', Role.PROMPT)
  for letters in steps:
    written = {letter: node.append(letter, Role.POLICY) for letter in letters}
    chosen = next((child for letter, child in written.items() if letter.isupper()), None)
    node = chosen and chosen.append(f'found {chosen.text}', Role.OBSERVATION)
  if node and answer:
    node.append('no answer', Role.POLICY)
    node.append(answer, Role.POLICY)
  tree.answer = answer
  return tree


def dropped(tree):
  return {span['text'] for span in spans(tree) if span.get('dropped')}


def test_siblings_that_were_not_continued_are_dropped():
  kept = siblings(['aB'], 'x')
  assert dropped(kept) == {'a', 'no answer'} and dropped(siblings(['aB', 'cd'])) == {'a', 'c', 'd'}
  assert [span.get('parent') for span in spans(kept)] == [None, None, 0, None, None, 3]


def test_what_a_review_cut_off_is_dropped():
  drafts = siblings(['A', 'B'])
  first, cut = drafts.nodes(Role.POLICY)
  review = drafts.leaves()[0].append('Which step?', Role.PROMPT).append(' 2', Role.POLICY)
  for node in cut.walk():
    node.trained = node is review
  first.children[0].append('x', Role.POLICY)
  drafts.answer = 'x'
  assert dropped(drafts) == {'B', 'found B', 'Which step?', ' 2'}


def test_of_a_search_the_branch_with_the_answer_is_kept():
  search = siblings(['A'])
  search.nodes(Role.OBSERVATION)[0].append('w', Role.POLICY).append('deeper', Role.POLICY)
  other = search.root.children[0].append('o', Role.POLICY).append('found o', Role.OBSERVATION)
  other.append('nothing', Role.POLICY)
  other.append('x', Role.POLICY)
  search.answer = 'x'
  assert dropped(search) == {'A', 'found A', 'w', 'deeper', 'nothing'}
