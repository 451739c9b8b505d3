"""R-Search as a tool (arXiv 2506.04185, figure 2): a policy searches for evidence, a second model answers.

`find` runs the policy on questions; `jaxsearch serve --as-tool` serves it over HTTP. `answer` is `jaxsearch
eval --as-tool`: it asks the second model, the reader, the same questions closed-book, with the passages of
one search for the question itself (vanilla RAG), and with the tool's evidence.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import answers
from jaxsearch.evaluation.figures import Record, policy_spans
from jaxsearch.methods import r_search
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import exact_match, f1
from jaxsearch.sampler.assistants import Assistant, first_requests
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.requests import GREEDY, SERVICES, Sampling
from jaxsearch.tools import SearchBackend
from jaxsearch.tools.calls import one_line, paid, shorten
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import spans

PER_REQUEST = 32  # questions asked of the reader at a time
READER = ('alone', 'rag', 'rstool')  # how the reader is asked


def find(agent: Agent, questions: Sequence[str]) -> list[dict]:
  """Returns for each question what `http_server.evidence_app` sends, greedy: see `evidence_of`."""
  asked = [Question(str(number), text, ()) for number, text in enumerate(questions)]
  trees, _ = rollout(agent, asked, jax.random.key(0), sampling=GREEDY)
  return [evidence_of({'spans': spans(tree)}) | {'answer': tree.answer, 'searches': tree.metrics['searches']}
          for tree in trees]


def evidence_of(record: Record) -> dict[str, Any]:
  """Returns the `evidence` box, '' unless there is exactly one and it is not `forfeited`, as in training.

  A box is forfeited if it was written before any documents were found.
  """
  written = [span for span in policy_spans(record) if span.get('segment') != 'summary']
  texts = [span.get('said', span['text']) for span in written]
  box = formats.only_box(texts, grammar.EVIDENCE) or ''
  forfeited = bool(box) and r_search.unfounded(texts, ['found' in span for span in written])
  return {'evidence': '' if forfeited else box, 'forfeited': forfeited}


def check_room(agent: Agent, question: str) -> None:
  """Raises ValueError for a question whose prompt leaves no room for a whole policy span."""
  first, = first_requests(agent.grow, Question('', question, ()), agent.engine.tokenizer, agent.grammar)
  if first.node.length > (room := agent.engine.length - first.max_tokens):
    raise ValueError(f'the question is too long: {first.node.length} tokens with its prompt, '
                     f'where {room} fit')


@dataclasses.dataclass(frozen=True)
class Reader:
  """A frozen model that answers questions with or without passages."""
  ask: Callable[[list[str]], Sequence[str | Exception]]  # prompts in, replies or exceptions out
  template: str                     # a name or a file, see trees/templates.py
  assistant: Assistant | None = None  # whose context prompts must fit; None for a chat server, not checked

  def prompt(self, question: str, documents: Sequence[Document]) -> str:
    """Returns the prompt of a question with documents, neutralised and shortened to the room.

    A document without a title is bare text.
    """
    tokenizer = self.assistant and self.assistant.engine.tokenizer
    special = tokenizer.special_tokens if tokenizer else ()
    safe = lambda text: grammar.neutralise(text.strip(), special, grammar.R_SEARCH)

    def written(documents: Sequence[Document]) -> str:
      context, passage = '', templates.passage(self.template)
      for number, document in enumerate(documents, start=1):
        title, text = safe(document.title), safe(document.text)
        context += templates.fill(passage, number=number, title=title, text=text) if title else text
      return templates.reader_prompt(question, context, self.template)

    if tokenizer:
      chat = lambda prompt: tokenizer.chat([{'role': 'user', 'content': prompt}])
      wrapped = chat if self.assistant.chat else str
      room = self.assistant.engine.length - self.assistant.max_tokens
      documents = shorten(documents, room, lambda some: wrapped(written(some)), tokenizer)
    return written(documents)


def open_reader(config: ml_collections.ConfigDict, url: str = '', model: str = '') -> Reader:
  """Opens the frozen model `config.reader`, or with a `url` the `model` behind a chat server."""
  template = reader_template(config)
  if url:
    from jaxsearch.tools.chat import Chat
    return Reader(Chat(url, model, max_tokens=config.reader.max_tokens).replies, template)
  assistant = setup.load_assistant(config.reader, config.dtype)
  return Reader(assistant, template, assistant)


def answer(agent: Agent, reader: Reader, questions: Sequence[Question], key, kept: answers.Kept, *,
           sampling: Sampling, search: SearchBackend, topk: int,
           on_progress: Callable[[int, int, dict], object]) -> None:
  """Keeps a record of each question: that of the agent, `evidence_of` it, and what `ask_reader` returns.

  Questions are counted once for the agent, once for the reader. RequestError if a server failed.
  """
  answers.answer(agent, questions, key, kept, sampling=sampling, on_progress=on_progress)
  missing = kept.missing('rstool')
  for start in range(0, len(missing), PER_REQUEST):
    on_progress(len(questions) - len(missing) + start, len(questions), {})
    asked = missing[start:start + PER_REQUEST]
    found = [evidence_of(kept.records[number]) for number in asked]
    before, earlier = getattr(search, 'paid', 0), kept.records[asked[0]]
    replies = ask_reader(reader, [questions[number] for number in asked],
                         [one['evidence'] for one in found], search, topk)
    replies[0] |= {name: cost + earlier.get(name, 0) for name, cost in paid(search, before).items()}
    kept.add({number: one | reply for number, one, reply in zip(asked, found, replies)})
  on_progress(len(questions), len(questions), {})


def ask_reader(reader: Reader, questions: Sequence[Question], evidence: Sequence[str], search: SearchBackend,
               topk: int) -> list[dict]:
  """Returns for each question the reader's answers, None where a reply failed; raises the first if all did.

  `alone`, with the `passages` of one search (`rag`), and with the `evidence` (`rstool`; closed-book if it is
  ''). The replies are counted as calls of a service.
  """
  if hasattr(search, 'of'):  # the passages of each source are apart
    passages = [search.of(one.metadata.get('source')).search([one.question], topk)[0] for one in questions]
  else:
    passages = search.search([question.question for question in questions], topk)
  # in the order of READER
  contexts = [[] for _ in questions], passages, [[Document('', '', text)] for text in evidence]
  replies = [reader.ask([reader.prompt(question.question, documents)
                         for question, documents in zip(questions, context)]) for context in contexts]
  records = []
  for given, documents in zip(zip(*replies), passages):
    failures = [reply for reply in given if isinstance(reply, Exception)]
    record = {way: None if reply in failures else reply.strip() for way, reply in zip(READER, given)}
    record |= {'passages': [document.text for document in documents],
               SERVICES.asked: len(READER), SERVICES.failed: len(failures)}
    records.append(record | ({SERVICES.last: one_line(str(failures[-1]))} if failures else {}))
  if all(record[SERVICES.failed] == len(READER) for record in records):
    raise replies[0][0]
  return records


def scores(records: Sequence[Record]) -> dict[str, Any]:
  """Returns em_X and f1_X for X in alone (closed-book), rag, rstool, and policy: the policy's own answers.

  with_evidence: the share of questions with evidence; forfeited: how many wrote it before any documents were
  found; searches a question; n. Replies that failed count as wrong.
  """
  mean = lambda values: float(np.mean(list(values)))
  figures = {f'{metric}_{way}': mean(rule(record[field], record['golden_answers']) for record in records)
             for way, field in (*zip(READER, READER), ('policy', 'prediction'))
             for metric, rule in (('em', exact_match), ('f1', f1))}
  return figures | {'with_evidence': mean(bool(record['evidence']) for record in records),
                    'forfeited': sum(record['forfeited'] for record in records),
                    'searches': mean(record['searches'] for record in records), 'n': len(records)}


def predictions(records: Sequence[Record]) -> list[dict]:
  """Returns what an evaluation writes of the records."""
  fields = ('id', 'source', 'question', 'golden_answers', 'evidence', 'searches', 'passages', *READER)
  return [{'policy': record['prediction']} | {name: record[name] for name in fields} for record in records]


def reader_template(config: ml_collections.ConfigDict) -> str:
  """Returns how the reader is asked; ValueError if nothing writes evidence or none is to read it."""
  settings = dict(config.grow) | dict(config.eval.grow)
  if 'evidence_template' not in settings:
    raise ValueError(f'config.method={config.method!r} writes no evidence for other models: '
                     'take a policy of configs/r_search.py')
  if 'reader' not in config:
    raise ValueError('the config has no group reader, the model that answers: see configs/r_search.py')
  return settings['evidence_template']
