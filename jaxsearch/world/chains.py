"""Gold chains: for a question of the embedded world every search that it needs, then the right answer.

A chain is a list of spans `(role, text)`, role `'policy'` or `'observation'`. An observation holds the query,
as an agent would send it, until `encode_chain` puts in what the search returns. The tags are Search-R1's, and
another grammar retells them. Spans are short: a thought states what was found, in the words of the document,
then what is sought next.
"""

import functools
from collections.abc import Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.methods.actions import written
from jaxsearch.tools.bm25 import BM25
from jaxsearch.trees.grammars import Called, Tagged
from jaxsearch.world import files as world
from jaxsearch.world.facts import ATTRIBUTES, sentence

TOPK = 2  # documents per search, as in configs/base.py

Spans = list[tuple[str, str]]
Example = tuple[list[int], list[bool]]  # token ids, and which of them are learned


def gold_example(question: Question, tokenizer, template: str = 'world',
                 speech: Tagged | None = None) -> Example:
  """Returns the gold chain of a question as token ids; its observations show what search returns."""
  return encode_chain(tokenizer, question, full_chain(question), template=template, speech=speech)


def full_chain(question: Question) -> Spans:
  """Returns the whole strategy: every step searched, then the gold answer."""
  spans, thought = [], ''
  for step in question.metadata['steps']:
    query = step['query']
    spans += [('policy', act(thought + sought(step), 'search', query)), ('observation', query)]
    thought = found(step) + ' '
  answer = act(thought.strip() + conclusion(question), 'answer', question.golden_answers[0])
  return [*spans, ('policy', answer)]


def act(thought: str, tag: str, content: str) -> str:
  # A space before words only, as inside a text: a small policy pays for every token.
  return f'<think> {thought}</think><{tag}> {content}</{tag}>'


def found(step: dict) -> str:
  """Returns the document's sentence with 'It' for the title: the words before the value stay the same."""
  return sentence(step['attribute'], 'It', step['finding'])


def sought(step: dict) -> str:
  return f'Find the {ATTRIBUTES[step["attribute"]]["sought"]}.'


def conclusion(question: Question) -> str:
  """Returns what the last thought adds to the last finding: on a path nothing, else a comparison or a sum."""
  operation = question.metadata.get('operation')
  if operation is None:
    return ''
  a, b = operands(question)
  if operation == 'same':
    return f' {a} {"=" if a == b else "!="} {b}.'
  if operation in ('more', 'less'):
    return f' {a} {">" if int(a) > int(b) else "<"} {b}.'
  high, low = (a, b) if operation == 'sum' or int(a) >= int(b) else (b, a)
  return f' {high} {"+" if operation == "sum" else "-"} {low} = {question.golden_answers[0]}.'


def operands(question: Question) -> tuple[str, str]:
  """Returns the two findings that a comparison or a sum is about."""
  steps = question.metadata['steps']
  return steps[len(steps) // 2 - 1]['finding'], steps[-1]['finding']


@functools.cache  # questions share entities
def search(query: str) -> list[Document]:
  """Returns what the world's search returns; shared, so not to be changed."""
  return _index().search([query], TOPK)[0]


_index = functools.cache(lambda: BM25(world.corpus()))


def encode_chain(tokenizer, question: Question, spans: Spans,
                 results: dict[str, list[Document]] | None = None, *, template: str = 'world',
                 speech: Tagged | None = None) -> Example:
  """Tokenises a chain behind its prompt, policy spans learned.

  Observations show `results` (query -> documents) or search itself. `speech` is the grammar, by default that
  of Search-R1's tags.
  """
  speech = speech or Tagged(tokenizer)
  texts = [(speech.prompt(question.question, template, False), False)]
  for role, text in spans:
    if role == 'policy':
      text = speech.retell(text)
    else:  # it holds the query
      found, call = results[text] if results else search(text), Called('search', {'query': text})
      text = speech.observe(None, [(call, written(speech, call, [found]))])
    texts.append((text, role == 'policy'))
  return encode(tokenizer, texts)


def encode(tokenizer, spans: Sequence[tuple[str, bool]]) -> Example:
  """Tokenises (text, whether it is learned) span by span, so that the ids are those of a rollout."""
  ids, learned = [], []
  for text, trained in spans:
    tokens = tokenizer.encode(text)
    ids += tokens
    learned += [trained] * len(tokens)
  return ids, learned
