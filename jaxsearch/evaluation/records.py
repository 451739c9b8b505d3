"""What is kept of an answered question, as JSON can hold it: all figures of an evaluation are computed from such records."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxsearch.rewards.match import entity_match, f1
from jaxsearch.trees.spans_shown import spans
from jaxsearch.trees.tree import Role, Tree


def predictions(trees: Sequence[Tree]) -> list[dict]:
  """A record for each tree: the question, what was answered and how it was found; `reward` where the tree has one."""
  return [
    {'id': tree.question.id, 'source': tree.question.metadata.get('source', ''), 'question': tree.question.question,
     'golden_answers': list(tree.question.golden_answers), 'prediction': tree.answer, 'em': tree.question.score(tree.answer),
     'f1': f1(tree.answer, tree.question.golden_answers), 'em_entity': max(
       tree.question.score(tree.answer), entity_match(tree.answer, tree.question.golden_answers)),
     'searches': tree.metrics['searches'], 'tokens': tree.count(Role.POLICY), 'stop': tree.stop, 'spans': spans(tree)}
    | ({} if tree.reward is None else {'reward': float(tree.reward)})
    | ({'hops': tree.question.metadata['hops']} if 'hops' in tree.question.metadata else {})
    for tree in trees]


def policy_spans(record: Mapping[str, Any]) -> list[dict]:
  """The spans that the policy wrote, in order; of CARL its segments."""
  return [span for span in record['spans'] if span['role'] == Role.POLICY.value]
