"""ReAct (Yao et al. 2023, arXiv 2210.03629): thought, action, observation by turns, after worked examples.

Actions are Search[query], Lookup[words] (the next sentence with these words in what was found last) and
Finish[answer]. The examples stand in the prompt.
"""

import re

from jaxsearch.data.questions import Question
from jaxsearch.methods import search_r1
from jaxsearch.methods.prompted import find, finish, write
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role, Stop, Tree

STOPS = (']\n', '\nObservation')
NO_ACTION = 'That is no action. The actions are Search[query], Lookup[words] and Finish[answer].'
_ACTION = re.compile(r'\b(Search|Lookup|Finish)\[([^\]\n]*)\]', re.IGNORECASE)


def grow(question: Question, tree: Tree, *, max_steps: int = 7, max_tokens: int = 128, tagged: bool = False,
         prompts: str = '', chat: bool = False) -> Growth[None]:
  """Grows one chain.

  Args:
    max_steps: thoughts with their actions.
    tagged: the actions are `<search>` and `<answer>`, as the shipped policies write them.
  """
  node = write(tree, 'react', prompts, chat)
  if tagged:
    return (yield from search_r1.act(tree, node, turns=max_steps - 1, max_tokens=max_tokens))
  sentences, hits, looked_up, answer = [], [], None, None
  for step in range(1, max_steps + 1):
    node = yield Generate(node, stop=STOPS, max_tokens=max_tokens)
    text = node.text_without_end
    action, words = read(text)
    if action == 'finish':
      answer = words or None
    if action == 'finish' or step == max_steps or node.stop in (Stop.CONTEXT_FULL, Stop.DEADLINE):
      break
    if action == 'search' and words:
      documents = yield from find(tree, words)
      texts, looked_up = [document.text.strip() for document in documents], None
      sentences = [sentence for text in texts for sentence in re.split(r'(?<=[.?!])\s+', text) if sentence]
      shown = grammar.listed(documents).strip() or 'Nothing was found.'
    elif action == 'lookup' and words:
      if words != looked_up:  # the same words again go on to the next sentence
        hits, looked_up = [text for text in sentences if words.lower() in text.lower()], words
      shown = hits.pop(0) if hits else 'No more results.'
    else:
      tree.metrics['malformed'] += 1
      shown = NO_ACTION
    head = '' if text.endswith('\nObservation') else 'Observation' if text.endswith('\n') else '\nObservation'
    node = node.append(f'{head} {step}: {tree.grammar.safe(shown)}\n', Role.OBSERVATION)
    node = node.append(f'Thought {step + 1}:', Role.PROMPT)
  finish(tree, node, answer, spent=action in ('search', 'lookup'))


def read(text: str) -> tuple[str | None, str]:
  """Returns (action, words) of a thought: 'search', 'lookup' or 'finish', or None."""
  match = _ACTION.search(text)
  return (match[1].lower(), match[2].strip()) if match else (None, '')
