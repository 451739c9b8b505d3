import random

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.trees import grammar
from jaxsearch.world import files as world
from recipes.world import examples

TOKENIZER = Tokenizer.load(world.folder())


def text_of(example, learned):
  return TOKENIZER.decode([token for token, own in zip(*example) if own == learned])


def test_examples_under_made_up_names_still_copy_from_what_is_given():
  rng = random.Random(0)
  for _ in range(30):
    example = examples.skilled(TOKENIZER, rng, renamed=1.0)
    learned, given = text_of(example, True), text_of(example, False)
    for query in [e.content for e in grammar.elements(learned) if e.name == 'search']:
      assert query.split()[0] in given  # every query is in the question or in a document


def test_the_mix_searches_too_little():
  rng = random.Random(0)
  searches = []
  for _ in range(300):
    learned = text_of(examples.undecided(TOKENIZER, rng, shares=(0.4, 0.35), evidence=0.5), True)
    assert grammar.answer(learned) is not None
    searches.append(learned.count('</search>'))
  assert 0.3 < searches.count(0) / 300 < 0.5
  assert 0.3 < searches.count(1) / 300


def test_drills_copy_from_what_is_given_and_retellings_tell_of_an_entry_shown():
  rng = random.Random(0)
  written = lambda text, tag: [e.content for e in grammar.elements(text) if e.name == tag]
  for _ in range(50):
    example = examples.drill(TOKENIZER, rng)
    learned, given = text_of(example, True), text_of(example, False)
    copied = written(learned, 'search') or [learned.split()[-1].rstrip('.')]
    assert copied[0] in given
    example = examples.retelling(TOKENIZER, rng)
    learned, given = text_of(example, True), text_of(example, False)
    title, told = written(learned, 'search')[0], written(learned, 'think')[0]
    assert f'(Title: {title})' in given
    assert all(f'{title}{sentence}' in given for sentence in told.removesuffix('.').split('. It')[1:])
