"""StepSearch's rewards against a loop written from the paper, and where they end up."""

import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.methods import step_search
from jaxsearch.trees.tree import Role
from tests.methods.driving import context, drive

METADATA = {'gold_passages': ['p1', 'p2'], 'steps': [{'query': 'Ada Lovelace'}, {'query': 'London'}]}
QUESTION = Question('q', 'Who wrote it?', ('Ada Lovelace',), METADATA)
RIGHT = '<think>so</think><answer> Ada Lovelace </answer>'


def search(query):
  return f'<think>hm</think><search> {query} </search>'


def documents(*names):
  return [Document(name, f'Title of {name}', 'text') for name in names]


def chain(said, found, question=QUESTION, **settings):
  """`found` holds the documents of every search."""
  replies = iter(found)
  return drive(said, found=lambda request: next(replies), grow=step_search.grow, question=question,
               max_turns=8, **settings)[0]


def paper(found, golden):
  """Eqs. 8 to 13, document by document."""
  memory, history, steps = [0.0] * len(golden), [], []
  for documents in found:
    current = [max([1.0 if document.id == gold else 0.0 for document in documents], default=0.0)
               for gold in golden]
    gain = sum(max(c - m, 0) for c, m in zip(current, memory)) / len(golden)
    memory = [max(c, m) for c, m in zip(current, memory)]
    again = [document for document in documents if document in history]
    steps.append(gain - (len(again) / len(documents) if documents else 0.0))
    history += documents
  return steps


def test_steps_equal_the_paper_on_random_rounds():
  rng = np.random.default_rng(0)
  for _ in range(50):
    found = [documents(*rng.choice(list('abcdef'), rng.integers(0, 4), replace=False))
             for _ in range(rng.integers(1, 6))]
    gains, repeated = step_search.step_rewards(found, 'id', ['a', 'c', 'e'])
    assert np.subtract(gains, repeated) == pytest.approx(paper(found, ['a', 'c', 'e']))


def test_where_the_rewards_stand():
  """Two rounds, the second of which repeats the first: each on the last token of its span, the chain's on the
  very last."""
  tree = chain([search('Ada Lovelace'), search('Ada'), RIGHT], [documents('p1', 'x'), documents('p1', 'x')])
  for node in tree.nodes(Role.POLICY):
    node.values = np.zeros(len(node.tokens), np.float32)
  other = chain([RIGHT], [])
  for node in other.nodes(Role.POLICY):
    node.values = np.zeros(len(node.tokens), np.float32)
  ctx = context()
  step_search.credit([[tree], [other]], ctx, key_weight=0.618, gamma=1.0, lam=1.0)
  assert [node.data.get('reward') for node in tree.nodes(Role.POLICY)] == [0.5, -1.0, None]
  assert tree.reward == pytest.approx(1.0 + 0.618 * 0.5)  # 'Ada Lovelace' meets one golden query of two
  assert tree.metrics['information_gain'] == 0.5 and tree.metrics['redundancy'] == 1.0
  total = 0.5 - 1.0 + tree.reward
  first, second, last = (node.returns for node in tree.nodes(Role.POLICY))
  assert first == pytest.approx(total, abs=1e-6) and second == pytest.approx(tree.reward - 1.0)
  assert last == pytest.approx(tree.reward)
  assert other.reward == 0.0  # right, but without a search
  assert 'value_explained' in ctx.metrics


@pytest.mark.parametrize('said, found, reward', [
  ([search('Ada Lovelace'), search('London'), RIGHT], [('p1',), ('p2',)], 1 + 0.618),
  # F1 2/3 with one golden query of two
  ([search('in London'), RIGHT], [('p2',)], 1 + 0.618 / 3),
  ([search('Ada Lovelace'), '<think>so</think><answer> Byron </answer>'], [('p1',)], 0.618 / 2),
  # no single box
  ([search('Ada Lovelace'), '<answer> x <answer> Ada Lovelace </answer>'], [('p1',)], 0.618 / 2),
  ([search('Ada Lovelace'), 'I do not know.', RIGHT], [('p1',)], 1 + 0.618 / 2),
  # no thought
  (['<search> London </search>', '<answer> Ada Lovelace </answer>'], [('p2',)], 0.618 / 2),
])
def test_the_reward_of_a_chain(said, found, reward):
  tree = chain(said, [documents(*names) for names in found])
  assert step_search.reward(tree) == pytest.approx(reward)


def test_golden_documents_of_other_data():
  facts = {'supporting_facts': {'title': ['A', 'B', 'A'], 'sent_id': [0, 1, 2]}}
  assert step_search.golden_documents(Question('1', 'q', ('a',), facts)) == ('title', ['A', 'B'])
  facts = {'supporting_facts': [['A', 0], ['B', 1]]}
  assert step_search.golden_documents(Question('1', 'q', ('a',), facts)) == ('title', ['A', 'B'])
  for facts in ({'gold_titles': ['A', 'B']}, {'gold_titles': ['A', 'B'], 'supporting_facts': [['B', 0]]}):
    assert step_search.golden_documents(Question('1', 'q', ('a',), facts)) == ('title', ['A', 'B'])
  for facts in ({}, {'supporting_facts': None}):
    assert step_search.golden_documents(Question('1', 'q', ('a',), facts)) == ('title', [])
  found = [[Document('7', 'B', 'text'), Document('8', 'C', 'text')], [Document('7', 'B', 'text')]]
  assert step_search.step_rewards(found, 'title', ['A', 'B']) == ([0.5, 0.0], [0.0, 1.0])
  # the answer alone is rewarded
  assert step_search.step_rewards(found, 'title', []) == ([0.0, 0.0], [0.0, 0.0])
  plain = chain([search('Ada'), RIGHT], [documents('p1')], question=Question('1', 'q', ('Ada Lovelace',)))
  assert step_search.reward(plain) == 1.0
