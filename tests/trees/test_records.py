"""Trees survive JSON."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees.records import from_record, grown_line, grown_tree, to_record
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import Letters


def test_a_tree_with_branches_comes_back():
  question = Question('q', 'Who?', ('x',))
  tree = Tree(Letters(), question)
  prompt = tree.root.append('Who?', Role.PROMPT)
  invoke = prompt.append('call', Role.POLICY, logprobs=[-1.0] * 4)
  invoke.data.update(segment='invoke', output='é')
  prompt.data['documents'] = [Document('1', 'Title', 'text')]  # is not kept
  invoke.append('raw', Role.OBSERVATION).append('context', Role.POLICY)
  invoke.append('copy', Role.CONTEXT).append('done', Role.POLICY)
  tree.answer, tree.reward, tree.stop, tree.metrics['searches'] = 'x', 1.0, Stop.ANSWERED, 1
  back = from_record(json.loads(json.dumps(to_record(tree))), Letters(), question)
  shape = lambda tree: [(node.role, node.tokens, node.data, node.trained, node.length) for node in tree.walk()]
  del prompt.data['documents']
  assert shape(back) == shape(tree)
  assert (back.answer, back.reward, back.stop, back.metrics) == ('x', 1.0, Stop.ANSWERED, tree.metrics)
  assert back.metrics['searches'] == 1 and back.metrics['found'] == 0
  assert json.dumps(to_record(back)) == json.dumps(to_record(tree))


NOTES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                     lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
LOGPROBS = st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0), st.sampled_from(Role), LOGPROBS, st.booleans(), st.none() | st.floats(-3, 3)),
                max_size=6), st.dictionaries(st.sampled_from(['calls', 'reward', 'mine']), NOTES), st.floats(0, 9, width=32))
def test_a_grown_tree_comes_back_to_the_bit(grown, notes, score):
  question, tree = Question('q', 'Who?', ('x',)), Tree(Letters(), Question('q', 'Who?', ('x',)), np.random.default_rng(7))
  nodes = [tree.root]
  for parent, role, logprobs, trained, advantage in grown:
    policy = role is Role.POLICY
    node = nodes[parent % len(nodes)].append(range(len(logprobs)), role, logprobs=logprobs if policy else None)
    node.trained, node.stop, node.advantages = policy and trained, '</search>' if policy else None, advantage if policy else None
    node.data.update(notes, documents=[Document('1', 'Titel', 'é\U0001f600', np.float32(score))])
    nodes.append(node)
  tree.root.data.update(notes)
  tree.answer, tree.stop, tree.metrics['found'] = 'x', Stop.CONTEXT_FULL, 2
  tree.rng.random(3)
  line = grown_line(tree)
  assert '\n' not in line
  back = grown_tree(json.loads(line), Letters(), question)
  fields = ('role', 'tokens', 'logprobs', 'trained', 'stop', 'advantages', 'data', 'length')
  assert [[getattr(node, name) for name in fields] for node in back.walk()] == [
    [getattr(node, name) for name in fields] for node in tree.walk()]
  assert (back.answer, back.stop, back.reward, back.metrics) == (tree.answer, tree.stop, None, tree.metrics)
  assert back.stop is Stop.CONTEXT_FULL and back.metrics['missing'] == 0 and back.question is question
  assert back.rng.random() == tree.rng.random()
