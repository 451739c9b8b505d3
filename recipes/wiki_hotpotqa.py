"""Reads questions about two passages, from a file in HotpotQA's or 2WikiMultiHopQA's published format.

The steps of a question are its supporting paragraphs, the one that has the answer last, and what is found in
them are its supporting facts (Yang et al. 2018, section 2). Every other paragraph is a passage too.
"""

import dataclasses
import os
import random
from collections import defaultdict

from jaxsearch.data.benchmarks import pairs, read_documents, read_questions
from jaxsearch.data.corpus import Document, first_words
from jaxsearch.data.jsonl import read_array
from jaxsearch.rewards.match import answer_found
from recipes import wiki_lookups as lookups

BRIDGES = ('bridge', 'compositional', 'inference')  # the first is HotpotQA's, the others 2WikiMultiHopQA's


def read(path: str | os.PathLike, words: int, seed: int) -> tuple[list[Document], list[lookups.Lookup]]:
  """Returns the passages of a file and the bridge questions about them whose answer they do not name.

  One question in ten is held out; only `seed` decides on their order.

  Args:
    words: the answer stands in this many first words of its passage.
  Raises DataError, naming file and record, and OSError.
  """
  documents, made = read_documents('hotpotqa', path), []
  passages = {document.title: document for document in documents}
  for question, (_, row) in zip(read_questions('hotpotqa', path), read_array(path), strict=True):
    sentences, facts = dict(pairs(row['context'])), defaultdict(list)
    for title, number in question.metadata['supporting_facts']:
      facts[title] += [sentence.strip() for sentence in sentences.get(title, [])[number:number + 1]]
    golds, text, kind = question.golden_answers, question.question, question.metadata['type']
    if kind not in BRIDGES or golds[0] in ('yes', 'no') or answer_found(golds, text) or not all(facts.values()):
      continue
    steps, last = [], None
    for title, said in facts.items():
      passage = passages[' '.join(title.split())]
      seen = answer_found(golds, first_words(passage.text, words))
      has = [fact for fact in said if seen and answer_found(golds, fact)]
      step = lookups.Step(passage.id, title, (has or said)[0])
      last, steps = (step, steps) if has and not last else (last, [*steps, step])
    if last:
      question = dataclasses.replace(question, metadata={'source': 'HotpotQA'})
      made.append(lookups.Lookup(question, (*steps, last), held_out=lookups.held_out(text)))
  random.Random(seed).shuffle(made)
  return documents, made
