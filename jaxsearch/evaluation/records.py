"""The record that is kept of an answered question: all figures of an evaluation are computed from such records."""

from collections.abc import Mapping
from typing import Any

from jaxsearch.evaluation.figures import FIGURES
from jaxsearch.trees.spans_shown import spans
from jaxsearch.trees.tree import Role, Tree


def record_of(tree: Tree) -> dict[str, Any]:
  """Returns a finished tree as JSON can hold it: what was asked and answered, how, and its `FIGURES`."""
  question = tree.question
  kept = {'id': question.id, 'source': question.metadata.get('source', ''), 'question': question.question,
          'golden_answers': list(question.golden_answers), 'prediction': tree.answer, 'stop': tree.stop,
          'tokens': tree.count(Role.POLICY), 'spans': spans(tree)}
  kept |= {name: figure.of(tree) for name, figure in FIGURES.items() if figure.of}
  kept |= {} if tree.reward is None else {'reward': float(tree.reward)}
  return kept | ({'hops': question.metadata['hops']} if 'hops' in question.metadata else {})


def policy_spans(record: Mapping[str, Any]) -> list[dict]:
  """Returns the spans that the policy wrote, in order; of CARL its segments."""
  return [span for span in record['spans'] if span['role'] == Role.POLICY.value]
