"""R-Search (Zhao et al. 2025, arXiv 2506.04185): search, quote evidence, answer; three rewards.

A chain ends in one box of evidence and one of the answer. The reward is the F1 of the answer, the F1 of the
answer that a frozen model of another family (the 'reader') gives from question and evidence alone, and the
format (eqs. 3 to 8). Documents carry no loss; evidence does, because the policy wrote it. Credited by GRPO,
or PPO with a critic.

By eqs. 4 and 5 alone (`evidence_needs_search=False`) evidence that the policy made up is rewarded too. Here a
box of evidence that was opened before the first documents forfeits the reader's reward and its part of the
format's; in the authors' code only a chain that never searches forfeits them.
"""

import functools
from collections.abc import Sequence

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups, search_r1
from jaxsearch.methods.credit import credit_relative, credit_with_critic, rewarded
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import token_f1
from jaxsearch.sampler.requests import Ask, Growth, ToolFailure
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Tree

SERVICES = ('reader',)
TAGS = grammar.R_SEARCH


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500,
         template: str = 'r_search', chat: bool = False, evidence_template: str = 'r_search') -> Growth[None]:
  """Grows one chain as Search-R1 does and asks the reader to answer from the evidence.

  Sets tree.metrics['evidence_f1'], the F1 of the reader's answer, 0 unless there is exactly one well-formed
  box of evidence; and 'evidence_unfounded', see `unfounded`.
  """
  yield from search_r1.grow(question, tree, max_turns=max_turns, max_tokens=max_tokens, template=template,
                            chat=chat)
  tree.answer = tree.answer and formats.unwrapped(tree.answer)
  nodes = tree.turns()
  written = [tree.grammar.content(node) for node in nodes]
  found = [bool(node.data.get('documents')) for node in nodes]
  tree.metrics.update(evidence_f1=0.0, evidence_unfounded=int(unfounded(written, found)))
  evidence = formats.only_box(written, grammar.EVIDENCE)
  if evidence:
    answer = yield Ask('reader', templates.reader_prompt(question.question, evidence, evidence_template))
    if not isinstance(answer, ToolFailure):  # the sampler counts failures
      tree.metrics['evidence_f1'] = token_f1(answer, question.golden_answers)


def unfounded(written: Sequence[str], found: Sequence[bool]) -> bool:
  """Tells whether a span opened a box of evidence before a search of an earlier one found documents."""
  unseen = written[:found.index(True) + 1] if True in found else written
  return any(f'<{grammar.EVIDENCE}>' in text for text in unseen)


def reward(tree: Tree, *, evidence_weight: float = 1.0, gamma_evidence: float = 0.2,
           gamma_answer: float = 0.2, evidence_needs_search: bool = True) -> float:
  """Returns `r_a + r_e + r_f` (eq. 6) and notes the parts in tree.metrics."""
  written = [tree.grammar.content(node) for node in tree.turns()]
  box = formats.only_box(written, 'answer')
  answer = token_f1(box and formats.unwrapped(box), tree.question.golden_answers)
  evidence = tree.metrics['evidence_f1']
  if evidence_needs_search and tree.metrics['evidence_unfounded']:
    evidence = gamma_evidence = 0.0
  form = formats.r_search_format(written, tree.metrics['found'] > 0, gamma_evidence=gamma_evidence,
                                 gamma_answer=gamma_answer)
  tree.metrics.update(reward_answer=answer, reward_evidence=evidence, reward_format=form)
  return answer + evidence_weight * evidence + form


def credit(groups: Groups, context: Context, *, estimator: str = 'grpo',
           evidence_weight: float = 1.0, gamma_evidence: float = 0.2, gamma_answer: float = 0.2,
           evidence_needs_search: bool = True, normalize_std: bool = True, singleton: str = 'raw',
           gamma: float = 1.0, lam: float = 1.0) -> None:
  """Rewards every chain, then GRPO against the others of its question, or GAE with the critic.

  The ablation without evidence (tables 3 and 6) sets `evidence_weight` and `gamma_evidence` to 0, and takes a
  prompt that asks for none: configs/r_search_without_evidence.py.
  """
  trees = rewarded(groups, functools.partial(
    reward, evidence_weight=evidence_weight, gamma_evidence=gamma_evidence, gamma_answer=gamma_answer,
    evidence_needs_search=evidence_needs_search))
  if estimator == 'ppo':
    context.metrics.update(credit_with_critic(trees, gamma=gamma, lam=lam))
  else:
    credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
