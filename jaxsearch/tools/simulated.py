"""Retrieval by simulation (ZeroSearch, arXiv 2505.04588): a writer makes up the documents, useful or noisy on request.

`SimulatedSearch` is the back end. It draws for every query whether its documents are useful, with a probability of
noise that rises with the training step, and has a writer write them. `ModelWriter` prompts a language model: any of ours on
its own sampler, or one behind a server (`tools.chat`). `world/writer.py` stands in for one in the embedded world.

What is drawn follows from seed, step and query alone. So trees that send the same query in the same step get the same
documents, and a run that goes on from a checkpoint gets those that it would have got.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from jaxsearch.data.corpus import Document


class WriterError(RuntimeError):
  """A writer's reply that holds no documents."""


class Writer(Protocol):
  """Writes documents for queries; `write` is called from several threads."""

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int]) -> list[list[Document]]:
    """At most `topk` documents for each query, all of them useful, or all noisy where `noisy` says so.

    Args:
      seeds: a number for each query, from which all that is random about its documents is to follow.
    """


def noise_probability(step: int, total_steps: int, start: float, end: float, base: float = 4.0) -> float:
  """The curriculum of ZeroSearch: p_i = p_s + (b^(i/m) - 1) / (b - 1) * (p_e - p_s).

  Args:
    step: i, from 0 to m.
    total_steps: m.
    start, end: p_s and p_e, the probabilities of noise at step 0 and at step m.
    base: b, how late most of the rise comes; more than 1. Between 0 and 1 it comes early.
  """
  return start + (base ** (step / total_steps) - 1) / (base - 1) * (end - start)


class SimulatedSearch:
  """A search back end whose documents are written when they are asked for; may be called from several threads."""

  def __init__(self, writer: Writer, *, noise_start: float = 0.0, noise_end: float = 0.5, base: float = 4.0, seed: int = 0):
    """At first the noise is that of step 0.

    Args:
      noise_start, noise_end, base: see `noise_probability`.
      seed: of all draws.
    """
    if not (0 <= noise_start <= 1 and 0 <= noise_end <= 1):
      raise ValueError(f'noise_start={noise_start} and noise_end={noise_end} are probabilities: from 0 to 1')
    if base <= 0 or base == 1:
      raise ValueError(f'base={base} must be positive and not 1')
    self._writer, self._curriculum, self._seed = writer, (noise_start, noise_end, base), seed
    self.set_step(0, 1)

  def set_step(self, step: int, total_steps: int) -> None:
    """Takes the noise of a step of the curriculum; called between steps, never during searches."""
    if not 0 <= step <= total_steps or total_steps < 1:
      raise ValueError(f'step {step} is none of a curriculum of {total_steps}')
    self._step, self.noise = step, noise_probability(step, total_steps, *self._curriculum)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query; what the writer raises is passed on."""
    if isinstance(queries, str):
      raise TypeError('queries must be a list of strings, not one string')
    if topk < 1:
      raise ValueError(f'topk={topk} must be at least 1')
    if not queries:
      return []
    draws = [self._draw(query) for query in queries]
    return self._writer.write(queries, topk, [share < self.noise for share, _ in draws], [seed for _, seed in draws])

  def _draw(self, query: str) -> tuple[float, int]:
    """A number in [0, 1) and a seed for the writer."""
    # Not `hash`, which differs from process to process.
    digest = hashlib.sha256(json.dumps([self._seed, self._step, query]).encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48, int.from_bytes(digest[6:14])


USEFUL = """You play the part of a search engine. Write the {topk} short documents that it would return for the query below, \
as they could stand in an encyclopedia. Together they state the facts that answer the query. Write only what is true."""
NOISY = """You play the part of a search engine on a bad day. Write the {topk} short documents that it would return for the \
query below, as they could stand in an encyclopedia. They are on the subject, but of no help: what would answer the query \
is missing, or stated wrongly without any sign of doubt."""
FORM = """
Use this form for each of them, counting up from 1, and write nothing else:

Document 1
Title: the title, on one line
Text: two to four sentences

Query: {query}"""
_HEADING = re.compile(r'^Document \d+:?[ \t]*$', re.MULTILINE)
_BODY = re.compile(r'\s*Title:[ \t]*(\S[^\n]*)\n\s*Text:\s*(\S.*)', re.DOTALL)


class ModelWriter:
  """Has a language model write the documents.

  It is told the query alone, not the question or its answer: no query could coax these out of it.
  """

  def __init__(self, ask: Callable[[list[str]], Sequence[str | Exception]]):
    """`ask` turns prompts into replies, an exception standing where one failed: `Chat.replies`, or a `DynamicBatcher` model
    of ours. Called from several threads."""
    self._ask = ask

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int]) -> list[list[Document]]:
    """See `Writer`; the documents depend on the prompt alone, as far as the model does, and `seeds` are unused.

    Raises:
      WriterError: a reply that is not in the form asked for.
      other errors: those that `ask` raises or returns.
    """
    replies = self._ask([writing_prompt(query, topk, noise) for query, noise in zip(queries, noisy, strict=True)])
    for reply in replies:
      if isinstance(reply, Exception):
        raise reply
    return [parse_documents(reply, topk) for reply in replies]


def writing_prompt(query: str, topk: int, noisy: bool) -> str:
  """What a model is told to write `topk` documents. The query, which a policy wrote, is brought to one line."""
  return (NOISY if noisy else USEFUL).format(topk=topk) + '\n' + FORM.format(query=' '.join(query.split()))


def parse_documents(reply: str, topk: int) -> list[Document]:
  """The first `topk` documents of a reply in the form asked for; what stands before the first is passed over.

  Raises:
    WriterError: there is none, or one of them has no title or no text.
  """
  parts = _HEADING.split(reply)[1:][:topk]
  if not parts:
    raise WriterError(f'the simulator wrote no documents: {reply[:80]!r}')
  bodies = [_BODY.fullmatch(part) for part in parts]
  if None in bodies:
    raise WriterError(f'document {bodies.index(None) + 1} of the simulator has no title or no text')
  return [Document(f'written-{i}', body[1].strip(), ' '.join(body[2].split())) for i, body in enumerate(bodies, start=1)]


class DynamicBatcher:
  """A function from prompts to replies for several threads: what arrives while a batch is under way is the next batch.

  For a model on a sampler of ours, which runs one batch at a time and is slow for few prompts. Which prompts share a batch
  is a matter of the clock; a greedy model replies the same in any, but for rounding.
  """

  def __init__(self, ask: Callable[[list[str]], Sequence[str]]):
    self._ask, self._busy, self._waiting, self._changed = ask, False, [], threading.Condition()

  def __call__(self, prompts: list[str]) -> Sequence[str]:
    """The replies to `prompts`. An error of the batch is raised for all who had prompts in it."""
    own = Future()
    with self._changed:
      self._waiting.append((prompts, own))
      self._changed.wait_for(lambda: own.done() or not self._busy)
      batch, self._waiting, self._busy = ([], self._waiting, self._busy) if own.done() else (self._waiting, [], True)
    if batch:
      self._run(batch)
    return own.result()

  def _run(self, batch: Sequence[tuple[list[str], Future]]) -> None:
    try:
      asked = [prompt for prompts, _ in batch for prompt in prompts]
      replies = self._ask(asked)
      if len(replies) != len(asked):
        raise ValueError(f'{len(replies)} replies to {len(asked)} prompts')
      left = iter(replies)
      for prompts, future in batch:
        future.set_result(list(itertools.islice(left, len(prompts))))
    except Exception as error:
      for _, future in batch:
        future.set_exception(error)
    finally:
      with self._changed:
        self._busy = False
        self._changed.notify_all()
