"""The embedded world: what ships is split by entity and answerable from its documents."""

import collections
import random
import re

import pytest

from jaxsearch.world import files as world
from jaxsearch.world.facts import ATTRIBUTES, read_back
from recipes.world.entities import TARGETS, Entity, name_all


def linked():
  """Restores the entities, links and names included, that the world's documents are about."""
  entities = read_back(world.corpus())
  ids = {(entity.type, entity.title): entity.id for entity in entities}
  # Titles of cities repeat, so a capital is looked up with its country.
  homes = {(e.title, e.values['country']): e.id for e in entities if e.type == 'city'}

  def links(entity):
    found = {name: ids.get((kind, entity.values.get(name))) for name, kind in TARGETS.items()}
    if entity.type == 'country':
      found['capital'] = homes[entity.values['capital'], entity.title]
    return {name: key for name, key in found.items() if key}

  return name_all([Entity(**vars(entity), links=links(entity)) for entity in entities])


QUESTIONS = {split: world.questions(split) for split in world.SPLITS}
PASSAGES = {p.id: p for p in world.corpus()}
ENTITIES = {e.id: e for e in linked()}
SHARED = ('currency', 'language')  # values that many countries share


def starts(split):
  return {start for q in QUESTIONS[split] for start in q.metadata['starts']}


def met(split):
  return {e for q in QUESTIONS[split] for e in q.metadata['entities'] if not e.startswith(SHARED)}


def test_sizes_and_hops():
  count = {split: len(QUESTIONS[split]) for split in QUESTIONS}
  assert len(PASSAGES) > 4000
  assert count['warm'] >= 10000 and count['rl'] >= 2000 and count['test'] == 1000 and count['dev'] == 300
  for split in QUESTIONS:
    assert {q.metadata['hops'] for q in QUESTIONS[split]} == {1, 2, 3, 4}
    assert len({q.id for q in QUESTIONS[split]}) == count[split]
    for q in QUESTIONS[split]:
      assert q.metadata['hops'] == len(q.metadata['steps']) and q.metadata['split'] == split


def test_train_and_test_share_no_entity():
  held_out = starts('test') | starts('dev')
  assert not held_out & (met('warm') | met('rl'))
  assert len(held_out) > 500


def test_no_question_stands_in_two_splits():
  texts = [q.question for questions in QUESTIONS.values() for q in questions]
  assert [text for text, n in collections.Counter(texts).items() if n > 1] == []


@pytest.mark.parametrize('split', QUESTIONS)
def test_every_answer_follows_from_the_gold_passages(split):
  for q in QUESTIONS[split]:
    steps = q.metadata['steps']
    for step in steps:
      passage = PASSAGES[step['passage_id']]
      sentence = ATTRIBUTES[step['attribute']]['sentence'].format(title=passage.title, value=step['finding'])
      assert sentence in passage.text
    assert {step['passage_id'] for step in steps} == set(q.metadata['gold_passages'])
    last, operation = steps[-1]['finding'], q.metadata.get('operation')
    if operation is None:
      assert q.golden_answers[0] == last
      continue
    first, (a, b) = steps[len(steps) // 2 - 1]['finding'], q.metadata['choices']
    if operation == 'same':
      expected = 'yes' if first == last else 'no'
    else:
      x, y = int(first), int(last)
      expected = {'sum': str(x + y), 'difference': str(abs(x - y)), 'more': a if x > y else b,
                  'less': a if x < y else b}[operation]
    assert q.golden_answers[0] == expected, q.id


def test_yes_and_no_are_both_common():
  answers = [q.golden_answers[0] for q in world.questions('warm') if q.metadata['answer_type'] == 'yes_no']
  assert 0.25 < answers.count('yes') / len(answers) < 0.7


def test_each_hop_is_searched_by_what_the_one_before_found():
  for q in world.questions('rl'):
    steps = q.metadata['steps']
    heads = {0, len(steps) // 2} if 'operation' in q.metadata else {0}
    for i, step in enumerate(steps):
      if i in heads:
        assert all(word in q.question for word in step['query'].split())
      else:
        assert step['query'] == steps[i - 1]['finding']


def test_colliding_names_are_told_apart():
  by_title = collections.defaultdict(list)
  for e in ENTITIES.values():
    by_title[e.title].append(e)
  same = [e for group in by_title.values() if len(group) > 1 for e in group]
  assert len(same) > 200
  assert len({e.mention for e in ENTITIES.values()}) == len(ENTITIES)
  colliding = {e.id for e in same}
  starts_of = [(q, start) for q in world.questions('rl') for start in q.metadata['starts']]
  asked = [(q, ENTITIES[start]) for q, start in starts_of if start in colliding]
  assert len(asked) > 50
  for q, e in asked:
    assert e.mention != e.title and e.mention in q.question


def test_gold_passages_are_found():
  rank_bm25 = pytest.importorskip('rank_bm25')

  def words(text):
    return re.findall(r'\w+', text.lower())

  ids = list(PASSAGES)
  index = rank_bm25.BM25Okapi([words(f'{p.title} {p.text}') for p in PASSAGES.values()])
  sample = random.Random(0).sample(world.questions('test'), 200)
  queries = [(step['query'], step['passage_id']) for q in sample for step in q.metadata['steps']]
  best = {query: [ids[i] for i in (-index.get_scores(words(query))).argsort(kind='stable')[:2]]
          for query, _ in queries}
  assert sum(gold in best[query] for query, gold in queries) / len(queries) >= 0.97
