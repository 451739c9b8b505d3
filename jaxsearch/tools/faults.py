"""Breaks the output of tools: CARL's test of resilience (appendix K, table 16)."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.tools.calls import Refused
from jaxsearch.tools.python_sandbox import CHARACTERS

KINDS = ('working', 'empty', 'irrelevant', 'garbage')
LETTERS = [chr(code) for code in (*range(0x21, 0x7f), *range(0xa1, 0x180))]


def check(kind: str, question: Question) -> None:
  """Raises ValueError for a fault that is none of KINDS, and for 'irrelevant' without another question."""
  if kind not in KINDS:
    raise ValueError(f'fault={kind!r} is none of {", ".join(KINDS)}')
  if kind == 'irrelevant' and 'other' not in question.metadata:
    raise Refused("fault='irrelevant' shows what another question finds, so it needs several of a source")


def with_others(questions: Sequence[Question]) -> list[Question]:
  """Returns the questions, `metadata['other']` of each the text of another of its source, if there is one.

  It is half of the list away, since neighbours may be about the same.
  """
  of_source = collections.defaultdict(list)
  for question in questions:
    of_source[question.metadata.get('source')].append(question)
  others = {}
  for group in of_source.values():
    for place, question in enumerate(group):
      others[question] = group[(place + len(group) // 2) % len(group)]
  return [dataclasses.replace(question, metadata=question.metadata | {'other': others[question].question})
          if others[question] is not question else question for question in questions]


def program(kind: str, code: str, question: Question) -> str:
  """Returns what is run instead of `code`: for 'irrelevant' a search for the other question.

  A long question is cut to its end, where it asks: FinQA's begins with a report.
  """
  other = question.metadata.get('other', '')[-CHARACTERS:]
  return f'print(search({other!r}))' if kind == 'irrelevant' else code


def apply(kind: str, output: str, rng: np.random.Generator) -> str:
  """Returns what the model sees instead of `output`: nothing for 'empty', random characters for 'garbage'.

  These are as many as the output had, but 40 to 200: each may be a token. Other kinds show the output.
  """
  if kind == 'garbage':
    return ''.join(rng.choice(LETTERS, min(max(len(output), 40), 200)))
  return '' if kind == 'empty' else output
