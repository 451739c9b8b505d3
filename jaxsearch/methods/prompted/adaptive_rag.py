"""Adaptive-RAG (Jeong et al. 2024, arXiv 2403.14403): a classifier chooses direct inference, RAG or IRCoT.

The paper's classifier is a T5 that was trained on which of the three answers a question; here it is a small
decoder of yours that writes A, B or C (`config.classifier`), or the policy itself, by the log-probabilities
of the letters.
"""

import re

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import direct, ircot, rag, write
from jaxsearch.sampler.requests import Ask, Growth, Refused, Score, ToolFailure
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Tree

SERVICES = ('classifier',)
ROUTES = {'A': 'direct', 'B': 'rag', 'C': 'ircot'}


def grow(question: Question, tree: Tree, *, classifier: str = 'policy', max_thoughts: int = 8,
         max_documents: int = 15, reader: bool = True, max_tokens: int = 64, document_tokens: int = 1500,
         prompts: str = '', chat: bool = False) -> Growth[None]:
  """Grows what the chosen method grows; tree.metrics has `route_direct`, `route_rag` and `route_ircot`.

  Args:
    classifier: 'policy', or 'model' for the service `classifier`. If its choice cannot be read, the route is
      RAG (counted in `unclassified`).
    max_thoughts, max_documents, reader, document_tokens: of IRCoT.
  """
  if classifier == 'model':
    asked = grammar.neutralise(question.question, grammar.CONTROL)
    template = templates.files('prompted', prompts)['complexity']
    reply = yield Ask('classifier', templates.fill(template, question=asked))
    if isinstance(reply, ToolFailure):
      raise Refused(f"grow.classifier='model': {reply.reason}")
    letter = re.search(r'\b[ABC]\b', reply)
    route = ROUTES[letter[0]] if letter else None
  else:
    letters = ROUTES if chat else [f' {letter}' for letter in ROUTES]
    scores = yield Score(write(tree, 'complexity', prompts, chat), tuple(letters))
    route = None if None in scores else max(zip(map(sum, scores), ROUTES.values()))[1]
  tree.metrics.update({f'route_{name}': int(name == (route or 'rag')) for name in ROUTES.values()})
  tree.metrics['unclassified'] = int(route is None)
  settings = dict(max_tokens=max_tokens, prompts=prompts, chat=chat)
  if route == 'ircot':
    settings |= dict(max_thoughts=max_thoughts, max_documents=max_documents, reader=reader,
                     document_tokens=document_tokens)
  yield from {'direct': direct, 'ircot': ircot}.get(route, rag).grow(question, tree, **settings)
