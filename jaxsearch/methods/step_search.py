"""StepSearch (Wang et al. 2025, arXiv 2505.15107): Search-R1 with PPO; a search earns what its documents add.

The last token of a round of search gets its information gain minus its redundancy (eq. 7), the last token of
the chain the F1 of the answer plus how well the queries cover the golden ones (eq. 6). Needs
`config.critic.enabled`. Differs from the paper:

  * a document is a golden one or not, by id or title; the paper takes the cosine of TF-IDF vectors (eq. 8);
  * golden documents are `metadata['gold_passages']` of the embedded world, or the titles in the
    `supporting_facts` of HotpotQA and 2WikiMultiHopQA; golden queries are those of the world's `steps`. The
    paper makes both for MuSiQue. What a question lacks earns nothing;
  * 0.618 is the weight of the queries in the authors' code, which also gives -1 to chains without an answer
    and 0.6 of its step rewards; here as in the paper (eq. 3) the former get nothing, the latter are whole.
"""

from collections.abc import Sequence

import numpy as np

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups
from jaxsearch.methods.actions import read
from jaxsearch.methods.credit import credit_with_critic, rewarded
from jaxsearch.methods.search_r1 import grow
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import token_f1
from jaxsearch.trees.tree import Node, Role, Tree

__all__ = ['credit', 'grow']


def credit(groups: Groups, context: Context, *, key_weight: float = 0.618,
           gamma: float = 1.0, lam: float = 1.0) -> None:
  """Credits tokens by GAE of the rewards of rounds and chain; `key_weight` is gamma_key of eq. 6."""
  trees = rewarded(groups, lambda tree: reward(tree, key_weight))
  for tree in trees:
    retrieved = [node.data['documents'] for node in rounds(tree)]
    gains, repeated = step_rewards(retrieved, *golden_documents(tree.question))
    for node, gain, penalty in zip(rounds(tree), gains, repeated):
      node.data['reward'] = gain - penalty
    tree.metrics.update(information_gain=sum(gains), redundancy=sum(repeated))
  context.metrics.update(credit_with_critic(trees, gamma=gamma, lam=lam))


def rounds(tree: Tree) -> list[Node]:
  """Returns the spans of a chain whose search was served."""
  return [node for node in tree.nodes(Role.POLICY) if 'documents' in node.data]


def reward(tree: Tree, key_weight: float = 0.618) -> float:
  """Returns `r_answer + gamma_key r_key` (eq. 6) and notes the parts in tree.metrics."""
  spans = tree.turns()
  boxed = formats.only_box([tree.grammar.content(node) for node in spans], 'answer') is not None
  well_formed = rounds(tree) and boxed and any(read(node).thinking for node in spans)  # section 2.3.1
  answer = token_f1(tree.answer, tree.question.golden_answers) if well_formed else 0.0
  queries = [query for node in rounds(tree) for query in read(node).queries]
  keys = search_keys(queries, tree.question.metadata.get('steps', ()))
  tree.metrics.update(reward_answer=answer, reward_keys=keys)
  return answer + key_weight * keys


def search_keys(queries: Sequence[str], steps: Sequence[dict]) -> float:
  """Returns the mean over the golden queries of the best F1 that a query reaches (eq. 5); 0 without any."""
  best = [max((token_f1(query, step['query']) for query in queries), default=0.0) for step in steps]
  return float(np.mean(best)) if best else 0.0


def golden_documents(question: Question) -> tuple[str, list[str]]:
  """Returns (field of a document, its values in the golden ones); no values if the question names none."""
  if 'gold_passages' in question.metadata:
    return 'id', list(dict.fromkeys(question.metadata['gold_passages']))
  if not (titles := question.metadata.get('gold_titles')):  # of benchmarks.py; FlashRAG's have the facts
    facts = question.metadata.get('supporting_facts') or ()
    titles = facts['title'] if isinstance(facts, dict) else [title for title, *_ in facts]
  return 'title', list(dict.fromkeys(titles))


def step_rewards(retrieved: Sequence[Sequence[Document]], field: str,
                 golden: Sequence[str]) -> tuple[list[float], list[float]]:
  """Returns information gain (eqs. 8 to 11) and redundancy (eqs. 12, 13) of every round, from its documents.

  `field` and `golden` are what `golden_documents` returns.
  """
  if not golden:
    return [0.0] * len(retrieved), [0.0] * len(retrieved)
  best, seen, gains, repeated = np.zeros(len(golden)), set(), [], []
  for documents in retrieved:
    match = np.isin(golden, [getattr(document, field) for document in documents]).astype(float)  # c
    gains.append(float(np.maximum(match - best, 0).mean()))
    best = np.maximum(best, match)
    names = [(document.id, document.title) for document in documents]
    repeated.append(sum(name in seen for name in names) / max(len(names), 1))
    seen.update(names)
  return gains, repeated
