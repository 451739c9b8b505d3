"""Questions about free text: which sentences, what they give up, and that the passage answers them."""

import pytest

from jaxsearch.data.corpus import Document, first_words
from recipes import wiki_lookups as lookups
from recipes import wiki_reading as reading
from tests.recipes.test_wiki_lookups import DOCUMENTS

ANN = lookups.Entity('1', 'Ann Lee', 'person', {'place': 'Oslo'})


@pytest.mark.parametrize('sentence, questions', [
  ('Ann Lee was educated in Bergen.', {'Where was Ann Lee educated?': ('Bergen',)}),
  ('Ann Lee was buried in Bergen, Norway.', {'Where was Ann Lee buried?': ('Bergen, Norway', 'Bergen')}),
  ('Ann Lee was elected on May 4, 1912 and left.', {'On what date was Ann Lee elected?': ('May 4, 1912',)}),
  ('Ann Lee was arrested in 1912.', {'In what year was Ann Lee arrested?': ('1912',)}),
  ('Ann Lee was raised by Carl Moe.', {'By whom was Ann Lee raised?': ('Carl Moe',)}),
  ('Ann Lee wrote two books for Carl Moe.', {
    'How many are missing? Ann Lee wrote ___ books for Carl Moe.': ('two',),
    'Which name is missing? Ann Lee wrote two books for ___.': ('Carl Moe',)}),
  ('Ann Lee was a painter in Bergen.', {  # 'Where was Ann Lee a painter?' is asked of nobody
    'Which place or group is missing? Ann Lee was a painter in ___.': ('Bergen',)}),
  ('Ann Lee was born in Oslo.', {}),               # a fact: a template asks for it
  ('Ann Lee lived in Bergen and left Bergen.', {}),  # the rest would give it away
  ('Ann Lee was a student of Norwegian painters.', {}),  # not the whole of a name
])
def test_what_a_sentence_gives_up(sentence, questions):
  found = list(reading.asked(ANN, sentence))
  assert {question: answers for question, answers, _ in found} == questions
  assert all(said == sentence for *_, said in found)


def test_sentences_are_whole_and_about_the_subject():
  text = ('Ann Lee (born 1900) was a Norwegian painter of ships. She met Dr. Moe in St. Olav one winter. '
          'The weather was cold in Bergen that year. Lee moved to Bergen in the year 1931. She said "no" to '
          'all who asked. She died. She then went')
  assert list(reading.sentences(ANN, text)) == [
    'Ann Lee was a Norwegian painter of ships.', 'Ann Lee met Dr. Moe in St. Olav one winter.',
    'Ann Lee moved to Bergen in the year 1931.']


def test_passages_answer_their_questions():
  made = reading.make(DOCUMENTS, 0, 64)
  texts = {document.id: first_words(document.text, 64) for document in DOCUMENTS}
  assert len(made) > 60 and {one.held_out for one in made} == {False, True}
  assert len({one.question.question for one in made}) == len({one.question.id for one in made}) == len(made)
  held_out = {entity.passage: entity.held_out for entity in lookups.entities(DOCUMENTS, 64)}
  for one in made:
    (step,), (answer, *_) = one.steps, one.question.golden_answers
    assert answer in texts[step.passage] and answer in step.finding
    assert step.query in one.question.question and answer not in one.question.question
    assert one.held_out == held_out[step.passage]  # as in questions by templates
  assert reading.make(DOCUMENTS, 0, 64) == made
  passages = [one.steps[0].passage for one in reading.make(DOCUMENTS, 0, 64, each=1)]
  assert len(set(passages)) == len(passages)


def test_a_document_without_a_film_or_a_person_is_not_asked_about():
  assert not reading.make([Document('1', 'Lisbon City', 'Lisbon City was founded in 1900.')], 0, 64)
