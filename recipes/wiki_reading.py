"""Questions about the free text of passages, made from their sentences by rules.

A sentence about the film or the person of a passage gives up a year, a date, a number or a name; the rest is
the question: 'In what year was Duel released on video?' where the sentence can be turned, else the sentence
with a gap and what is missing in it. wiki_lookups.py says whose passages these are and under which names.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxsearch.data.corpus import Document, first_words
from jaxsearch.data.questions import Question
from recipes import wiki_lookups as lookups

SHORT, LONG = 6, 26  # words of a sentence
SENTENCES = re.compile(r'(?<=[a-z0-9)][.!?])(?<!\b(?:St|Mr|Dr|Jr|Sr|vs)\.)(?<!\bMrs\.) +(?=[A-Z])')
BRACKETS = re.compile(r'\s*\([^()]*\)')
PRONOUNS = {'film': 'It|The film|The movie', 'person': 'He|She'}
NUMBERS = r'\d{1,3}(?:,\d{3})*|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve'
NAMES, ENDS = lookups.NAMES, re.compile(lookups.ENDS)
TURNED = re.compile(r'(?:[a-z]+ed|born|built|held|made|set|shot|written)\b[^,;]*')  # after was, a participle


class Blank(NamedTuple):
  """What a sentence can give up: how it is found, asked for with and without turning the sentence round.

  Attributes:
    pattern: finds `answer`, with the words that `turned` takes away.
    turned: the beginning of a question in which 'was Duel released' follows; '' if there is none.
    missing: asks what is missing in a sentence with a gap.
  """
  pattern: str
  turned: str
  missing: str


BLANKS = (
  Blank(rf' on (?P<answer>{lookups.DATE})', 'On what date', 'Which date is missing?'),
  Blank(r' in (?P<answer>\d{4})\b', 'In what year', 'Which year is missing?'),
  Blank(rf' by (?P<answer>{NAMES})', 'By whom', 'Who or what is missing?'),
  Blank(rf' (?:in|at) (?P<answer>{NAMES}(?:, {NAMES})?)', 'Where', 'Which place or group is missing?'),
  Blank(rf' (?P<answer>{NUMBERS}) [a-z]+s\b', '', 'How many are missing?'),
  Blank(rf' (?:for|with|from|of|to|as|and) (?:the )?(?P<answer>{NAMES})', '', 'Which name is missing?'),
)


def make(documents: Sequence[Document], seed: int, words: int, each: int = 2) -> list[lookups.Lookup]:
  """Returns at most `each` questions about a passage, none with the text of another.

  Args:
    words: the sentences are among this many first words of a passage.
  """
  rng, made = random.Random(seed), {}
  texts = {document.id: first_words(document.text, words) for document in documents}
  for entity in lookups.entities(documents, words):
    found = [one for sentence in sentences(entity, texts[entity.passage]) for one in asked(entity, sentence)]
    for text, answers, sentence in rng.sample(found, min(each, len(found))):
      step = lookups.Step(entity.passage, entity.name, sentence)
      question = Question('', text, answers, {'source': 'free text'})
      made[text] = lookups.Lookup(question, (step,), held_out=entity.held_out)
  every = list(made.values())
  rng.shuffle(every)
  return [lookups.numbered(one, f'reading_{number}') for number, one in enumerate(every)]


def sentences(entity: lookups.Entity, text: str) -> Iterator[str]:
  """Yields the whole sentences of a text whose subject is the film or person, which they then name."""
  subject = '|'.join([re.escape(entity.name), re.escape(entity.name.split()[-1]), PRONOUNS[entity.kind]])
  for sentence in SENTENCES.split(BRACKETS.sub('', text)):
    begins = re.match(rf'(?:{subject}) (?=[a-z])', sentence)
    if begins and sentence.endswith('.') and '"' not in sentence:
      if SHORT <= len(sentence.split()) <= LONG:
        yield f'{entity.name} {sentence[begins.end():]}'


def asked(entity: lookups.Entity, sentence: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
  """Yields (question, its answers, the sentence) for everything that a sentence can give up."""
  taken: list[range] = []  # an answer is asked for once, by the first pattern that finds it
  for blank in BLANKS:
    for found in re.finditer(blank.pattern, sentence):
      answer, place = found['answer'], range(*found.span('answer'))
      if any(set(place) & set(other) for other in taken) or sentence.count(answer) > 1:
        continue
      taken.append(place)
      if set(answer.split()) & set(entity.name.split()):
        continue
      if answer in entity.facts.values() or not ENDS.match(sentence, found.end()):
        continue  # templates ask for the facts
      whole = tuple(dict.fromkeys([answer, answer.split(', ')[0]])) if blank.turned == 'Where' else (answer,)
      turned = re.match(rf'{re.escape(entity.name)} (was|is|were|are) (.+)', sentence[:found.start()])
      if blank.turned and turned and TURNED.fullmatch(turned[2]):
        yield f'{blank.turned} {turned[1]} {entity.name} {turned[2]}?', whole, sentence
      else:
        yield f'{blank.missing} {sentence[:place.start]}___{sentence[place.stop:]}', whole, sentence
