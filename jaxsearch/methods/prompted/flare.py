"""FLARE, direct (Jiang et al. 2023, arXiv 2305.06983): look a sentence ahead, search where it is unsure.

The next sentence is written without documents. If a token of it is less probable than `search_below`, the
sentence without the tokens below `mask_below` is the query, and the sentence is written anew with the
documents (sections 3.2.1 and 3.2.2).
"""

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import find, finish, joined, marked_answer, plain, say_sentence, write
from jaxsearch.sampler.requests import Growth, NoLogprobs
from jaxsearch.trees.tree import Node, Tree


def grow(question: Question, tree: Tree, *, search_below: float = 0.8, mask_below: float = 0.4,
         look_ahead: int = 64, max_sentences: int = 16, max_tokens: int = 256, prompts: str = '',
         chat: bool = False) -> Growth[None]:
  """Grows one or two calls for each sentence, until one has the answer.

  Args:
    search_below, mask_below: theta and beta, probabilities.
    look_ahead: tokens of a sentence at most.
    max_sentences, max_tokens: of the whole answer.
  """
  text, tokens = '', 0
  for _ in range(max_sentences):
    node, sentence = yield from say_sentence(write(tree, 'cot', prompts, chat, said=text), look_ahead)
    query = unsure_query(node, sentence, search_below, mask_below)
    if query:
      documents = yield from find(tree, query)
      asked = write(tree, 'reasoned', prompts, chat, documents=documents, said=text)
      node, sentence = yield from say_sentence(asked, look_ahead)
    text = joined(text, sentence)
    tokens += len(node.tokens)
    if not sentence.strip() or marked_answer(text) is not None or tokens >= max_tokens:
      break
  finish(tree, node, marked_answer(text))


def unsure_query(node: Node, sentence: str, search_below: float, mask_below: float) -> str:
  """Returns the query for a sentence at the start of a span, '' if the policy is sure; raises NoLogprobs."""
  if node.sampler_logprobs is None:
    raise NoLogprobs
  tokenizer = node.tree.tokenizer
  ids = [token for token in node.tokens if token not in tokenizer.eos_ids]
  ends = (count for count in range(len(ids)) if len(tokenizer.decode(ids[:count])) >= len(sentence))
  ids = ids[:next(ends, len(ids))]
  probabilities = np.exp(node.sampler_logprobs[:len(ids)])
  if not len(ids) or probabilities.min() >= search_below:
    return ''
  return plain(tokenizer.decode([token for token, p in zip(ids, probabilities) if p >= mask_below]))
