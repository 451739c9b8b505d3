"""Trees survive JSON."""

import json

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees.records import from_record, to_record
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
