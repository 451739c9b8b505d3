"""Retrieval by simulation (ZeroSearch, arXiv 2505.04588): a writer makes up the documents, useful or noisy on request.

`SimulatedSearch` is the back end. It draws for every query whether its documents are noisy, with a probability that rises
with the training step, and has a writer write them. `ModelWriter` prompts a language model: a local one on its own sampler, or
one behind a server (`tools.chat`). `world/writer.py` stands in for one in the embedded world.

The draws depend on seed, step and query alone. So trees that send the same query in the same step get the same documents,
and a resumed run gets those that the uninterrupted one would have got.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.tools import Writer, check_search


class WriterError(RuntimeError):
  """A writer's reply that holds no documents."""
  fault = 'malformed'


def noise_probability(step: int, total_steps: int, start: float, end: float, base: float = 4.0) -> float:
  """The curriculum of ZeroSearch: p_i = p_s + (b^(i/m) - 1) / (b - 1) * (p_e - p_s) at step i of m = `total_steps`.

  `start` and `end` are p_s and p_e, the probabilities of noise at step 0 and at step m. A `base` b above 1 puts most of the
  rise late, the larger the later; between 0 and 1 it comes early.
  """
  return start + (base ** (step / total_steps) - 1) / (base - 1) * (end - start)


class SimulatedSearch:
  """A search back end whose documents are written on request; may be called from several threads.

  Args:
    noise_start, noise_end, base: see `noise_probability`; the noise is that of step 0 until `set_step` is called.
    seed: of all draws.
  """

  def __init__(self, writer: Writer, *, noise_start: float = 0.0, noise_end: float = 0.5, base: float = 4.0, seed: int = 0):
    if not (0 <= noise_start <= 1 and 0 <= noise_end <= 1):
      raise ValueError(f'noise_start={noise_start} and noise_end={noise_end} are probabilities: from 0 to 1')
    if base <= 0 or base == 1:
      raise ValueError(f'base={base} must be positive and not 1')
    self._writer, self._curriculum, self._seed = writer, (noise_start, noise_end, base), seed
    self.set_step(0, 1)

  def set_step(self, step: int, total_steps: int) -> None:
    """Sets the noise to that of a step of the curriculum; to be called between steps, never during searches."""
    if not 0 <= step <= total_steps or total_steps < 1:
      raise ValueError(f'step {step} is none of a curriculum of {total_steps}')
    self._step, self.noise = step, noise_probability(step, total_steps, *self._curriculum)

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query. Raises what the writer raises."""
    check_search(queries, topk)
    if not queries:
      return []
    # Not `hash`, which differs from process to process.
    draws = [hashlib.sha256(json.dumps([self._seed, self._step, query]).encode()).digest() for query in queries]
    noisy = [int.from_bytes(draw[:6]) / 2**48 < self.noise for draw in draws]
    return self._writer.write(queries, topk, noisy, [int.from_bytes(draw[6:14]) for draw in draws])


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
  """Has a language model write the documents. It sees the query alone: no query could coax question or answer out of it.

  `generate` takes prompts and returns replies, an exception where one failed: `Chat.replies`, or a `DynamicBatcher` around a
  local model. It is called from several threads.
  """

  def __init__(self, generate: Callable[[list[str]], Sequence[str | Exception]]):
    self._generate = generate

  def write(self, queries: Sequence[str], topk: int, noisy: Sequence[bool], seeds: Sequence[int]) -> list[list[Document]]:
    """See `Writer`; the documents depend on the prompt alone, as far as the model does, and `seeds` are unused.

    Raises WriterError for a reply that is not in the form of the prompt, and what `generate` raises or returns.
    """
    replies = self._generate([writing_prompt(query, topk, noise) for query, noise in zip(queries, noisy, strict=True)])
    for reply in replies:
      if isinstance(reply, Exception):
        raise reply
    return [parse_documents(reply, topk) for reply in replies]


def writing_prompt(query: str, topk: int, noisy: bool) -> str:
  """The prompt for `topk` documents. The query, which a policy wrote, is brought to one line."""
  return (NOISY if noisy else USEFUL).format(topk=topk) + '\n' + FORM.format(query=' '.join(query.split()))


def parse_documents(reply: str, topk: int) -> list[Document]:
  """The first `topk` documents of a reply in the form of the prompt; text before the first is skipped.

  Raises WriterError if there is none, or one of them has no title or no text.
  """
  parts = _HEADING.split(reply)[1:][:topk]
  if not parts:
    raise WriterError(f'the simulator wrote no documents: {reply[:80]!r}')
  bodies = [_BODY.fullmatch(part) for part in parts]
  if None in bodies:
    raise WriterError(f'document {bodies.index(None) + 1} of the simulator has no title or no text')
  return [Document(f'written-{i}', body[1].strip(), ' '.join(body[2].split())) for i, body in enumerate(bodies, start=1)]
