"""Questions under made-up names."""

import random
import re

import pytest

from jaxsearch.world import files as world
from jaxsearch.world.chains import operands
from jaxsearch.world.facts import read_back, sentence
from recipes.world.rename import rename

DOCUMENTS = {document.id: document for document in world.corpus()}
ENTITIES = {entity.id: entity for entity in read_back(world.corpus())}


@pytest.mark.parametrize('numbers', [False, True])
def test_renamed_questions_stay_consistent(numbers):
  rng = random.Random(2)
  gone = []
  for q in rng.sample(world.questions('rl'), 300):
    results = {s['query']: [DOCUMENTS[s['passage_id']]] for s in q.metadata['steps']}
    new, found = rename(q, results, rng, numbers)
    assert new.metadata['gold_passages'] == q.metadata['gold_passages']
    for step in new.metadata['steps']:
      passage = next(p for p in found[step['query']] if p.id == step['passage_id'])
      assert sentence(step['attribute'], passage.title, step['finding']) in passage.text
    steps, operation = new.metadata['steps'], new.metadata.get('operation')
    if operation is None:
      assert new.golden_answers[0] == steps[-1]['finding']
    elif operation == 'same':
      assert new.golden_answers[0] == ('yes' if len(set(operands(new))) == 1 else 'no')
    elif operation in ('sum', 'difference'):
      x, y = map(int, operands(new))
      assert new.golden_answers[0] == str(x + y if operation == 'sum' else abs(x - y))
    else:
      (x, y), choices = map(int, operands(new)), new.metadata['choices']
      assert new.golden_answers[0] == choices[(x < y) if operation == 'more' else (x > y)] in new.question
    words = [w for w in re.findall(r'[^\W\d_]+', ENTITIES[q.metadata['starts'][0]].title) if w[0].isupper()]
    if words:
      gone.append(not set(words) & set(re.findall(r'[^\W\d_]+', new.question)))
  assert sum(gone) / len(gone) > 0.98  # a word of the templates, such as "In", is left as it is
