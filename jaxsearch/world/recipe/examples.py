"""Training examples for the policy of the embedded world: texts in, token ids with a mark on what is learned out.

Three kinds, for the three stages of its warm start: passages of the encyclopedia (so that names are familiar),
worked chains that search as often as the question needs (the skill), and a mix of strategies most of which search
too little (what reinforcement learning then repairs). Many examples are under made-up names: what is learned is to
copy a name, not to know it. Only `warm` questions are used; passages may be about any entity, as a corpus is.
"""

import functools
import random
from collections.abc import Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.tools.bm25 import BM25
from jaxsearch.trees import grammar, templates
from jaxsearch.world import files as world
from jaxsearch.world.chains import (
  Spans,
  answer_pools,
  full_chain,
  guess,
  guess_chain,
  led_astray,
  observe,
  one_search_chain,
  told,
  with_evidence,
)
from jaxsearch.world.facts import ATTRIBUTES
from jaxsearch.world.questions import ENDINGS
from jaxsearch.world.recipe.rename import rename

TOPK = 2  # passages per search, as in configs/base.py
ARITHMETIC = ('sum', 'difference')  # a small policy cannot add large numbers in its head; a tool can

Example = tuple[list[int], list[bool]]  # token ids, and which of them are learned


@functools.cache
def _search_index() -> BM25:
  return BM25(world.corpus())


@functools.cache
def pools() -> dict[str, list[str]]:
  return answer_pools(world.questions('warm'))


def search(query: str) -> list[Document]:
  """What the world's search returns."""
  return [Document(d.id, d.title, d.text) for d in _search_index().search([query], TOPK)[0]]


def encode(tokenizer, spans: Sequence[tuple[str, bool]]) -> Example:
  """Tokenises span by span, as the sampler does, so that the ids are those that it will see."""
  ids, learned = [], []
  for text, trained in spans:
    tokens = tokenizer.encode(text)
    ids += tokens
    learned += [trained] * len(tokens)
  return ids, learned


def passage(tokenizer, rng: random.Random) -> Example:
  """An entry of the encyclopedia as an observation shows it; learned but for its first words."""
  entry = rng.choice(world.corpus())
  return encode(tokenizer, [(f'Doc 1(Title: {entry.title})', False), (f' {entry.text}\n', True)])


def retelling(tokenizer, rng: random.Random) -> Example:
  """Two entries as a search shows them, then the name and some sentences of one: copying what any entry says, no question.

  Entries are drawn by kind first: there are few countries, and every path leads through one.
  """
  kinds = _entries_by_kind()
  shown = [rng.choice(kinds[rng.choice(sorted(kinds))]) for _ in range(TOPK)]
  told = rng.choice(shown)
  sentences = [f'It{rest}.' for rest in f' {told.text}'.removesuffix('.').split(f'. {told.title}')]
  sentences[0] = 'It' + sentences[0].removeprefix(f'It {told.title}')
  block = grammar.information(shown, special_tokens=tokenizer.special_tokens)
  retold = ' '.join(rng.sample(sentences, min(3, len(sentences))))
  return encode(tokenizer, [(block, False), (f'<search> {told.title}</search><think> {retold}</think>', True)])


def drill(tokenizer, rng: random.Random) -> Example:
  """The first step of a chain, or a fact told again, about a name of random tokens: any token can be asked for and copied."""
  attribute, name, value = invented(tokenizer, rng)
  label, sentence = ATTRIBUTES[attribute]
  if rng.random() < 0.5:
    question = rng.choice(ENDINGS[attribute]).format(name)
    spoken = f'<think> Find the {label}.</think><search> {name}</search>'
    return encode(tokenizer, [(templates.prompt(question, 'world'), False), (spoken, True)])
  block = grammar.information([Document('', name, sentence.format(title=name, value=value))], tokenizer.special_tokens)
  return encode(tokenizer, [(block, False), ('<think> ' + sentence.format(title='It', value=value), True)])


def invented(tokenizer, rng: random.Random) -> tuple[str, str, str]:
  """(attribute, name, value) of a fact that nobody has heard of: name and value are random tokens."""
  name, value = (_random_words(tokenizer, rng) for _ in range(2))
  return rng.choice(draw(rng).metadata['steps'])['attribute'], name, value


def _random_words(tokenizer, rng: random.Random) -> str:
  """One to three random tokens that hold letters, as text."""
  tokens = _letter_tokens(tokenizer)
  return ''.join(rng.choices(tokens, k=rng.choice((1, 1, 2, 2, 3)))).strip()


@functools.cache
def _letter_tokens(tokenizer) -> tuple[str, ...]:
  pieces = (piece.decode(errors='replace') for piece in tokenizer.pieces())
  return tuple(piece for piece in pieces if piece.strip().isalpha() and '\ufffd' not in piece)


@functools.cache
def _entries_by_kind() -> dict[str, list[Document]]:
  kinds = {}
  for entry in world.corpus():
    kinds.setdefault(entry.id.split('-')[0], []).append(entry)
  return kinds


def chain(tokenizer, question: Question, spans: Spans, results: dict[str, list[Document]], *, template: str = 'world',
          tags: grammar.Tags = grammar.SEARCH_R1) -> Example:
  """A chain of the policy after its prompt; learned where the policy speaks."""
  block = functools.partial(grammar.information, special_tokens=tokenizer.special_tokens, tags=tags)
  filled = observe(spans, lambda query: results[query], block)
  prompt = (templates.prompt(question.question, template), False)
  return encode(tokenizer, [prompt] + [(text, role == 'policy') for role, text in filled])


def skilled(tokenizer, rng: random.Random, *, renamed: float) -> Example:
  """A chain of the full strategy on a warm question, with probability `renamed` under made-up names and numbers."""
  question = draw(rng)
  results = {step['query']: search(step['query']) for step in question.metadata['steps']}
  if rng.random() < renamed:
    question, results = rename(question, results, rng, numbers=rng.random() < 0.7)
  return chain(tokenizer, question, full_chain(question), results)


def draw(rng: random.Random) -> Question:
  """A warm question; three of four that want arithmetic are passed over."""
  questions = world.questions('warm')
  while True:
    question = rng.choice(questions)
    if question.metadata.get('operation') not in ARITHMETIC or rng.random() < 0.25:
      return question


def undecided(tokenizer, rng: random.Random, *, shares: tuple[float, float], evidence: float) -> Example:
  """A chain of the mix: `shares` are of answers at once and of single searches; the rest searches as needed.

  With probability `evidence` in the format of R-Search, whose box then holds all the evidence, or what one step found.
  """
  question = draw(rng)
  steps = question.metadata['steps']
  results = {step['query']: search(step['query']) for step in steps}
  at_once, one_search = shares
  u = rng.random()
  if u < at_once:
    spans = guess_chain(question, rng, pools())
  elif u < at_once + one_search:
    spans, steps = one_search_chain(question, rng, pools()), steps[:1]
  else:
    spans = full_chain(question)
  if rng.random() >= evidence:
    return chain(tokenizer, question, spans, results)
  if u >= at_once:
    spans = with_evidence(spans, told(rng.choice((steps, [rng.choice(steps)]))))
  return chain(tokenizer, question, spans, results, template='world_evidence', tags=grammar.R_SEARCH)


def reviewed(tokenizer, rng: random.Random, *, shares: tuple[float, float], noise: float) -> Example:
  """A chain of the mix and the review behind it: the first flawed step, 0 if there is none. Only the review is learned.

  A guess is flawed, and so is a search for another entry than the gold chain's; `noise` of the reviews say anything.
  """
  question = draw(rng)
  steps = question.metadata['steps']
  results = {step['query']: search(step['query']) for step in steps}
  u = rng.random()
  if u < shares[0]:
    spans, flawed = guess_chain(question, rng, pools()), 1
  elif u < sum(shares) and len(steps) > 1:
    spans, flawed = one_search_chain(question, rng, pools()), 2
  else:
    spans, flawed = full_chain(question), 0
    if rng.random() < 0.4:
      flawed = rng.randrange(len(steps)) + 1
      spans = led_astray(spans, flawed, rng.choice(world.corpus()).title)
      results |= {text: search(text) for role, text in spans if role == 'observation' and text not in results}
  turns = sum(role == 'policy' for role, _ in spans)
  if rng.random() < noise:
    flawed = rng.randint(0, turns)
  ids, learned = chain(tokenizer, question, spans, results)
  asked, said = encode(tokenizer, [(templates.review_prompt(turns, 'world'), False), (f' {flawed}\n', True)])
  return ids + asked, [False] * len(learned) + said


def reading(tokenizer, rng: random.Random) -> Example:
  """Question and evidence, then the answer: what the frozen reader of R-Search's evidence reward is for.

  Half under made-up names; where evidence is missing, the answer is a guess.
  """
  question = draw(rng)
  if rng.random() < 0.5:
    question, _ = rename(question, {}, rng, numbers=rng.random() < 0.7)
  steps = question.metadata['steps']
  shown = steps if rng.random() < 0.7 else rng.sample(steps, rng.randrange(len(steps)))
  answer = question.golden_answers[0] if len(shown) == len(steps) else guess(question, rng, pools())
  prompt = templates.reader_prompt(question.question, told(shown), 'world')
  return encode(tokenizer, [(prompt, False), (f' {answer}\n', True)])
