"""Gold chains: for a question of the embedded world every search that it needs, then the right answer.

A chain is a list of spans `(role, text)`, role `'policy'` or `'observation'`. An observation holds the query, as an agent would
send it, until `encode_chain` puts in what the search returns. The grammar is Search-R1's, the spans are short: a thought states
what was found, in the words of the document, then what is sought next.
"""

import functools
from collections.abc import Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.tools.bm25 import BM25
from jaxsearch.trees import grammar, templates
from jaxsearch.world import files as world
from jaxsearch.world.facts import ATTRIBUTES, sentence
from jaxsearch.world.questions import combine

TOPK = 2  # documents per search, as in configs/base.py

Spans = list[tuple[str, str]]
Example = tuple[list[int], list[bool]]  # token ids, and which of them are learned


def gold_example(question: Question, tokenizer, template: str = 'world') -> Example:
  """The gold chain of a question of the world as token ids; its observations show what search returns."""
  return encode_chain(tokenizer, question, full_chain(question), template=template)


def full_chain(question: Question) -> Spans:
  """The whole strategy: every step searched, then the gold answer."""
  spans, thought = [], ''
  for step in question.metadata['steps']:
    spans += [('policy', act(thought + sought(step), 'search', step['query'])), ('observation', step['query'])]
    thought = found(step) + ' '
  return [*spans, ('policy', act(thought.strip() + conclusion(question), 'answer', question.golden_answers[0]))]


def act(thought: str, tag: str, content: str) -> str:
  # No space before a closing tag or between tags: a small policy pays for every token. One before words, as inside a text.
  return f'<think> {thought}</think><{tag}> {content}</{tag}>'


def found(step: dict) -> str:
  """The sentence of the document with 'It' for its title: the same words stand before the value that is to be copied."""
  return sentence(step['attribute'], 'It', step['finding'])


def sought(step: dict) -> str:
  return f'Find the {ATTRIBUTES[step["attribute"]]["sought"]}.'


def conclusion(question: Question) -> str:
  """What the last thought adds to the last finding: nothing on a path, else the comparison or the sum."""
  operation = question.metadata.get('operation')
  if operation is None:
    return ''
  a, b = operands(question)
  if operation == 'same':
    return f' {a} {"=" if a == b else "!="} {b}.'
  if operation in ('more', 'less'):
    return f' {a} {">" if combine("more", a, b) == "a" else "<"} {b}.'
  high, low = (a, b) if operation == 'sum' or int(a) >= int(b) else (b, a)
  return f' {high} {"+" if operation == "sum" else "-"} {low} = {question.golden_answers[0]}.'


def operands(question: Question) -> tuple[str, str]:
  """The two findings that a comparison or a sum is about."""
  steps = question.metadata['steps']
  return steps[len(steps) // 2 - 1]['finding'], steps[-1]['finding']


@functools.cache  # questions share entities
def search(query: str) -> list[Document]:
  """What the world's search returns; shared, so not to be changed."""
  return _index().search([query], TOPK)[0]


_index = functools.cache(lambda: BM25(world.corpus()))


def results_of(question: Question) -> dict[str, list[Document]]:
  """Query -> what search returns, for each step of the gold chain."""
  return {step['query']: search(step['query']) for step in question.metadata['steps']}


def encode_chain(tokenizer, question: Question, spans: Spans, results: dict[str, list[Document]] | None = None, *,
                 template: str = 'world', tags: grammar.Tags = grammar.SEARCH_R1) -> Example:
  """A chain behind its prompt, policy spans learned; observations show `results` (query -> documents) or search itself."""
  shown = lambda query: grammar.information(results[query] if results else search(query), tokenizer.special_tokens, tags)
  return encode(tokenizer, [(templates.prompt(question.question, template), False),
                            *((text, True) if role == 'policy' else (shown(text), False) for role, text in spans)])


def encode(tokenizer, spans: Sequence[tuple[str, bool]]) -> Example:
  """Tokenises (text, whether it is learned) span by span, as the sampler does, so that the ids are those of a rollout."""
  ids, learned = [], []
  for text, trained in spans:
    tokens = tokenizer.encode(text)
    ids += tokens
    learned += [trained] * len(tokens)
  return ids, learned
