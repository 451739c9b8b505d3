"""Pairwise judging of two trajectories for one question (Search-R2, section 5.6, appendix I).

Each trajectory gets 0, 1 or 2 on six rubrics of how the answer was found. Then the judge names the winner
(table 10): by the outcome first, by the process where the outcomes are alike, and a tie only where nothing
tells them apart. The paper shows a pair once; here the judge sees it in either order, so that a bias for one
position cancels: scores are averaged, and a winner has to win in both. Trajectory text stands between tags
that it cannot close or imitate, and holds no JSON.
"""

import dataclasses
import json
from collections.abc import Sequence

from jaxsearch.trees import grammar, templates

Spans = tuple[tuple[str, str], ...]  # (role, text), in order
Scores = dict[str, float]            # rubric -> 0 to 2

RUBRICS = {
  'groundedness': 'is what it claims, its answer above all, borne out by what was retrieved?',
  'density': 'how much of what was retrieved is of use for the question, and how little of it is noise?',
  'non_redundancy': 'does every search ask for something new, and are there no more of them than needed?',
  'query_timing': 'does it search when something is missing, neither earlier nor later, '
                  'and does the query say precisely what?',
  'coherence': 'do thoughts, findings and answer go together from beginning to end, '
               'without drift or contradiction?',
  'uncertainty': 'where findings are missing or ambiguous, does it say so or look further, '
                 'instead of asserting something?',
}
NEUTRAL = dict.fromkeys(RUBRICS, 1.0)
POSITIONS = ('first', 'second')
TIE = 'tie'
WRITERS = {'policy': 'agent', 'observation': 'retrieved'}  # role -> tag; the judge sees no other roles

_TAGS = grammar.Tags(others=(*WRITERS.values(), *(f'{position}_trajectory' for position in POSITIONS)))
# The form itself is not valid JSON: repeating it scores nothing.
_FORM = json.dumps({position: dict.fromkeys(RUBRICS, 'N') for position in POSITIONS} | {'winner': 'W'})
_FORM = _FORM.replace('"N"', 'N').replace('"W"', ' | '.join(f'"{winner}"' for winner in (*POSITIONS, TIE)))


@dataclasses.dataclass(frozen=True)
class TrajectoryPair:
  """Two trajectories for one question, of a data set."""
  question: str
  a: Spans
  b: Spans
  dataset: str = ''


def prompts(pair: TrajectoryPair, template: str = '') -> tuple[str, str]:
  """Writes the judge's prompts for a pair, `a` first and `b` first; `template` takes the place of ours."""
  rubrics = ''.join(f'- {name}: {text}\n' for name, text in RUBRICS.items())

  def ordered(*both: Spans) -> str:
    shown = ''
    for position, spans in zip(POSITIONS, both):
      written = [(WRITERS[role], text) for role, text in spans if role in WRITERS]
      inside = ''.join(f'<{tag}>{_quoted(text)}</{tag}>\n' for tag, text in written)
      shown += f'<{position}_trajectory>\n{inside}</{position}_trajectory>\n'
    return templates.fill(template or templates.files('judge')['pair'], rubrics=rubrics, form=_FORM,
                          question=_quoted(pair.question), trajectories=shown)

  return ordered(pair.a, pair.b), ordered(pair.b, pair.a)


def read(reply: str) -> tuple[Scores, Scores, str] | None:
  """Reads the scores of both trajectories, and the winner, from the object that ends the reply.

  A code fence around it is fine. None for a missing or unknown rubric, a score other than 0, 1 and 2, or a
  winner other than 'first', 'second' and 'tie'.
  """
  parts = reply.strip().removesuffix('```').rsplit('{', 3)  # the object has three opening braces
  try:
    verdict = json.loads('{' + '{'.join(parts[1:]))
    first, second, winner = (verdict.pop(name) for name in (*POSITIONS, 'winner'))
    scores = [*first.values(), *second.values()]
  except (ValueError, KeyError, AttributeError, RecursionError):
    return None
  known = first.keys() == second.keys() == RUBRICS.keys() and winner in (*POSITIONS, TIE)
  if verdict or not known or not all(type(score) is int and 0 <= score <= 2 for score in scores):
    return None
  return first, second, winner


def averaged(replies: Sequence[object]) -> tuple[Scores, Scores, str] | None:
  """Averages the replies to both `prompts` of a pair: (scores of `a`, of `b`, the winner of both or 'tie').

  None if either is unreadable.
  """
  verdicts = [read(reply) if isinstance(reply, str) else None for reply in replies]
  if None in verdicts:  # a single order would let the judge's position bias decide
    return None
  (a, b, winner), (swapped_b, swapped_a, swapped_winner) = verdicts
  mean = lambda scores, swapped: {name: (scores[name] + swapped[name]) / 2 for name in RUBRICS}
  names = {POSITIONS: 'a', POSITIONS[::-1]: 'b'}
  return mean(a, swapped_a), mean(b, swapped_b), names.get((winner, swapped_winner), TIE)


def _quoted(text: str) -> str:
  """Returns text that can neither close the tags around it nor hold a JSON object."""
  return grammar.neutralise(text.strip(), (*grammar.CONTROL, '{'), _TAGS)
