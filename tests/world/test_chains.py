"""Gold chains: every step searched, in the grammar of Search-R1, then the right answer."""

import itertools
import random
import re

import pytest

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.tools import find_tool
from jaxsearch.trees import grammar, native, templates
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import chains, files as world
from tests.trees.speaking import SMALL, small

TOKENIZER = Tokenizer.load(world.folder())


def test_chains_speak_the_grammar():
  questions = world.questions('rl')
  for q in random.Random(1).sample(questions, 200):
    full = chains.full_chain(q)
    text = ''.join(part for role, part in full if role == 'policy')
    assert re.findall(r'<search> (.+?)</search>', text) == [s['query'] for s in q.metadata['steps']]
    assert [part for role, part in full if role == 'observation'] == [s['query'] for s in q.metadata['steps']]
    assert re.findall(r'<answer> (.+?)</answer>', text) == [q.golden_answers[0]]
    thoughts = re.findall(r'<think> (?:(?!<think>).)+?</think><(?:search|answer)>', text)
    assert len(thoughts) == q.metadata['hops'] + 1
  stated = [chains.full_chain(q)[-1][1] for q in questions if q.metadata.get('operation') in world.ARITHMETIC]
  sums = [re.search(r'(\d+) ([+-]) (\d+) = (\d+)', text).groups() for text in stated]
  assert sums and all(int(a) + (int(b) if sign == '+' else -int(b)) == int(c) for a, sign, b, c in sums)


def test_a_chain_is_learned_where_the_policy_speaks_and_nowhere_else():
  question = next(q for q in world.questions('warm') if q.metadata['kind'] == 'city.country.capital')
  ids, own = chains.gold_example(question, TOKENIZER)
  learned, given = (TOKENIZER.decode([token for token, mark in zip(ids, own) if mark == wanted])
                    for wanted in (True, False))
  assert grammar.answer(learned) == question.golden_answers[0]
  assert learned.count('<search>') == 2 and '<information>' not in learned
  assert given.startswith(templates.prompt(question.question, 'world')) and given.count('</information>') == 2


def test_observations_hold_what_was_found():
  question, country = world.questions('dev')[0], next(d for d in world.corpus() if d.id == 'country-ES')
  spans = [('policy', 'x'), ('observation', 'Spain')]
  ids, learned = chains.encode_chain(TOKENIZER, question, spans, {'Spain': [country]})
  block = f'\n<information>Doc 1(Title: Spain) {country.text}\n</information>\n'
  prompt = templates.prompt(question.question, 'world')
  assert TOKENIZER.decode(ids) == f'{prompt}x{block}' and sum(learned) == 1


@pytest.mark.parametrize('family', SMALL)
def test_another_grammar_retells_a_chain(family):
  question = next(q for q in world.questions('warm') if q.metadata['kind'] == 'city.country.capital')
  tokenizer = small(family)
  speech = native.open_grammar(tokenizer, grammar.SEARCH_R1, {'search': find_tool('search')}, grammar=family)
  tokens = iter(zip(*chains.gold_example(question, tokenizer, 'world', speech)))
  read = []
  for learned, span in itertools.groupby(tokens, lambda token: token[1]):
    ids = [token for token, _ in span]
    if learned:
      node = Tree(tokenizer, grammar=speech).root.append(ids, Role.POLICY)
      assert speech.closed(node)
      read.append(speech.read(node))
    else:
      text = tokenizer.decode(ids)
      assert '<information>' not in text and text.endswith(speech.frames.user[1])
  queries = [step['query'] for step in question.metadata['steps']]
  assert [call.arguments['query'] for reading in read for call in reading.calls] == queries
  assert read[-1].answer == question.golden_answers[0] and 'It has the capital' in read[-1].thinking
