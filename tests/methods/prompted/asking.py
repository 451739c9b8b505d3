"""Drives the methods of methods/prompted with terse prompts, so that a test can spell out all that the policy
is shown."""

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import Generate, Search
from jaxsearch.trees import grammars
from jaxsearch.trees.grammar import SEARCH_R1
from tests.methods.driving import Letters, drive

PROMPTS = {
  'direct': 'direct {question}:', 'cot': 'cot {question}:', 'documents': 'read {documents}{question}:',
  'reasoned': 'reason {documents}{question}:', 'candidates': 'two {documents}{question}:',
  'summary': 'for {candidate} {documents}{question}:',
  'validity': '{summary} supports {candidate} {question}?',
  'ranking': '1 {first} 2 {second} {question}?', 'complexity': 'hard {question}?',
  'search_o1': 'search {limit} {question}:',
  'extract': '{reasoning} | {query} {documents}:', 'react': 'act {question}:', 'tools': 'may {question}:',
  'tools_forced': 'must {question}:',
}  # fmt: skip
Q = 'Who wrote it?'


def document(number):
  return Document(str(number), f'T{number}', f'text {number}')


def by_query(request):
  """One document, whose title is the query."""
  return [Document(request.query, request.query, 'text')]


def ask(method, folder, said, **settings):
  """`drive` with the terse prompts, which it writes into a folder."""
  for name, text in PROMPTS.items():
    (folder / f'{name}.txt').write_text(text)
  grow = lambda question, tree, template, **own: method.grow(question, tree, **own)
  return drive(said, grow=grow, prompts=str(folder), speech=grammars.of_tags(Letters(), getattr(method, 'TAGS', SEARCH_R1)),
               **settings)


def shown(requests):
  """What the policy is shown at each call, and the queries: 'text' and ('query', topk)."""
  read = {Generate: lambda one: one.node.tree.tokenizer.decode(one.node.path_tokens()),
          Search: lambda one: (one.query, one.topk)}
  return [read[type(one)](one) for one in requests if type(one) in read]
