"""R-Search as a tool (RSTool, arXiv 2506.04185, figure 2): a policy searches for evidence, a second model answers from it.

`find` runs the policy on questions; `jaxsearch serve --as-tool` serves it over HTTP. `answer` is `jaxsearch eval --as-tool`: it
asks the second model the same questions closed-book, with the passages of one search for the question itself (vanilla RAG), and
with the tool's evidence.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import metrics, run
from jaxsearch.evaluation.calibration import COLOURS
from jaxsearch.evaluation.records import policy_spans
from jaxsearch.methods import r_search
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import exact_match, f1
from jaxsearch.sampler.driver import Agent, Assistant, first_requests, rollout
from jaxsearch.sampler.requests import GREEDY, Sampling, one_line, shorten
from jaxsearch.tools import SearchBackend
from jaxsearch.tools.evidence_client import Evidence, EvidenceClient
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.spans_shown import spans

PER_REQUEST = 32  # questions asked of a server, and of the reader, at a time
READER = ('alone', 'rag', 'rstool')  # how the reader is asked


def open_tool(config: ml_collections.ConfigDict, checkpoint: str = '', corpus: str = '',
              policy: run.Policy | None = None) -> Agent:
  """The agent of a config whose policy writes evidence, see `run.open_agent`; ValueError for a method that writes none."""
  reader_template(config)
  return run.open_agent(config, checkpoint, corpus, policy)


def find(agent: Agent, questions: Sequence[str]) -> list[Evidence]:
  """The policy's evidence for each question, greedy: what is in a rollout's only evidence box.

  '' without exactly one, or if it was written before any documents were found, which forfeits it.
  """
  asked = [Question(str(i), text, ()) for i, text in enumerate(questions)]
  trees, _ = rollout(agent, asked, jax.random.key(0), sampling=GREEDY)
  return [Evidence(answer=tree.answer, searches=tree.metrics['searches'], **_evidence({'spans': spans(tree)})) for tree in trees]


def _evidence(record: Mapping[str, Any]) -> dict[str, Any]:
  """`evidence`, the only box, '' without exactly one or where it is `forfeited` (`r_search.unfounded`), as in training."""
  own = policy_spans(record)
  written = [span['text'] for span in own]
  box = formats.only_box(written, grammar.EVIDENCE) or ''
  forfeited = bool(box) and r_search.unfounded(written, ['found' in span for span in own])
  return {'evidence': '' if forfeited else box, 'forfeited': forfeited}


def check_room(agent: Agent, question: str) -> None:
  """Raises ValueError for a question whose prompt leaves no room for a whole policy span."""
  first, = first_requests(agent.grow, Question('', question, ()), agent.engine.tokenizer)
  if first.node.length > (room := agent.engine.length - first.max_tokens):
    raise ValueError(f'the question is too long: {first.node.length} tokens with its prompt, where {room} fit')


@dataclasses.dataclass(frozen=True)
class Reader:
  """A frozen model that answers questions with or without passages."""
  ask: Callable[[list[str]], Sequence[str | Exception]]  # prompts in, replies out; an exception stands where one failed
  template: str                          # a name or a file, see trees/templates.py
  special_tokens: tuple[str, ...] = ()   # its tokenizer's, as text; () where they are not known
  wrapped: Callable[[str], str] = str    # a prompt as it is tokenised
  room: int | None = None                # how many tokens that may have; None is any number
  tokenizer: Tokenizer | None = None     # with a room

  def prompt(self, question: str, documents: Sequence[Document]) -> str:
    """The prompt of a question with documents, shortened to the room and neutralised; a document without a title is bare text."""
    safe = lambda text: grammar.neutralise(text.strip(), self.special_tokens, grammar.R_SEARCH)
    passage = templates.passage(self.template)

    def written(documents):
      parts = [templates.fill(passage, number=number, title=safe(document.title), text=safe(document.text))
               if document.title else safe(document.text) for number, document in enumerate(documents, start=1)]
      return templates.reader_prompt(question, ''.join(parts), self.template)

    if self.room is not None:
      documents = shorten(documents, self.room, lambda documents: self.wrapped(written(documents)), self.tokenizer)
    return written(documents)


def open_reader(config: ml_collections.ConfigDict, url: str = '', model: str = '') -> Reader:
  """The frozen model `config.reader`, or with a `url` the `model` behind a chat server (API key in OPENAI_API_KEY)."""
  template = reader_template(config)
  if url:
    from jaxsearch.tools.chat import Chat
    return Reader(Chat(url, model, max_tokens=config.reader.max_tokens).replies, template)
  return local_reader(setup.load_assistant(config.reader, config.dtype), template)


def local_reader(assistant: Assistant, template: str) -> Reader:
  """A reader on our own sampler."""
  tokenizer = assistant.engine.tokenizer
  wrapped = lambda prompt: tokenizer.chat([{'role': 'user', 'content': prompt}]) if assistant.chat else prompt
  return Reader(assistant, template, tokenizer.special_tokens, wrapped, assistant.engine.length - assistant.max_tokens, tokenizer)


def answer(tool: Agent | EvidenceClient, reader: Reader, questions: Sequence[Question], key, *, sampling: Sampling,
           search: SearchBackend, topk: int, part: pathlib.Path | None = None, identity: Mapping[str, Any] | None = None,
           on_progress: Callable[[int, int, dict], object]) -> list[dict]:
  """A record for each question: of the tool `evidence`, `forfeited`, `prediction` (its own answer) and `searches`, of an
  agent all that `run.answer` notes too; and what `ask_reader` returns.

  Both are kept in `part` as they are found, see `run.answer`; the questions are counted once for the tool, once for the reader.

  Raises:
    RequestError: the server of evidence failed, or the search for passages.
    OSError: `part` cannot be written.
  """
  if isinstance(tool, EvidenceClient):
    records = _served(tool, questions, part, identity, on_progress)
  else:
    records = run.answer(tool, questions, key, sampling=sampling, part=part, identity=identity, on_progress=on_progress)
    for record in records:
      record |= _evidence(record)
  missing = [number for number, record in enumerate(records) if 'rstool' not in record]
  done = len(questions) - len(missing)
  for numbers in _parts(missing):
    evidence = [records[number]['evidence'] for number in numbers]
    told = dict(zip(numbers, ask_reader(reader, [questions[number] for number in numbers], evidence, search, topk)))
    run.keep(part, told, f'{done} of {len(questions)} answers')
    for number, replies in told.items():
      records[number] |= replies
    done += len(numbers)
    on_progress(done, len(questions), {})
  return records


def _parts(numbers: Sequence[int]) -> list[Sequence[int]]:
  return [numbers[start:start + PER_REQUEST] for start in range(0, len(numbers), PER_REQUEST)]


def _served(tool: EvidenceClient, questions: Sequence[Question], part: pathlib.Path | None, identity: Mapping[str, Any] | None,
            on_progress: Callable[[int, int, dict], object]) -> list[dict]:
  """The records of a tool behind a server, kept as they come."""
  records = run.resume(part, identity)
  on_progress(len(records), len(questions), {})
  for numbers in _parts([number for number in range(len(questions)) if number not in records]):
    found = tool.find([questions[number].question for number in numbers])
    told = {number: {'evidence': one.evidence, 'forfeited': one.forfeited, 'prediction': one.answer, 'searches': one.searches}
            for number, one in zip(numbers, found)}
    run.keep(part, told, f'{len(records)} of {len(questions)} answers')
    records |= told
    on_progress(len(records), len(questions), {})
  return [records[number] for number in range(len(questions))]


def ask_reader(reader: Reader, questions: Sequence[Question], evidence: Sequence[str], search: SearchBackend,
               topk: int) -> list[dict]:
  """For each question the reader's answers `alone`, with the `passages` of one search (`rag`), and with the `evidence`
  (`rstool`; closed-book if it is ''); None where a reply failed, then `last_reader_failure`. Raises the first if all failed."""
  passages = search.search([question.question for question in questions], topk)
  contexts = {'alone': [[] for _ in questions], 'rag': passages, 'rstool': [[Document('', '', text)] for text in evidence]}
  replies = {name: reader.ask([reader.prompt(question.question, documents) for question, documents in zip(questions, context)])
             for name, context in contexts.items()}
  failures = [[own[i] for own in replies.values() if isinstance(own[i], Exception)] for i in range(len(questions))]
  if all(len(own) == len(contexts) for own in failures):
    raise failures[0][0]
  return [{'passages': [document.text for document in documents]}
          | {name: None if isinstance(own[i], Exception) else own[i].strip() for name, own in replies.items()}
          | ({'last_reader_failure': one_line(str(failures[i][-1]))} if failures[i] else {})
          for i, documents in enumerate(passages)]


def scores(questions: Sequence[Question], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """em_X and f1_X for X in alone (closed-book), rag, rstool, and policy: the policy's own answers; with_evidence, the share of
  questions with evidence; forfeited, how many wrote it before any documents were found; searches a question;
  reader_calls, and reader_failed: those whose reply failed, which count as wrong, with last_reader_failure; n."""
  answers = {name: [record[name] for record in records] for name in READER} | {
    'policy': [record['prediction'] for record in records]}
  found = {f'{metric}_{name}': float(np.mean([rule(answer, one.golden_answers) for answer, one in zip(own, questions)]))
           for name, own in answers.items() for metric, rule in (('em', exact_match), ('f1', f1))}
  last = [record['last_reader_failure'] for record in records if 'last_reader_failure' in record]
  return found | {
    'with_evidence': float(np.mean([bool(record['evidence']) for record in records])),
    'forfeited': sum(record['forfeited'] for record in records),
    'searches': float(np.mean([record['searches'] for record in records])),
    'reader_calls': len(READER) * len(records),
    'reader_failed': sum(record[name] is None for record in records for name in READER), 'n': len(records)} | (
      {'last_reader_failure': last[-1]} if last else {})


def predictions(questions: Sequence[Question], records: Sequence[Mapping[str, Any]]) -> list[dict]:
  """What an evaluation writes of the records: the same whether the tool is an agent or a server."""
  return [{'id': question.id, 'source': question.metadata.get('source', ''), 'question': question.question,
           'golden_answers': list(question.golden_answers), 'policy': record['prediction']}
          | {name: record[name] for name in ('evidence', 'searches', 'passages', *READER)}
          for question, record in zip(questions, records)]


def plot(results: Mapping[str, Sequence[Mapping[str, Any]]], path: str | pathlib.Path) -> None:
  """Writes F1 by data set into a PNG (figure 2): of the policy, and of readers with its evidence, one search and neither.

  Args:
    results: reader -> `predictions`. Whiskers are 95 % intervals, bootstrapped over questions.
  """
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  ways = {'rstool': 'with evidence', 'rag': 'with one search', 'alone': 'alone'}
  bars = {'the policy': ('policy', *results.values())} | {
    f'{reader}, {ways[way]}': (way, own) for way in ways for reader, own in results.items()}
  sources = list(dict.fromkeys(record['source'] for own in results.values() for record in own))
  figure = Figure(figsize=(max(5.2, 0.5 * len(bars) * len(sources) + 1.5), 4), layout='constrained')
  axes, width = figure.subplots(), 0.8 / len(bars)
  for number, (label, (way, own, *_)) in enumerate(bars.items()):
    values = [np.array([[100 * f1(record[way], record['golden_answers'])] for record in own if record['source'] == source])
              for source in sources]
    means = np.array([metrics.mean(of)[0] for of in values])
    ends = np.array([[end[0] for end in metrics.interval(metrics.resampled(of))] for of in values]).T  # [2, sources]
    places = np.arange(len(sources)) + (number - (len(bars) - 1) / 2) * width
    axes.bar(places, means, width, label=label, color=COLOURS[number % len(COLOURS)], hatch=('', '//', '..', 'xx')[number % 4],
             edgecolor='white', yerr=np.abs(ends - means), error_kw={'linewidth': 0.8, 'ecolor': '#444444'})
  axes.set(ylabel='F1 (%)', ylim=(0, 100), xticks=np.arange(len(sources)), xticklabels=[name or 'questions' for name in sources])
  axes.spines[['top', 'right']].set_visible(False)
  figure.legend(fontsize=8, frameon=False, loc='outside upper left', ncols=2)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)


def reader_template(config: ml_collections.ConfigDict) -> str:
  """How the reader is asked. Raises ValueError for a method that writes no evidence, and without the group `reader`."""
  settings = dict(config.grow) | dict(config.eval.grow)
  if 'evidence_template' not in settings:
    raise ValueError(f'config.method={config.method!r} writes no evidence for other models: take a policy of configs/r_search.py')
  if 'reader' not in config:
    raise ValueError('the config has no group reader, the model that answers: see configs/r_search.py')
  return settings['evidence_template']
