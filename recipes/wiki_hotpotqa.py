"""Reads questions that people asked about two passages, from a file in HotpotQA's published format.

Every paragraph of a record becomes a passage, so the eight that mislead are searched too. The steps of a
question are its supporting paragraphs, the one that has the answer last, and what is found in them are its
supporting facts (Yang et al. 2018, section 2).
"""

import os
import random
from collections import defaultdict
from typing import Any

from jaxsearch.data.corpus import Document, first_words
from jaxsearch.data.jsonl import DataError, field, read_array, shortened, text_field
from jaxsearch.data.questions import Question
from jaxsearch.rewards.match import normalize_answer
from recipes import wiki_lookups as lookups


def read(path: str | os.PathLike, words: int, seed: int) -> tuple[list[Document], list[lookups.Lookup]]:
  """Returns the passages of a file and the bridge questions about them whose answer they do not name.

  One question in ten is held out. No question has the text of another; only `seed` decides on their order.

  Args:
    words: every supporting fact begins in this many first words of its passage, and the answer stands there.
  Raises DataError, naming file and record, and OSError.
  """
  documents, found = {}, {}
  for place, record in read_array(path):
    text, answer = text_field(record, 'question', place).strip(), text_field(record, 'answer', place)
    passages = dict(_pairs(record, 'context', list, place))
    for title, sentences in passages.items():
      documents.setdefault(title, Document(f'hotpotqa_{len(documents)}', title, ''.join(sentences).strip()))
    facts = defaultdict(list)
    for title, number in _pairs(record, 'supporting_facts', int, place):
      facts[title] += [sentence.strip() for sentence in passages.get(title, [])[number:number + 1]]
    holds = lambda said, gold=f' {normalize_answer(answer)} ': gold in f' {normalize_answer(said)} '
    bridge = field(record, 'type', str, place) == 'bridge'
    if not bridge or answer in ('yes', 'no') or holds(text) or not all(facts.values()):
      continue
    steps, last = [], None
    for title, said in facts.items():
      has = [fact for fact in said if holds(fact) and holds(first_words(documents[title].text, words))]
      step = lookups.Step(documents[title].id, title, (has or said)[0])
      last, steps = (step, steps) if has and not last else (last, [*steps, step])
    if last:
      question = Question(f'hotpotqa_{len(found)}', text, (answer,), {'source': 'HotpotQA'})
      found.setdefault(text, lookups.Lookup(question, (*steps, last), held_out=lookups.held_out(text)))
  questions = list(found.values())
  random.Random(seed).shuffle(questions)
  return list(documents.values()), questions


def _pairs(record: dict, key: str, kind: type, place: str) -> list[tuple[str, Any]]:
  """Returns the list of (title, value) under a key."""
  pairs = field(record, key, list, place)
  for pair in pairs:
    match pair:
      case [str(), value] if isinstance(value, kind):
        continue
    raise DataError(f'{place}: {key!r} must be [title, {"sentences" if kind is list else "number"}] each, '
                    f'not {shortened(pair)}')
  return pairs
