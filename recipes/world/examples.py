"""Training examples for the policy of the embedded world: token ids, and which of them are learned.

Three kinds, for the three stages of its warm start: documents of the encyclopedia (so that names are
familiar), worked chains that search as often as the question needs (the skill), and a mix of strategies most
of which search too little (what reinforcement learning then repairs). Many examples are under made-up names:
what is learned is to copy a name, not to know it. Only `warm` questions are used; documents may be about any
entity, as a corpus is.
"""

import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees import grammar, grammars, templates
from jaxsearch.world import chains, files as world
from jaxsearch.world.chains import Example, Spans, act, encode, encode_chain, found, full_chain
from jaxsearch.world.facts import ATTRIBUTES, sentence
from recipes.world.rename import rename


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list]:
  groups = {}
  for key, item in pairs:
    groups.setdefault(key, []).append(item)
  return groups


_warm = functools.cache(lambda: world.questions('warm'))
# By their types.
_answers = functools.cache(
  lambda: _grouped((question.metadata['answer_type'], question.golden_answers[0]) for question in _warm()))
_documents = functools.cache(lambda: _grouped((d.id.split('-')[0], d) for d in world.corpus()))  # by type


def draw(rng: random.Random) -> Question:
  """A warm question; three of four that need arithmetic are skipped."""
  while True:
    question = rng.choice(_warm())
    if question.metadata.get('operation') not in world.ARITHMETIC or rng.random() < 0.25:
      return question


def guess(question: Question, rng: random.Random) -> str:
  """A plausible answer of the right type; one of the two names where the question offers two."""
  data = question.metadata
  return rng.choice(data['choices'] if data['answer_type'] == 'choice' else _answers()[data['answer_type']])


def guess_chain(question: Question, rng: random.Random) -> Spans:
  """Answers at once, without a search."""
  return [('policy', act('I guess.', 'answer', guess(question, rng)))]


def one_search_chain(question: Question, rng: random.Random) -> Spans:
  """One search and then an answer: the right one where one hop is enough, else a guess."""
  if question.metadata['hops'] == 1:
    return full_chain(question)
  first = question.metadata['steps'][0]
  answer = act(f'{found(first)} I guess.', 'answer', guess(question, rng))
  return [*full_chain(question)[:2], ('policy', answer)]


def results_of(question: Question) -> dict[str, list[Document]]:
  """Returns query -> what search returns, for each step of the gold chain."""
  return {step['query']: chains.search(step['query']) for step in question.metadata['steps']}


def stated(steps: Sequence[dict]) -> str:
  """States what the documents say about some steps of a question, a sentence each, in their words."""
  return ' '.join(sentence(step['attribute'], step['query'], step['finding']) for step in steps)


def passage(tokenizer, rng: random.Random) -> Example:
  """A document of the encyclopedia as an observation shows it; learned but for its title."""
  shown = rng.choice(world.corpus())
  return encode(tokenizer, [(f'Doc 1(Title: {shown.title})', False), (f' {shown.text}\n', True)])


def retelling(tokenizer, rng: random.Random) -> Example:
  """Two documents as a search shows them, then the title and some sentences of one: copying from a document,
  without a question.

  Documents are drawn by type first: there are few countries, and every path leads through one.
  """
  kinds = _documents()
  shown = [rng.choice(kinds[rng.choice(sorted(kinds))]) for _ in range(chains.TOPK)]
  copied = rng.choice(shown)
  text = copied.text.removeprefix(copied.title).removesuffix('.')
  sentences = [f'It{rest}.' for rest in text.split(f'. {copied.title}')]
  block = grammar.information(shown, special_tokens=tokenizer.special_tokens)
  retold = ' '.join(rng.sample(sentences, min(3, len(sentences))))
  told = f'<search> {copied.title}</search><think> {retold}</think>'
  return encode(tokenizer, [(block, False), (told, True)])


def drill(tokenizer, rng: random.Random) -> Example:
  """The first step of a chain, or a fact repeated, about a name of random tokens: any token can be searched
  for and copied."""
  step = invented(tokenizer, rng)
  if rng.random() < 0.5:
    asked = rng.choice(ATTRIBUTES[step['attribute']]['questions']).format(step['query'])
    prompt = templates.prompt(asked, 'world')
    return encode(tokenizer, [(prompt, False), (act(chains.sought(step), 'search', step['query']), True)])
  block = grammar.information([Document('', step['query'], stated([step]))], tokenizer.special_tokens)
  return encode(tokenizer, [(block, False), (f'<think> {found(step)}', True)])


def invented(tokenizer, rng: random.Random) -> dict:
  """A step about a made-up fact: name and value are one to three random tokens that hold letters."""
  tokens = _letter_tokens(tokenizer)
  name, value = (''.join(rng.choices(tokens, k=rng.choice((1, 1, 2, 2, 3)))).strip() for _ in range(2))
  return {'attribute': rng.choice(draw(rng).metadata['steps'])['attribute'], 'query': name, 'finding': value}


@functools.cache
def _letter_tokens(tokenizer) -> list[str]:
  pieces = (piece.decode(errors='replace') for piece in tokenizer.pieces())
  return [piece for piece in pieces if piece.strip().isalpha() and '\ufffd' not in piece]


def skilled(tokenizer, rng: random.Random, *, renamed: float) -> Example:
  """A chain of the full strategy on a warm question, with probability `renamed` under made-up names and
  numbers."""
  question, results = draw(rng), None
  if rng.random() < renamed:
    question, results = rename(question, results_of(question), rng, numbers=rng.random() < 0.7)
  return encode_chain(tokenizer, question, full_chain(question), results)


def undecided(tokenizer, rng: random.Random, *, shares: tuple[float, float], evidence: float) -> Example:
  """A chain of the mix: `shares` are of answers at once and of single searches; the rest searches as needed.

  With probability `evidence` in the format of R-Search, whose box then holds all the evidence, or what one
  step found.
  """
  question = draw(rng)
  steps = question.metadata['steps']
  u = rng.random()
  if u < shares[0]:
    spans = guess_chain(question, rng)
  elif u < sum(shares):
    spans, steps = one_search_chain(question, rng), steps[:1]
  else:
    spans = full_chain(question)
  if rng.random() >= evidence:
    return encode_chain(tokenizer, question, spans)
  if u >= shares[0]:
    box = f'<original_evidence> {stated(rng.choice((steps, [rng.choice(steps)])))}</original_evidence>'
    spans = [*spans[:-1], ('policy', spans[-1][1].replace('<answer>', f'{box}<answer>'))]
  return encode_chain(tokenizer, question, spans, template='world_evidence',
                      speech=grammars.of_tags(tokenizer, grammar.R_SEARCH))


def reviewed(tokenizer, rng: random.Random, *, shares: tuple[float, float], noise: float) -> Example:
  """A chain of the mix and the review behind it: the first flawed step, 0 if there is none. Only the review
  is learned.

  A guess is flawed, and so is a search for another document than the gold chain's; `noise` of the reviews
  name a random step.
  """
  question = draw(rng)
  steps = question.metadata['steps']
  u = rng.random()
  if u < shares[0]:
    spans, flawed = guess_chain(question, rng), 1
  elif u < sum(shares) and len(steps) > 1:
    spans, flawed = one_search_chain(question, rng), 2
  else:
    spans, flawed = full_chain(question), 0
    if rng.random() < 0.4:
      flawed = rng.randrange(len(steps)) + 1
      at, title = 2 * (flawed - 1), rng.choice(world.corpus()).title
      thought = spans[at][1].split('<search>')[0]
      spans[at:at + 2] = [('policy', f'{thought}<search> {title}</search>'), ('observation', title)]
  turns = sum(role == 'policy' for role, _ in spans)
  if rng.random() < noise:
    flawed = rng.randint(0, turns)
  draft, _ = encode_chain(tokenizer, question, spans)
  prompt = templates.fill(templates.find('world', 'reviewer'), steps=turns)
  review, learned = encode(tokenizer, [(prompt, False), (f' {flawed}\n', True)])
  return draft + review, [False] * len(draft) + learned


def reading(tokenizer, rng: random.Random) -> Example:
  """Question and evidence, then the answer: what the frozen reader of R-Search's evidence reward is for.

  Half under made-up names; where evidence is missing, the answer is a guess.
  """
  question = draw(rng)
  if rng.random() < 0.5:
    question, _ = rename(question, {}, rng, numbers=rng.random() < 0.7)
  steps = question.metadata['steps']
  shown = steps if rng.random() < 0.7 else rng.sample(steps, rng.randrange(len(steps)))
  answer = question.golden_answers[0] if len(shown) == len(steps) else guess(question, rng)
  prompt = templates.reader_prompt(question.question, stated(shown), 'world')
  return encode(tokenizer, [(prompt, False), (f' {answer}\n', True)])
