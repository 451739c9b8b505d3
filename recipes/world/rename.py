"""Made-up names for questions and documents, so that copying a name never seen before can be learned.

Every word of every name is replaced by the same made-up word everywhere: in the question, its steps and
answers, and the documents. Chains are then written from the renamed question, so they are consistent by
construction.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.world import files as world
from jaxsearch.world.chains import operands
from jaxsearch.world.facts import ATTRIBUTES, WORDS
from recipes.world.entities import TARGETS
from recipes.world.questions import combine

WORD = re.compile(r'[^\W\d_]+')
NUMBER = re.compile(r'(?<!\d)\d{4,}(?!\d)')
SYLLABLE = re.compile(r'[^aeiouyà-ÿ]*[aeiouyà-ÿ]+(?:[^aeiouyà-ÿ]+$)?', re.IGNORECASE)
_SENTENCES = [ATTRIBUTES[name]['sentence'] for name in TARGETS]
_OPENINGS = '|'.join(sentence.split('{title} ')[1].split('{value}')[0] for sentence in _SENTENCES)
STATED = re.compile(rf'(?:{_OPENINGS})(.+?)\.(?= |$)')  # the names that a document gives as values
YEARS = range(1600, 2030)


def rename(question: Question, results: dict[str, Sequence[Document]], rng: random.Random,
           numbers: bool = False) -> tuple[Question, dict[str, list[Document]]]:
  """The question and its search results (query -> documents) under made-up names; with `numbers`, new
  figures.

  Answers, comparisons and sums are worked out again. Ids of documents, and with them the gold passages, stay.
  """
  steps = question.metadata['steps']
  names = [step['query'] for step in steps]
  names += [step['finding'] for step in steps if step['attribute'] in TARGETS]
  names += [name for found in results.values() for d in found for name in (d.title, *STATED.findall(d.text))]
  known = {word for name in names for word in WORD.findall(name) if word[0].isupper()} - _reserved()
  words = _once_each(lambda _: _made_up(rng, 2 if rng.random() < 0.15 else 1))
  figures = _once_each(lambda old: _new_number(old, rng))

  def changed(text):
    text = WORD.sub(lambda m: words(m[0]) if m[0] in known else m[0], text)
    return NUMBER.sub(lambda m: figures(m[0]), text) if numbers else text

  change = lambda step: step | {name: changed(step[name]) for name in ('query', 'finding')}
  data = question.metadata | {'steps': list(map(change, steps))}
  if 'choices' in data:
    data['choices'] = [changed(choice) for choice in data['choices']]
  renamed = dataclasses.replace(question, question=changed(question.question), metadata=data)
  if operation := data.get('operation'):
    result = combine(operation, *operands(renamed))
    golds = [data['choices']['ab'.index(result)] if operation in ('more', 'less') else result]
  else:
    first = data['steps'][-1]['finding']  # an alias in figures is the same number with separators
    golds = [first, *(f'{int(first):,}' if re.fullmatch(r'\d[\d,]+', other) else changed(other)
                      for other in question.golden_answers[1:])]
  new_results = {changed(query): [Document(d.id, changed(d.title), changed(d.text)) for d in found]
                 for query, found in results.items()}
  return dataclasses.replace(renamed, golden_answers=tuple(golds)), new_results


@functools.cache
def _reserved() -> frozenset[str]:
  """The words of the templates: a name may hold them too, but they are left as they are."""
  rows = [*ATTRIBUTES.values(), *WORDS['pairs']]
  texts = []
  for row in rows:
    texts += [*row['questions'], *row.get('phrases', ()), row.get('sentence', '')]
  return frozenset(word for text in texts for word in WORD.findall(text)) | {'It', 'Doc', 'Title', 'Find'}


def _once_each(invent: Callable[[str], str]) -> Callable[[str], str]:
  """A function that gives the same invented value for the same text, and each value for one text only."""
  used = set()

  @functools.cache
  def value(text):
    while (new := invent(text)) in used:
      pass
    used.add(new)
    return new

  return value


def _made_up(rng: random.Random, words: int) -> str:
  """A name of `words` words, each of one to four syllables of real names (three to fourteen letters)."""
  first, later = _syllables()
  made = []
  while len(made) < words:
    word = rng.choice(first) + ''.join(rng.choices(later, k=rng.choice((0, 1, 1, 1, 2, 2, 3))))
    if 3 <= len(word) <= 14 and word.capitalize() not in _reserved():
      made.append(word.capitalize())
  return ' '.join(made)


@functools.cache
def _syllables() -> tuple[tuple[str, ...], tuple[str, ...]]:
  """First and later syllables of the words of the world's titles, each as often as it occurs."""
  words = [SYLLABLE.findall(word) for document in world.corpus() for word in WORD.findall(document.title)]
  return tuple(w[0].lower() for w in words if w), tuple(syllable.lower() for w in words for syllable in w[1:])


def _new_number(old: str, rng: random.Random) -> str:
  if len(old) == 4 and int(old) in YEARS:
    return str(rng.choice(YEARS))
  digits = max(4, min(9, len(old) + rng.choice((-1, 0, 0, 1))))
  return str(rng.randrange(10 ** (digits - 1), 10**digits))
