"""The judge of the embedded world: deterministic, from the gold chain in `question.metadata['steps']`."""

from collections.abc import Sequence

from jaxsearch.rewards.judge import Answer, Collections, Item, Score, Thinking
from jaxsearch.rewards.match import exact_match, f1, normalize_answer
from jaxsearch.world.facts import ATTRIBUTES


def judge(items: Sequence[Item]) -> list[Score]:
  """Scores items as a judge of `rewards/judge.py` does.

  A thought is good if it names what the next step of the gold chain looks for, or states its last finding; a
  query if it is the next step's and finds its document; an answer if it matches exactly. A first search for
  another step's document, and an answer that is right in part, score 0. A collection is useful if it shows
  the document of a step for the first time. A thought that lists all that one may look for would be good too;
  policies that trained under this judge write none.
  """
  return [_score(item) for item in items]


def _titled(text: str, title: str) -> bool:
  """Tells whether a text shows a document with this title, in tags or as the result of a tool, JSON too."""
  around = ('(Title: ', ')'), ('] ', '\n'), ('] ', r'\n')
  return any(f'{before}{title}{after}' in text for before, after in around)


def _score(item: Item) -> int:
  if (steps := item.question.metadata.get('steps')) is None:
    raise ValueError("judge.kind='world' judges the world's questions alone: set 'chat' or 'local'")
  if isinstance(item, Answer):
    golds = item.question.golden_answers
    return 1 if exact_match(item.answer, golds) else 0 if f1(item.answer, golds) > 0 else -1
  if isinstance(item, Collections):
    before, useful = '', 0
    for text in item.collections:
      useful += any(_titled(text, step['query']) and not _titled(before, step['query']) for step in steps)
      before += text
    return useful
  # The step whose document was not found yet.
  coming = next((step for step in steps if not _titled(item.context, step['query'])), None)
  if isinstance(item, Thinking):
    if coming is None:
      return int(steps[-1]['finding'] in item.thinking)
    names = lambda step: ATTRIBUTES[step['attribute']]['sought'] in item.thinking
    return 1 if names(coming) else 0 if any(map(names, steps)) else -1
  query = normalize_answer(item.query)
  if coming is not None and query == normalize_answer(coming['query']) and _titled(
      item.documents, coming['query']):
    return 1
  gold = {normalize_answer(step['query']) for step in steps}
  return 0 if query in gold and not _titled(item.context, item.query) else -1
