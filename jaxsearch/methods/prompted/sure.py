"""SuRe (Kim et al. 2024, arXiv 2404.13081): two candidates, a summary for each; the better summary wins.

The policy judges its own summaries: whether each supports its candidate (validity), and which of two says
more about the question (ranking, asked in both orders, as the first of two has an advantage). The sum of both
decides (equation 6).
"""

import re

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import ENDS, find, finish, short_answer, write
from jaxsearch.sampler.requests import Generate, Growth
from jaxsearch.trees.tree import Tree

JUDGE_TOKENS = 8  # 'True', 'Passage 1'


def grow(question: Question, tree: Tree, *, max_tokens: int = 64, summary_tokens: int = 256,
         prompts: str = '', chat: bool = False) -> Growth[None]:
  """Grows the candidates, then summaries together, then judgements together.

  Without two candidates the first one is the answer. `max_tokens` are of the candidates.
  """
  ask = lambda call, **fields: write(tree, call, prompts, chat, **fields)
  documents = yield from find(tree, question.question)
  node = yield Generate(ask('candidates', documents=documents), stop=ENDS, max_tokens=max_tokens)
  candidates = list(dict.fromkeys(read_candidates(node.text_without_end)))[:2]
  if len(candidates) < 2:
    answer = candidates[0] if candidates else short_answer(node.text_without_end)
    return finish(tree, node, answer)
  asked = [ask('summary', documents=documents, candidate=candidate) for candidate in candidates]
  spans = yield [Generate(each, max_tokens=summary_tokens) for each in asked]
  summaries = [span.text_without_end.strip() for span in spans]
  asked = [ask('validity', candidate=candidate, summary=summary)
           for candidate, summary in zip(candidates, summaries)]
  asked += [ask('ranking', first=first, second=second) for first, second in (summaries, summaries[::-1])]
  spans = yield [Generate(each, max_tokens=JUDGE_TOKENS) for each in asked]
  verdicts = [span.text_without_end.lower() for span in spans]
  scores = [float('true' in verdict) for verdict in verdicts[:2]]
  for first, verdict in enumerate(verdicts[2:]):  # each is the first once
    scores[first] += 1.0 if 'passage 1' in verdict else 0.0 if 'passage 2' in verdict else 0.5
  tree.root.data['scores'] = dict(zip(candidates, scores))
  finish(tree, node, candidates[0] if scores[0] >= scores[1] else candidates[1])


def read_candidates(text: str) -> list[str]:
  """Reads the candidates of '(a) one, (b) two'."""
  parts = re.findall(r'\([a-z]\)\s*([^()\n]+)', text)
  candidates = [re.sub(r'\s+', ' ', part).strip(' .,;*"') for part in parts]
  return [candidate for candidate in candidates if candidate]
