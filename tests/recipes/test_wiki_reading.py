"""Questions that people asked about free text: passages of whole sentences, answers in them, faults of files."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxsearch.data.jsonl import DataError
from recipes import wiki_reading as reading

TEXT = ('Ann Lee was a painter (born 1900). She met Dr. Moe in St. Olav. He said: "Come in." Nobody came. '
        'The house was sold for $2.5 million in 1931')


def article(text=TEXT, asked=(('Whom did Ann Lee meet?', 'Dr. Moe'),), title='Ann_Lee'):
  qas = [{'id': str(number), 'question': question, 'answers': [{'text': answer, 'answer_start': text.index(answer)}]}
         for number, (question, answer) in enumerate(asked)]
  return {'title': title, 'paragraphs': [{'context': text, 'qas': qas}]}


def squad(folder, *articles):
  path = folder / 'squad.json'
  path.write_text(json.dumps({'version': '1.1', 'data': articles}))
  return path


def test_sentences_and_passages():
  sentences = [sentence for passage in reading.cut(TEXT, 12) for _, sentence in passage]
  assert sentences == ['Ann Lee was a painter (born 1900).', 'She met Dr. Moe in St. Olav.', 'He said: "Come in."',
                       'Nobody came.', 'The house was sold for $2.5 million in 1931']
  assert [len(passage) for passage in reading.cut(TEXT, 12)] == [1, 2, 2]


@hypothesis.given(st.lists(st.sampled_from(['Lee ', 'moe. ', 'St. ', '"Ann" ', 'x.  ', '1931. ']), min_size=1),
                  st.integers(1, 20))
def test_passages_have_every_word_once_and_no_more_than_asked(parts, words):
  text = ''.join(parts)
  passages = list(reading.cut(text, words))
  assert ' '.join(sentence for passage in passages for _, sentence in passage).split() == text.split()
  for passage in passages:
    assert len(passage) == 1 or sum(len(sentence.split()) for _, sentence in passage) <= words
    for begin, sentence in passage:
      assert text[begin:].lstrip().startswith(sentence)


def test_the_step_is_the_sentence_that_has_the_answer(tmp_path):
  asked = ('Whom did Ann Lee meet?', 'Dr. Moe'), ('For how much was the house sold?', '$2.5 million')
  documents, found = reading.read(squad(tmp_path, article(asked=asked)), 12, 0)
  met, sold = sorted(found, key=lambda one: one.question.id)
  assert {document.title for document in documents} == {'Ann Lee'} and len(documents) == 3
  texts = {document.id: document.text for document in documents}
  for one, sentence, answer in ((met, 'She met Dr. Moe in St. Olav.', 'Dr. Moe'),
                                (sold, 'The house was sold for $2.5 million in 1931', '$2.5 million')):
    (step,) = one.steps
    assert step.finding == sentence and sentence in texts[step.passage] and step.query == 'Ann Lee'
    assert one.question.golden_answers == (answer,) and one.question.metadata == {'source': 'free text'}


def test_questions_that_are_left_out(tmp_path):
  text = 'one two three four five six seven. Eight nine'
  asked = [('Too long?', 'one two three four five six seven'), ('Over an end?', 'seven. Eight'), ('Asked?', 'two'),
           ('Asked?', 'three')]
  odd = article(text, asked)
  odd['paragraphs'][0]['qas'].append({'id': '9', 'question': 'Nothing?', 'answers': []})
  _, found = reading.read(squad(tmp_path, odd), 64, 0)
  assert [(one.question.question, one.question.golden_answers) for one in found] == [('Asked?', ('two',))]


def test_the_answer_of_most_people_comes_first_then_the_shortest(tmp_path):
  odd = article('The house was sold for about two million in 1931', [], 'Ann%20Lee')
  text = odd['paragraphs'][0]['context']
  for question, given in (('Most?', ('two million', 'in 1931', 'in 1931')), ('Shortest?', ('about two million', '1931')),
                          ('Long?', ('was sold for about two million in', '1931'))):
    answers = [{'text': answer, 'answer_start': text.index(answer)} for answer in given]
    odd['paragraphs'][0]['qas'].append({'question': question, 'answers': answers})
  _, found = reading.read(squad(tmp_path, odd), 64, 0)
  assert {one.question.question: one.question.golden_answers for one in found} == {
    'Most?': ('in 1931', 'two million'), 'Shortest?': ('1931', 'about two million'), 'Long?': ('1931',)}
  assert {one.steps[0].query for one in found} == {'Ann Lee'}


def test_articles_are_held_out_whole(tmp_path):
  asked = ('Whom did Ann Lee meet?', 'Dr. Moe'), ('When?', '1931')
  articles = [article(asked=[(f'{number} {question}', answer) for question, answer in asked], title=f'Lee {number}')
              for number in range(60)]
  _, found = reading.read(squad(tmp_path, *articles), 64, 0)
  assert len(found) == 120 and {one.held_out for one in found} == {False, True}
  assert all(len({one.held_out for one in found if one.steps[0].query == f'Lee {number}'}) == 1 for number in range(60))
  assert len({one.question.id for one in found}) == 120


@pytest.mark.parametrize('broken, said', [
  ({'paragraphs': []}, "record 1: .*'title'"), ({'title': 'a', 'paragraphs': [{'context': 'b'}]}, "record 1: .*'qas'")])
def test_faults_of_a_file_are_named(tmp_path, broken, said):
  with pytest.raises(DataError, match=said):
    reading.read(squad(tmp_path, broken), 64, 0)
