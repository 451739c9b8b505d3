"""Two trajectories for one question, held against each other by a language model (Search-R2, section 5.6, appendix I).

Each gets 0, 1 or 2 on six rubrics that say nothing about whether the answer is right, but how it was found. A pair is asked
about twice, with the trajectories in either order, and the scores of both replies are averaged: a judge that prefers a
place does not decide. Text of the trajectories stands between tags that it cannot close or imitate, and holds no JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxsearch.rewards.judge import CONTROL
from jaxsearch.trees import grammar, templates

Spans = tuple[tuple[str, str], ...]  # (role, text), in order
Scores = dict[str, float]  # rubric -> 0 to 2

RUBRICS = {
  'groundedness': 'is what it claims, its answer above all, borne out by what was retrieved?',
  'density': 'how much of what was retrieved is of use for the question, and how little of it is noise?',
  'non_redundancy': 'does every search ask for something new, and are there no more of them than needed?',
  'query_timing': 'does it search when something is missing, neither earlier nor later, and does the query say precisely what?',
  'coherence': 'do thoughts, findings and answer go together from beginning to end, without drift or contradiction?',
  'uncertainty': 'where findings are missing or ambiguous, does it say so or look further, instead of asserting something?',
}
NEUTRAL = dict.fromkeys(RUBRICS, 1.0)
PLACES = ('first', 'second')
WRITERS = {'policy': 'agent', 'observation': 'retrieved'}  # role -> tag; prompts and copies of a context are not judged

_TAGS = grammar.Tags(others=(*WRITERS.values(), *(f'{place}_trajectory' for place in PLACES)))
# The form is no JSON as it stands: who repeats it has given no score.
_FORM = json.dumps({place: dict.fromkeys(RUBRICS, 'N') for place in PLACES}).replace('"N"', 'N')


@dataclasses.dataclass(frozen=True)
class Pair:
  """What is compared: two trajectories for one question."""
  question: str
  a: Spans
  b: Spans


def prompts(pair: Pair, template: str = '') -> tuple[str, str]:
  """The prompts about a pair: with `a` first, and with `b` first. `template` is the user's text in place of ours."""
  rubrics = ''.join(f'- {name}: {text}\n' for name, text in RUBRICS.items())

  def written(*both: Spans) -> str:
    shown = ''.join(f'<{place}_trajectory>\n{_shown(spans)}</{place}_trajectory>\n' for place, spans in zip(PLACES, both))
    return templates.fill(template or templates.judge_files()['pair'], rubrics=rubrics, form=_FORM,
                          question=_quoted(pair.question), trajectories=shown)

  return written(pair.a, pair.b), written(pair.b, pair.a)


def read(reply: str) -> tuple[Scores, Scores] | None:
  """The scores of the first and of the second trajectory; None unless the reply ends with the JSON object asked for.

  The object may stand in a code fence. A rubric that is missing, unknown or given twice, and a score that is not one of 0, 1
  and 2, make all of it unreadable.
  """
  parts = reply.strip().removesuffix('```').rsplit('{', 3)  # the object asked for has three braces, so it begins at the third
  if len(parts) < 4:
    return None
  try:
    found = json.loads('{' + '{'.join(parts[1:]), object_pairs_hook=_object)
  except (ValueError, RecursionError):
    return None
  if found.keys() != set(PLACES) or not all(_is_scores(scores) for scores in found.values()):
    return None
  first, second = ({name: float(found[place][name]) for name in RUBRICS} for place in PLACES)
  return first, second


def averaged(replies: Sequence[object]) -> tuple[Scores, Scores] | None:
  """(scores of `a`, scores of `b`) from the replies to both `prompts` of a pair.

  None, which whoever asked takes as neutral and counts, if either cannot be read or is no text: one order alone would hand
  the pair to the judge's liking for a place.
  """
  found = [read(reply) if isinstance(reply, str) else None for reply in replies]
  if None in found:
    return None
  (a, b), (swapped_b, swapped_a) = found
  return tuple({name: (own[name] + swapped[name]) / 2 for name in RUBRICS} for own, swapped in ((a, swapped_a), (b, swapped_b)))


def _shown(spans: Spans) -> str:
  return ''.join(f'<{WRITERS[role]}>{_quoted(text)}</{WRITERS[role]}>\n' for role, text in spans if role in WRITERS)


def _quoted(text: str) -> str:
  """Text that can neither close the tags around it nor hold a JSON object."""
  return grammar.neutralise(text.strip(), (*CONTROL, '{'), _TAGS)


def _object(pairs: list[tuple[str, object]]) -> dict:
  if len(dict(pairs)) < len(pairs):
    raise ValueError('a key stands twice')
  return dict(pairs)


def _is_scores(found: object) -> bool:
  return isinstance(found, dict) and found.keys() == RUBRICS.keys() and all(
    type(score) is int and 0 <= score <= 2 for score in found.values())  # bool is an int, too
