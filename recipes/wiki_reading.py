"""Reads questions that people asked about the free text of passages, from a file in SQuAD's published format.

Its paragraphs are cut into passages of whole sentences, which are searched like all others: those of one
article share its title and its words, so that a policy must choose among them. What is found is the sentence
that has the answer.
"""

import os
import random
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator

from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import field, read_array, text_field
from jaxsearch.data.questions import Question
from recipes import wiki_lookups as lookups

LONGEST = 6  # words of an answer; a benchmark's are seldom longer
SENTENCES = re.compile(r'(?:(?<=[a-z0-9)][.!?])|(?<=[.!?]["”]))(?<!\b(?:St|Mr|Dr|Jr|Sr|vs)\.)(?<!\bMrs\.)'
                       r' +(?=["“A-Z])')


def read(path: str | os.PathLike, words: int, seed: int) -> tuple[list[Document], list[lookups.Lookup]]:
  """Returns the passages of a file and the questions about them.

  One article in ten is held out. No question has the text of another; only `seed` decides on their order.

  Args:
    words: of a passage at most, unless a sentence alone has more.
  Raises DataError, naming file and record, and OSError.
  """
  documents, found = [], {}
  for place, article in read_array(path, 'data'):
    title = urllib.parse.unquote(text_field(article, 'title', place)).replace('_', ' ')
    for paragraph in field(article, 'paragraphs', list, place):
      sentences = []  # where each begins, its text, the id of its passage
      for passage in cut(text_field(paragraph, 'context', place), words):
        id = f'squad_{len(documents)}'
        documents.append(Document(id, title, ' '.join(sentence for _, sentence in passage)))
        sentences += [(begin, sentence, id) for begin, sentence in passage]
      for asked in field(paragraph, 'qas', list, place):
        text, answers = text_field(asked, 'question', place).strip(), field(asked, 'answers', list, place)
        begins = {text_field(answer, 'text', place): field(answer, 'answer_start', int, place)
                  for answer in reversed(answers)}
        given = Counter(answer['text'] for answer in answers)  # by several people, in development sets
        golds = tuple(sorted((gold for gold in given if len(gold.split()) <= LONGEST),
                             key=lambda gold: (-given[gold], len(gold))))
        if not golds:
          continue
        begin = begins[golds[0]]
        _, sentence, id = max((one for one in sentences if one[0] <= begin), default=sentences[0])
        if golds[0] in sentence:  # else the answer goes over its end
          question = Question(f'reading_{len(found)}', text, golds, {'source': 'free text'})
          step = lookups.Step(id, title, sentence)
          found.setdefault(text, lookups.Lookup(question, (step,), held_out=lookups.held_out(title)))
  questions = list(found.values())
  random.Random(seed).shuffle(questions)
  return documents, questions


def cut(text: str, words: int) -> Iterator[list[tuple[int, str]]]:
  """Yields the passages of a text: lists of (where a sentence begins, the sentence)."""
  passage, length, begin = [], 0, 0
  for end in [*(gap.start() for gap in SENTENCES.finditer(text)), len(text)]:
    sentence = text[begin:end].strip()
    number = len(sentence.split())
    if passage and length + number > words:
      yield passage
      passage, length = [], 0
    passage.append((begin, sentence))
    length, begin = length + number, end
  yield passage
