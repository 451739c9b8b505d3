"""Retrieval by simulation (ZeroSearch, arXiv 2505.04588): a writer makes up the documents, useful or noisy.

`SimulatedSearch` draws for every call whether its documents are noisy, with a probability that rises with the
training step, and has a writer write them: a language model, or world/writer.py.

The draws depend on the seed, the step, the call (tree number, call number in it) and the query alone. So a
query that is sent again may find something new, as in CuSearch's condition C2, and yet a resumed run gets
what the uninterrupted one would have got. A model repeats itself as far as its server honours seeds.
"""

import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxsearch import registry
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.tools import Backend, SearchBackend
from jaxsearch.tools.chat import Chat
from jaxsearch.trees import grammar, templates

BASE = 4.0  # of the curriculum: above 1 most of the rise comes late


class Writer(Protocol):
  """Writes documents for queries; `write` is called from several threads."""

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int],
            question: Question | None = None) -> list[list[Document]]:
    """Returns at most `topk` documents for each query, all useful, or all noisy where `noisy` is true.

    All that is random about them follows from the query's seed (31 bits). `question`: what they are searched
    for, if known.
    """


class WriterError(ValueError):
  """A writer's reply that holds no documents."""
  fault = 'malformed'


def noise_probability(step: int, total_steps: int, start: float, end: float) -> float:
  """Computes ZeroSearch's curriculum: p_i = p_s + (b^(i/m) - 1) / (b - 1) * (p_e - p_s) at step i of m =
  `total_steps`; `start` and `end` are p_s and p_e."""
  return start + (BASE ** (step / total_steps) - 1) / (BASE - 1) * (end - start)


class SimulatedSearch:
  """A search back end whose documents are written on request, noisy with `noise_probability` in training and
  with `noise_eval` (None: `noise_start`) at step 0, an evaluation; may be called from several threads."""

  def __init__(self, writer: Writer, *, noise_start: float = 0.0, noise_end: float = 0.5,
               noise_eval: float | None = None, seed: int = 0):
    self._writer, self._curriculum, self._seed = writer, (noise_start, noise_end), seed
    self._noise_eval = noise_start if noise_eval is None else noise_eval
    self.set_step(0, 1)

  def set_step(self, step: int, total_steps: int) -> None:
    """Sets the noise to that of a step, from 1, or of an evaluation, 0; never called during searches."""
    self._step = step
    self.noise = noise_probability(step, total_steps, *self._curriculum) if step else self._noise_eval

  def for_call(self, question: Question | None, *call: int) -> SearchBackend:
    """Returns this back end for one tool call, which the numbers `call` name, about a known question."""
    return types.SimpleNamespace(search=functools.partial(self.search, question=question, call=call))

  def search(self, queries: Sequence[str], topk: int = 3, *, question: Question | None = None,
             call: Sequence[int] = ()) -> list[list[Document]]:
    """Returns at most `topk` documents for each query. Raises what the writer raises."""
    # Not `hash`, which differs from process to process.
    drawn_from = [json.dumps([self._seed, self._step, *call, query]).encode() for query in queries]
    draws = [hashlib.sha256(content).digest() for content in drawn_from]
    noisy = [int.from_bytes(draw[:6]) / 2**48 < self.noise for draw in draws]
    seeds = [int.from_bytes(draw[6:10]) >> 1 for draw in draws]
    return self._writer.write(queries, topk, noisy, seeds, question)


_HEADING = re.compile(r'^Document \d+:?[ \t]*$', re.MULTILINE)
_BODY = re.compile(r'\s*Title:[ \t]*(\S[^\n]*)\n\s*Text:\s*(\S.*)', re.DOTALL)
_UNTITLED = re.compile(r'^Doc \d+:', re.MULTILINE)  # the form of ZeroSearch's published simulators


class ModelWriter:
  """Has a language model write the documents; it is told the question and its first gold answer.

  Args:
    generate: prompts and their seeds -> replies, an exception where one failed; called from several threads.
    files: folder of the user's prompts, see `templates.files`.
    false_facts: noisy documents state what is false; else they are true but of no help.
  """

  def __init__(self, generate: Callable[[list[str], Sequence[int]], Sequence[str | Exception]],
               files: str = '', false_facts: bool = False):
    self._generate, self._templates = generate, templates.files('writer', files)
    self._noisy = 'false' if false_facts else 'noisy'

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int],
            question: Question | None = None) -> list[list[Document]]:
    """Writes as `Writer` says. Raises WriterError for a reply of another form, and what `generate` raises."""
    prompts = [writing_prompt(query, topk, self._templates[self._noisy if noise else 'useful'], question)
               for query, noise in zip(queries, noisy, strict=True)]
    replies = self._generate(prompts, seeds)
    for reply in replies:
      if isinstance(reply, Exception):
        raise reply
    return [parse_documents(reply, topk) for reply in replies]


def writing_prompt(query: str, topk: int, template: str, question: Question | None = None) -> str:
  """Returns the prompt for `topk` documents, with the query on one line; without a question the query also
  takes its place."""
  query = ' '.join(query.split())
  asked = question.question if question else query
  answer = [*(question.golden_answers if question else ()), 'not known'][0]
  safe = lambda text: grammar.neutralise(text, grammar.CONTROL)
  return templates.fill(template, topk=topk, query=safe(query), question=safe(asked), answer=safe(answer))


def parse_documents(reply: str, topk: int) -> list[Document]:
  """Reads the first `topk` documents of a reply in the form of our prompt, or in lines `Doc 1: text`.

  Raises WriterError if there is none, or one of them has no title (in our form) or no text.
  """
  bodies = [_BODY.fullmatch(part) for part in _HEADING.split(reply)[1:topk + 1]]
  untitled = [('', part) for part in _UNTITLED.split(reply)[1:topk + 1]]
  documents = [(body[1].strip(), body[2]) if body else ('', '') for body in bodies] or untitled
  if not documents:
    raise WriterError(f'the simulator wrote no documents: {reply[:80]!r}')
  for number, (_, text) in enumerate(documents, start=1):
    if not text.strip():
      raise WriterError(f'document {number} of the simulator has no title or no text')
  return [Document(f'written-{number}', title, ' '.join(text.split()))
          for number, (title, text) in enumerate(documents, start=1)]


def _open(settings: Any, *, corpus: Sequence[Document] | None, seed: int,
          generator: Callable) -> SimulatedSearch:
  model, temperature, false = settings.writer_model, settings.writer_temperature, settings.noise_false
  if settings.writer in registry.ENTRIES['writers']:
    writer = registry.find('writers', settings.writer)(corpus, false_facts=false)
  elif settings.writer == 'chat':
    chat = Chat(settings.url, model, temperature=temperature, timeout=settings.timeout, cache=settings.cache)
    writer = ModelWriter(chat.replies, settings.writer_templates, false)
  else:
    writer = ModelWriter(generator(model, temperature), settings.writer_templates, false)
  noise = {name: settings[name] for name in ('noise_start', 'noise_end', 'noise_eval')}
  return SimulatedSearch(writer, seed=seed, **noise)


NEEDS = {'chat': {'url': 'url', 'writer_model': 'name'}, 'model': {'writer_model': 'model'}}
IDENTITY = ('url', 'writer', 'writer_model', 'writer_temperature', 'writer_templates',
            'noise_start', 'noise_end', 'noise_eval', 'noise_false')
BACKEND = Backend(_open, corpus=lambda settings: settings.writer in registry.ENTRIES['writers'],
                  needs=lambda settings: NEEDS.get(settings.writer, {}),
                  identity=lambda settings: {name: settings[name] for name in IDENTITY})
