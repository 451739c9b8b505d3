"""R-Search as a tool (RSTool, arXiv 2506.04185, figure 2): a policy's evidence, and what a second model makes of it.

`find` runs the policy on questions; `jaxsearch serve --as-tool` puts it behind HTTP. `compare_readers` asks a second model the same
questions three ways: alone, with the passages of one search for the question as it stands (vanilla RAG), and with the
tool's evidence. What the reader is shown was written by others, so it is made harmless first, and shortened to its room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation.run import open_agent
from jaxsearch.methods import r_search
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import exact_match, f1
from jaxsearch.sampler.assistant import Assistant
from jaxsearch.sampler.requests import Sampling
from jaxsearch.sampler.rollout import Agent, rollout
from jaxsearch.sampler.tools import shorten
from jaxsearch.tools import SearchBackend
from jaxsearch.tools.evidence_client import Evidence, EvidenceTool
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Tree

ALONE = {  # what is asked without passages, by evidence template
  'r_search': 'Answer the question. Only give me the answer and do not output any other words.\n'
              'Question: {question}\nAnswer:',
  'world': '\nQuestion: {question}\nAnswer:',  # with nothing in the place of evidence, as the world's reader has seen it
}  # fmt: skip
PASSAGE = {'r_search': 'Doc {number}(Title: {title}) {text}\n', 'world': '{text} '}  # of vanilla RAG
PER_REQUEST = 32  # questions sent to a server at a time


# The tool.


def open_tool(config: ml_collections.ConfigDict, checkpoint: str = '', corpus: str = '') -> Agent:
  """The agent of a config whose policy writes evidence; arguments as for `open_agent`.

  Raises:
    ValueError: the config's method writes none.
  """
  _template(config)
  return open_agent(config, checkpoint, corpus)


def find(agent: Agent, questions: Sequence[str], *, temperature: float = 0.0, seed: int = 0,
         on_progress: Callable | None = None) -> list[Evidence]:
  """What the policy finds for each question, all grown in one run of its sampler."""
  special = agent.engine.tokenizer.special_tokens
  asked = [Question(str(i), grammar.neutralise(question, special, grammar.R_SEARCH), ()) for i, question in enumerate(questions)]
  trees, _ = rollout(agent, asked, jax.random.key(seed), sampling=Sampling(temperature), on_progress=on_progress)
  return [evidence(tree) for tree in trees]


def evidence(tree: Tree) -> Evidence:
  """What a grown tree found: the content of its only box of evidence, which is R-Search's rule for its reward."""
  return Evidence(formats.only_box(r_search.spans(tree), grammar.EVIDENCE) or '', tree.answer, tree.metrics['searches'])


def find_by_server(tool: EvidenceTool, questions: Sequence[str], on_progress: Callable[[int], object]) -> list[Evidence]:
  """As `find`, of a server. Raises EvidenceError."""
  found = []
  for start in range(0, len(questions), PER_REQUEST):
    found += tool.find(questions[start:start + PER_REQUEST])
    on_progress(len(found))
  return found


def check_room(agent: Agent, question: str) -> None:
  """Raises ValueError for a question after which the policy could not write a whole span."""
  first = next(agent.grow(Question('', question, ()), Tree(agent.engine.tokenizer)))
  tokens, room = first.node.length, agent.engine.length - first.max_tokens
  if tokens > room:
    raise ValueError(f'the question is too long: {tokens} tokens with its prompt, where {room} have room')


# The second model.


@dataclasses.dataclass(frozen=True)
class Reader:
  """A model that is asked with or without passages.

  Attributes:
    ask: prompts in, replies out; an exception stands where one failed.
    template: of `grammar.EVIDENCE_PROMPTS`.
    special_tokens: its tokenizer's, as text; () where they are not known.
    tokens: the length of a prompt.
    room: how long a prompt may be; None is any length.
  """
  ask: Callable[[list[str]], Sequence[str | Exception]]
  template: str
  special_tokens: tuple[str, ...] = ()
  tokens: Callable[[str], int] = len
  room: int | None = None

  def prompt(self, question: str, documents: Sequence[Document]) -> str:
    """Question and documents, which are shortened to the room and made harmless; one without a title stands as it is."""
    safe = lambda text: grammar.neutralise(text.strip(), self.special_tokens, grammar.R_SEARCH)

    def written(documents):
      parts = [PASSAGE[self.template].format(number=number, title=safe(document.title), text=safe(document.text))
               if document.title else safe(document.text) for number, document in enumerate(documents, start=1)]
      passages = ''.join(parts).strip()
      return (grammar.evidence_prompt(question, passages, self.template) if passages
              else ALONE[self.template].format(question=question.strip()))

    if self.room is not None:
      documents = shorten(documents, self.room, lambda documents: self.tokens(written(documents)))
    return written(documents)


def open_reader(config: ml_collections.ConfigDict, url: str = '', model: str = '') -> Reader:
  """The frozen model `config.reader`, or with a `url` the `model` behind a chat server (its key in OPENAI_API_KEY)."""
  if url:
    from jaxsearch.tools.chat import Chat
    return Reader(Chat(url, model, max_tokens=config.reader.max_tokens).replies, _template(config))
  return local_reader(setup.load_assistant(config.reader, config.dtype), _template(config))


def local_reader(assistant: Assistant, template: str) -> Reader:
  """A model on a sampler of ours."""
  tokenizer = assistant.engine.tokenizer
  wrapped = lambda prompt: tokenizer.chat([{'role': 'user', 'content': prompt}]) if assistant.chat else prompt
  return Reader(assistant, template, tokenizer.special_tokens, lambda prompt: len(tokenizer.encode(wrapped(prompt))),
                assistant.engine.length - assistant.max_tokens)


def compare_readers(reader: Reader, questions: Sequence[Question], found: Sequence[Evidence], search: SearchBackend,
            topk: int) -> tuple[dict[str, float], list[dict]]:
  """Asks the reader every question alone, with `topk` passages, and with the tool's evidence.

  Where the tool has none, the reader is asked alone. A question whose reply failed counts as wrong.

  Returns:
    (scores, a record for each question). Scores: em_X and f1_X for X in alone, rag, rstool, and for the answers of the
    policy itself; with_evidence, the share of questions for which there is some; searches per question; failures, the
    replies that failed; n.
  Raises:
    the first failure, where every reply failed.
  """
  passages = search.search([question.question for question in questions], topk)
  shown = {'alone': [[] for _ in questions], 'rag': passages,
           'rstool': [[Document('', '', one.evidence)] for one in found]}
  replies = {way: reader.ask([reader.prompt(question.question, documents) for question, documents in zip(questions, given)])
             for way, given in shown.items()}
  failures = [reply for said in replies.values() for reply in said if isinstance(reply, Exception)]
  if failures and len(failures) == len(shown) * len(questions):
    raise failures[0]
  answers = {way: [None if isinstance(reply, Exception) else reply.strip() for reply in said] for way, said in replies.items()}
  answers['policy'] = [one.answer for one in found]
  golds = [question.golden_answers for question in questions]
  scores = {f'{name}_{way}': float(np.mean([rule(answer, gold) for answer, gold in zip(said, golds)]))
            for way, said in answers.items() for name, rule in (('em', exact_match), ('f1', f1))}
  scores |= {'with_evidence': float(np.mean([bool(one.evidence) for one in found])),
             'searches': float(np.mean([one.searches for one in found])), 'failures': len(failures), 'n': len(questions)}
  return scores, [
    {'id': question.id, 'question': question.question, 'golden_answers': list(question.golden_answers),
     'evidence': one.evidence, 'searches': one.searches, 'passages': [document.text for document in documents],
     **{way: said[i] for way, said in answers.items()}}
    for i, (question, one, documents) in enumerate(zip(questions, found, passages))]


def _template(config: ml_collections.ConfigDict) -> str:
  """How the reader is asked. Raises ValueError for a method that writes no evidence, and for no template."""
  settings = dict(config.grow) | dict(config.eval.grow)
  if 'evidence_template' not in settings:
    raise ValueError(f'config.method={config.method!r} writes no evidence for other models: take --config configs/r_search.py')
  template = settings['evidence_template']
  if template not in ALONE:
    raise ValueError(f'config.grow.evidence_template={template!r} is none of {", ".join(map(repr, ALONE))}')
  return template
