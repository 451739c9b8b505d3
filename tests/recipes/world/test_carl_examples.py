"""Worked examples for CARL: what is written, what is seen when, and what is known."""

import random

import pytest

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards import formats
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role
from jaxsearch.world import files as world
from recipes.world import carl_examples
from tests.methods.driving import segments

ALWAYS = dict(closed_book=0.0, one_call=0.0, lost=0.0, renamed=0.0)


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer.load(world.folder())


def episodes(tokenizer, number=12, **changes):
  rng = random.Random(0)
  return [carl_examples.episode(tokenizer, rng, **ALWAYS | changes) for _ in range(number)]


def test_a_full_episode_is_what_the_method_reads(tokenizer):
  for tree in episodes(tokenizer):
    spans, steps = segments(tree), tree.question.metadata['steps']
    assert len(spans) == 2 * len(steps) + 1
    for invoke, assimilate, step in zip(spans[:-1:2], spans[1:-1:2], steps):
      assert grammar.python_block(invoke.text) == f'print(search(" {step["query"]}"))'
      context, closed = grammar.context_block(assimilate.text)
      assert closed and step['finding'] in context and step['finding'] in assimilate.parent.text
      copy = next(node for node in invoke.children if node.role is Role.CONTEXT)
      assert copy.text == f'<context>{context}</context>\n' and assimilate.children == []
    assert formats.last_boxed(spans[-1].text) == tree.question.golden_answers[0]
    assert [any(token in tokenizer.eos_ids for token in span.tokens) for span in spans] == [
      *[False] * 2 * len(steps), True]
    assert 'Doc 1' not in ''.join(node.text for node in spans[-1].path()[1:])  # forgotten
