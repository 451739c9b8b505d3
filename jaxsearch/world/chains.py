"""Worked examples for the warm start, as text: searches done in full, answers at once, and one search only.

A chain is a list of spans `(role, text)`, role `'policy'` or `'observation'`. An observation first holds the
query, as an agent would send it; `observe` fills in what the search returned. The grammar is Search-R1's, the
spans are short: a thought states what was found, in the words of the passage, then what is sought next.
"""

import random
from collections.abc import Callable, Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.world.facts import ATTRIBUTES
from jaxsearch.world.questions import combine

Spans = list[tuple[str, str]]


def act(thought: str, tag: str, content: str) -> str:
  # No space before a closing tag or between tags: a small policy pays for every token. One before words, as inside a text.
  return f'<think> {thought}</think><{tag}> {content}</{tag}>'


def found(step: dict) -> str:
  """The sentence of the passage, told of 'It': the same words stand before the value that is to be copied."""
  return ATTRIBUTES[step['attribute']][1].format(title='It', value=step['finding'])


def sought(step: dict) -> str:
  return f'Find the {ATTRIBUTES[step["attribute"]][0]}.'


def conclusion(question: Question) -> str:
  """What the last thought adds to the last finding: nothing on a path, else the comparison or the sum."""
  data = question.metadata
  operation = data.get('operation')
  if operation is None:
    return ''
  a, b = operands(question)
  if operation == 'same':
    return f' {a} {"=" if a == b else "!="} {b}.'
  if operation in ('more', 'less'):
    left = combine('more', a, b) == 'a'
    return f' {a} {">" if left else "<"} {b}.'
  high, low = (a, b) if operation == 'sum' or int(a) >= int(b) else (b, a)
  return f' {high} {"+" if operation == "sum" else "-"} {low} = {question.golden_answers[0]}.'


def operands(question: Question) -> tuple[str, str]:
  """The two findings that a comparison or a sum is about."""
  steps = question.metadata['steps']
  return steps[len(steps) // 2 - 1]['finding'], steps[-1]['finding']


def full_chain(question: Question, rng: random.Random | None = None) -> Spans:
  """The whole strategy: every step searched, then the gold answer. There is one way: `rng` is unused."""
  spans, thought = [], ''
  for step in question.metadata['steps']:
    spans.append(('policy', act(f'{thought}{sought(step)}', 'search', step['query'])))
    spans.append(('observation', step['query']))
    thought = found(step) + ' '
  thought = thought.strip() + conclusion(question)
  spans.append(('policy', act(thought, 'answer', question.golden_answers[0])))
  return spans


def told(steps: Sequence[dict]) -> str:
  """What the passages say about some steps of a question, a sentence each, in their words."""
  return ' '.join(ATTRIBUTES[step['attribute']][1].format(title=step['query'], value=step['finding']) for step in steps)


def with_evidence(spans: Spans, evidence: str) -> Spans:
  """The chain with a box of evidence before its answer, as R-Search wants it."""
  role, text = spans[-1]
  thought, answer = text.split('<answer>')
  return [*spans[:-1], (role, f'{thought}<original_evidence> {evidence}</original_evidence><answer>{answer}')]


def led_astray(spans: Spans, turn: int, entry: str) -> Spans:
  """The chain with its search number `turn` (from 1) asking for another entry; what follows takes no notice."""
  at = 2 * (turn - 1)
  thought = spans[at][1].split('<search>')[0]
  return [*spans[:at], ('policy', f'{thought}<search> {entry}</search>'), ('observation', entry), *spans[at + 2:]]


def answer_pools(questions: Sequence[Question]) -> dict[str, list[str]]:
  """Answer type -> the answers of that type in `questions`, with repetition: what a guess is drawn from."""
  pools = {}
  for question in questions:
    pools.setdefault(question.metadata['answer_type'], []).append(question.golden_answers[0])
  return pools


def guess(question: Question, rng: random.Random, pools: dict[str, list[str]]) -> str:
  """A plausible answer of the right type; one of the two names where the question offers two."""
  if question.metadata['answer_type'] == 'choice':
    return rng.choice(question.metadata['choices'])
  return rng.choice(pools[question.metadata['answer_type']])


def guess_chain(question: Question, rng: random.Random, pools: dict[str, list[str]]) -> Spans:
  """Answers at once, without a search."""
  return [('policy', act('I guess.', 'answer', guess(question, rng, pools)))]


def one_search_chain(question: Question, rng: random.Random, pools: dict[str, list[str]]) -> Spans:
  """One search and then an answer: the right one where one hop is enough, else a guess."""
  if question.metadata['hops'] == 1:
    return full_chain(question, rng)
  step = question.metadata['steps'][0]
  return [
    ('policy', act(sought(step), 'search', step['query'])),
    ('observation', step['query']),
    ('policy', act(f'{found(step)} I guess.', 'answer', guess(question, rng, pools))),
  ]


def information(passages: Sequence[Document]) -> str:
  """The block of an observation, as Search-R1 writes it."""
  lines = [f'Doc {i}(Title: {p.title}) {p.text}\n' for i, p in enumerate(passages, start=1)]
  return '\n<information>' + ''.join(lines) + '</information>\n'


def observe(
  spans: Spans,
  search: Callable[[str], Sequence[Document]],
  block: Callable[[Sequence[Document]], str] = information,
) -> Spans:
  """The chain with its observations filled: `search` gives the passages of a query, `block` writes them."""
  return [(role, block(search(text)) if role == 'observation' else text) for role, text in spans]
