"""Trees of spans: what append records and refuses, paths, order and counts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Metrics, Role, Stop, Tree


class Letters:
  """A tokenizer with a token per character that counts how often it was asked to encode."""
  encoded = 0

  def encode(self, text):
    self.encoded += 1
    return [ord(letter) for letter in text]

  def decode(self, ids):
    return ''.join(map(chr, ids))


@pytest.fixture
def tree():
  return Tree(Letters())


def test_text_is_tokenised_once_and_ids_are_kept_as_they_are(tree):
  prompt = tree.root.append('ab', Role.PROMPT)
  policy = prompt.append([7, 8, 9], Role.POLICY, sampler_logprobs=[-1, -2, -3])
  assert tree.tokenizer.encoded == 1
  assert prompt.tokens == [97, 98] and prompt.text == 'ab'
  assert policy.tokens == [7, 8, 9] and policy.sampler_logprobs == [-1.0, -2.0, -3.0]
  assert policy.path_tokens() == [97, 98, 7, 8, 9]
  assert tree.tokenizer.encoded == 1


def test_appended_ids_are_a_copy(tree):
  ids = [1, 2]
  node = tree.root.append(ids, Role.PROMPT)
  ids.append(3)
  assert node.tokens == [1, 2]


def test_paths_and_lengths(tree):
  prompt = tree.root.append('abc', Role.PROMPT)
  first = prompt.append('de', Role.POLICY)
  second = prompt.append('f', Role.POLICY)
  leaf = second.append('', Role.OBSERVATION).append('ghi', Role.POLICY)
  assert tree.root.length == 0 and prompt.length == 3 and first.length == 5 and leaf.length == 7
  assert leaf.path()[0] is tree.root and leaf.path()[-1] is leaf and second in leaf.path()
  assert first not in leaf.path()
  assert tree.tokenizer.decode(leaf.path_tokens()) == 'abcfghi'


def test_order_is_depth_first_in_order_of_appending(tree):
  a = tree.root.append('a', Role.PROMPT)
  b = a.append('b', Role.POLICY)
  c = a.append('c', Role.POLICY)
  d = b.append('d', Role.OBSERVATION)
  e = b.append('e', Role.POLICY)
  assert list(tree.walk()) == [tree.root, a, b, d, e, c]
  assert list(b.walk()) == [b, d, e]
  assert tree.leaves() == [d, e, c]
  assert tree.nodes(Role.POLICY) == [b, e, c]


def test_a_shared_prefix_counts_once(tree):
  prompt = tree.root.append('prompt', Role.PROMPT)
  prompt.append('abc', Role.POLICY)
  prompt.append('de', Role.POLICY).append('observed', Role.OBSERVATION)
  assert tree.count() == 6 + 3 + 2 + 8
  assert tree.count(Role.PROMPT) == 6
  assert tree.count(Role.POLICY) == 5
  assert tree.count(Role.OBSERVATION) == 8


def test_only_policy_spans_are_trained_unless_a_method_says_so(tree):
  trained = {role: tree.root.append('x', role).trained for role in Role}
  assert trained == {role: role is Role.POLICY for role in Role}


def test_logprobs_that_do_not_fit_are_refused(tree):
  with pytest.raises(ValueError, match='2 log-probabilities for a span of 3 tokens'):
    tree.root.append('abc', Role.POLICY, sampler_logprobs=[-1, -1])
  with pytest.raises(ValueError, match='observation span'):
    tree.root.append('a', Role.OBSERVATION, sampler_logprobs=[-1])
  assert tree.root.children == []


def test_nodes_are_told_apart_by_identity_and_print_shortly(tree):
  one, two = (tree.root.append('same', Role.POLICY) for _ in range(2))
  assert one != two and len({one, two}) == 2
  assert 'parent' not in repr(one) and len(repr(one)) < 300


def test_stop_reasons_are_plain_strings_in_reports():
  assert json.dumps({'stop': Stop.CONTEXT_FULL}) == '{"stop": "context_full"}'
  assert ' '.join(Stop) == 'answered budget context_full malformed tool_failed deadline'


def test_a_figure_that_is_missing_reads_as_0(tree):
  counts = {'searches': 0, 'malformed': 0, 'tool_failures': 0}
  assert tree.metrics == counts and tree.metrics['found'] == 0 and 'found' not in tree.metrics
  tree.metrics['found'] += 1
  copy = Metrics(json.loads(json.dumps(tree.metrics)))
  assert copy == counts | {'found': 1} and copy['turns'] == 0


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


NOTES = st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
                     lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
LOGPROBS = st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0), st.sampled_from(Role), LOGPROBS, st.booleans(), st.none() | st.floats(-3, 3)),
                max_size=6), st.dictionaries(st.sampled_from(['calls', 'reward', 'mine']), NOTES), st.floats(0, 9, width=32))
def test_a_tree_comes_back_from_json_to_the_bit(grown, notes, score):
  question = Question('q', 'Who?', ('x',))
  tree = Tree(Letters(), question, np.random.default_rng(7))
  nodes = [tree.root]
  for parent, role, logprobs, trained, advantage in grown:
    policy = role is Role.POLICY
    node = nodes[parent % len(nodes)].append(range(len(logprobs)), role, sampler_logprobs=logprobs if policy else None)
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
