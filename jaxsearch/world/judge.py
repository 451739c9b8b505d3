"""The judge of the embedded world: deterministic, from the gold chain in `question.metadata['steps']`."""

from collections.abc import Sequence

from jaxsearch.data.questions import Question
from jaxsearch.rewards.judge import Answer, Collections, Item, Query, Score, Thinking
from jaxsearch.rewards.match import exact_match, f1, normalize_answer
from jaxsearch.world.facts import ATTRIBUTES


def judge(items: Sequence[Item]) -> list[Score]:
  """Scores items as a judge of `rewards/judge.py` does.

  A thought is good if it names what the next step of the gold chain looks for, or states its last finding; a query if it
  is the next step's and finds its document; an answer if it matches exactly. A search for another step's document, and an
  answer that is right in part, count 0. A collection is useful if it shows the document of a step for the first time.
  """
  return [_JUDGES[type(item)](item) for item in items]


def _shown(text: str, step: dict) -> bool:
  """Whether a text shows the document that a step needs."""
  return f'(Title: {step["query"]})' in text


def _next_step(question: Question, context: str) -> dict | None:
  """The first step of the gold chain whose document was not found yet; None if all were."""
  return next((step for step in question.metadata['steps'] if not _shown(context, step)), None)


def _thinking(item: Thinking) -> int:
  step, steps = _next_step(item.question, item.context), item.question.metadata['steps']
  if step is None:
    return int(steps[-1]['finding'] in item.thinking)
  names = lambda sought: ATTRIBUTES[sought['attribute']]['sought'] in item.thinking
  return 1 if names(step) else 0 if any(map(names, steps)) else -1


def _query(item: Query) -> int:
  step, query = _next_step(item.question, item.context), normalize_answer(item.query)
  if step is not None and query == normalize_answer(step['query']) and _shown(item.documents, step):
    return 1
  gold = {normalize_answer(other['query']) for other in item.question.metadata['steps']}
  return 0 if query in gold and f'(Title: {item.query})' not in item.context else -1


def _answer(item: Answer) -> int:
  if exact_match(item.answer, item.question.golden_answers):
    return 1
  return 0 if f1(item.answer, item.question.golden_answers) > 0 else -1


def _collections(item: Collections) -> int:
  before, useful = '', 0
  for text in item.collections:
    useful += any(_shown(text, step) and not _shown(before, step) for step in item.question.metadata['steps'])
    before += text
  return useful


_JUDGES = {Thinking: _thinking, Query: _query, Answer: _answer, Collections: _collections}
