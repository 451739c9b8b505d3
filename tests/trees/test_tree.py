"""Trees of spans: what append records and refuses, paths, order and counts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role, Stop, Tree, spans
from tests.methods.driving import Letters


@pytest.fixture
def tree():
  return Tree(Letters())


def test_text_is_tokenised_and_ids_are_kept_as_they_are(tree):
  prompt = tree.root.append('ab', Role.PROMPT)
  policy = prompt.append([7, 8, 9], Role.POLICY, sampler_logprobs=[-1, -2, -3])
  assert prompt.tokens == [97, 98] and prompt.text == 'ab'
  assert policy.tokens == [7, 8, 9] and policy.sampler_logprobs == [-1.0, -2.0, -3.0]
  assert policy.path_tokens() == [97, 98, 7, 8, 9]


def test_paths_order_and_counts(tree):
  prompt = tree.root.append('abc', Role.PROMPT)
  first = prompt.append('de', Role.POLICY)
  second = prompt.append('f', Role.POLICY)
  seen = first.append('observed', Role.OBSERVATION)
  leaf = second.append('', Role.OBSERVATION).append('ghi', Role.POLICY)
  assert list(tree.walk()) == [tree.root, prompt, first, seen, second, leaf.parent, leaf]
  assert tree.leaves() == [seen, leaf] and tree.nodes(Role.POLICY) == [first, second, leaf]
  assert leaf.path() == [tree.root, prompt, second, leaf.parent, leaf]
  assert leaf.length == 7 and tree.tokenizer.decode(leaf.path_tokens()) == 'abcfghi'
  assert tree.count() == 3 + 2 + 1 + 8 + 3 and tree.count(Role.POLICY) == 6  # a shared prefix counts once
  assert [node.trained for node in (prompt, first, seen)] == [False, True, False]


def test_logprobs_that_do_not_fit_are_refused(tree):
  with pytest.raises(ValueError, match='2 log-probabilities for a span of 3 tokens'):
    tree.root.append('abc', Role.POLICY, sampler_logprobs=[-1, -1])
  with pytest.raises(ValueError, match='observation span'):
    tree.root.append('a', Role.OBSERVATION, sampler_logprobs=[-1])
  assert tree.root.children == []


def test_pruning_drops_what_bears_no_loss_and_leads_to_none():
  tree = Tree(tokenizer=None)
  prompt = tree.root.append([1, 2], Role.PROMPT)
  kept = prompt.append([3], Role.POLICY)
  seen = kept.append([4, 5], Role.OBSERVATION)
  last = seen.append([6], Role.POLICY)
  last.append([7, 8], Role.OBSERVATION).append([], Role.POLICY)
  prompt.append([9], Role.OBSERVATION)
  tree.prune()
  assert list(tree.walk()) == [tree.root, prompt, kept, seen, last]
  kept.trained = last.trained = False
  tree.prune()
  assert tree.count() == 0


def test_a_chain_of_5000_spans_with_branches_survives_json():
  tree = Tree(Letters(), Question('1', 'Which?', ('a',)), np.random.default_rng(3))
  node = tree.root
  for number in range(5000):
    if number % 500 == 0:
      node.append([9000], Role.POLICY, sampler_logprobs=[-1.0])
    node = node.append([number, 1], Role.POLICY, sampler_logprobs=[-1.0, -2.0])
  node.append([7], Role.POLICY, sampler_logprobs=[-1.0])
  copy = Tree.from_json(json.loads(json.dumps(tree.to_json())), Letters(), tree.question)
  for one in (tree, copy):
    one.prune()
    assert lay_out([one], 20000, pad_id=0).real.sum() == one.count() == 10011
  assert copy.leaves()[-1].path_tokens() == tree.leaves()[-1].path_tokens()


FINITE = st.floats(allow_nan=False, allow_infinity=False)
NOTES = st.recursive(st.none() | st.booleans() | st.integers() | st.text() | FINITE,
                     lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
LOGPROBS = st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0), st.sampled_from(Role), LOGPROBS, st.booleans(),
                          st.none() | st.floats(-3, 3)),
                max_size=6), st.dictionaries(st.sampled_from(['calls', 'reward', 'mine']), NOTES),
                st.floats(0, 9, width=32))
def test_a_tree_comes_back_from_json_to_the_bit(grown, notes, score):
  question = Question('q', 'Who?', ('x',))
  tree = Tree(Letters(), question, np.random.default_rng(7))
  nodes = [tree.root]
  for parent, role, logprobs, trained, advantage in grown:
    policy = role is Role.POLICY
    node = nodes[parent % len(nodes)].append(range(len(logprobs)), role,
                                             sampler_logprobs=logprobs if policy else None)
    node.trained, node.stop, node.advantages = policy and trained, '</search>' if policy else None, advantage
    node.data.update(notes, documents=[Document('1', 'Titel', 'é\U0001f600', np.float32(score))])
    nodes.append(node)
  tree.root.data.update(notes)
  tree.answer, tree.stop, tree.metrics['found'] = 'x', Stop.CONTEXT_FULL, np.int64(2)
  tree.rng.random(3)
  record = tree.to_json()
  back = Tree.from_json(json.loads(json.dumps(record)), Letters(), question)
  fields = ('role', 'tokens', 'sampler_logprobs', 'trained', 'stop', 'advantages', 'data', 'length')
  assert [[getattr(node, name) for name in fields] for node in back.walk()] == [
    [getattr(node, name) for name in fields] for node in tree.walk()]
  assert (back.answer, back.stop, back.reward, back.metrics) == (tree.answer, tree.stop, None, tree.metrics)
  assert back.stop is Stop.CONTEXT_FULL and back.metrics['missing'] == 0 and back.question is question
  assert record['id'] == 'q' and back.to_json() == record and back.rng.random() == tree.rng.random()


def test_a_note_that_json_does_not_hold_is_named(tree):
  tree.root.data['note'] = object
  with pytest.raises(TypeError, match='object.* on a tree cannot be saved'):
    tree.to_json()


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


def test_siblings_that_were_not_continued_are_shown_as_dropped():
  kept = siblings(['aB'], 'x')
  assert dropped(kept) == {'a', 'no answer'} and dropped(siblings(['aB', 'cd'])) == {'a', 'c', 'd'}
  assert [span.get('parent') for span in spans(kept)] == [None, None, 0, None, None, 3]
  search = siblings(['A'])
  search.nodes(Role.OBSERVATION)[0].append('w', Role.POLICY).append('deeper', Role.POLICY)
  other = search.root.children[0].append('o', Role.POLICY).append('found o', Role.OBSERVATION)
  other.append('nothing', Role.POLICY)
  other.append('x', Role.POLICY)
  search.answer = 'x'  # of a search the branch with the answer is kept
  assert dropped(search) == {'A', 'found A', 'w', 'deeper', 'nothing'}


def test_what_a_review_cut_off_is_shown_as_dropped():
  drafts = siblings(['A', 'B'])
  first, cut = drafts.nodes(Role.POLICY)
  review = drafts.leaves()[0].append('Which step?', Role.PROMPT).append(' 2', Role.POLICY)
  for node in cut.walk():
    node.trained = node is review
  first.children[0].append('x', Role.POLICY)
  drafts.answer = 'x'
  assert dropped(drafts) == {'B', 'found B', 'Which step?', ' 2'}
