"""Judges of single steps: what is judged, how a language model is asked, and how its reply is read.

A judge is a function from items to scores, so that many are judged at a time. The items:

  Thinking, Query, Answer   scored -1, 0 or 1 (SLATE, section 3.3)
  Collections               how many of the retrieved collections were useful (Search-R2, appendix K)

A `LanguageJudge` wraps anything that replies to prompts: a local model (`sampler.assistants.Assistant`), a
server (`tools.chat.Chat.replies`). It reasons first and scores then. A reply without a readable score is
None, an error stands for itself; whoever asked takes both as neutral and counts them. Texts of the
trajectory, questions and golds can neither close nor imitate the tags of the prompt.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from jaxsearch.data.questions import Question
from jaxsearch.rewards import formats
from jaxsearch.trees import grammar, templates


@dataclasses.dataclass(frozen=True)
class Thinking:
  question: Question
  context: str  # the trajectory before it
  thinking: str


@dataclasses.dataclass(frozen=True)
class Query:
  question: Question
  context: str
  thinking: str
  query: str
  documents: str  # what it found


@dataclasses.dataclass(frozen=True)
class Answer:
  question: Question
  answer: str
  context: str = ''
  thinking: str = ''


@dataclasses.dataclass(frozen=True)
class Collections:
  question: Question
  collections: tuple[str, ...]  # the reply to each search of a trajectory


Item = Thinking | Query | Answer | Collections
Score = int | Exception | None  # None: the judge's reply could not be read; an exception: it did not reply
_TAGS = grammar.Tags(others=('trajectory', 'thought', 'search_query', 'documents', 'given_answer', 'score',
                             'collection'))


class Reasoned(int):
  """A score that keeps the reply that it was read from as its `reason`, for people."""

  def __new__(cls, score: int, reason: str = ''):  # a copy and a pickle set it afterwards
    reasoned = super().__new__(cls, score)
    reasoned.reason = reason
    return reasoned


def prompt(item: Item, files: Mapping[str, str] | None = None) -> str:
  """Writes the prompt about an item; `files` are those of `templates.files('judge')`."""
  golds = ' or '.join(map(quoted, item.question.golden_answers))
  fields = {'question': quoted(item.question.question), 'golds': golds}
  fields |= {name: quoted(value) for name, value in vars(item).items() if isinstance(value, str)}
  if isinstance(item, Collections):
    numbered = enumerate(map(quoted, item.collections), start=1)
    shown = [f'<collection_{i}>{text}</collection_{i}>\n' for i, text in numbered]
    fields |= {'number': len(shown), 'collections': ''.join(shown)}
  return templates.fill((files or templates.files('judge'))[type(item).__name__.lower()], **fields)


def quoted(text: str) -> str:
  """Returns text that can neither close the tags around it nor pass for a score."""
  return grammar.neutralise(text.strip(), (*grammar.CONTROL, 'Final Answer'), _TAGS)


def read(item: Item, reply: str) -> Score:
  """Reads the score in a judge's reply; None if there is none that can be read."""
  if isinstance(item, Collections):
    return formats.useful_collections(reply, len(item.collections))
  return formats.judge_score(reply)


def erring(judge: Callable[[Sequence[Item]], list[Score]], errors: float = 0.0,
           lenient: float = 0.0) -> Callable[[Sequence[Item]], list[Score]]:
  """Returns a judge that is wrong about a share of what it scores, and always alike about the same texts.

  Args:
    errors: share of scores in -1, 0, 1 that are replaced by one of the other two, each as likely.
    lenient: share of searches that score 1 whatever they are, a bias.
  """
  if not (errors or lenient):
    return judge

  def replaced(item: Item, score: Score) -> Score:
    if not isinstance(score, int) or isinstance(item, Collections):
      return score
    texts = [of for of in vars(item).values() if isinstance(of, str)]
    key = json.dumps([type(item).__name__, item.question.question, *texts])
    digest = hashlib.sha256(key.encode()).digest()
    wrong, good, other = (int.from_bytes(digest[8 * i:8 * i + 8]) / 2**64 for i in range(3))
    if isinstance(item, Query) and good < lenient:
      return 1
    return [value for value in (-1, 0, 1) if value != score][int(2 * other)] if wrong < errors else score

  return lambda items: [replaced(item, score) for item, score in zip(items, judge(items), strict=True)]


class LanguageJudge:
  """A judge by `replies(prompts)`, a text for each or an exception where it failed.

  Args:
    folder: of `templates.files`.
    concurrency: above 0 the sampler asks for every item as soon as it comes, this many at a time; see
      `requests.Ask`.
  """

  def __init__(self, replies: Callable[[Sequence[str]], Sequence[object]], folder: str = '',
               concurrency: int = 0):
    self.replies, self.files, self.concurrency = replies, templates.files('judge', folder), concurrency

  def __call__(self, items: Sequence[Item]) -> list[Score]:
    scores = []
    for item, reply in zip(items, self.replies([prompt(item, self.files) for item in items]), strict=True):
      score = read(item, reply) if isinstance(reply, str) else reply
      scores.append(Reasoned(score, reply) if isinstance(score, int) else score)
    return scores
