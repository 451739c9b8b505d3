"""Writes chains of searches for the cold start of a policy, from questions and passages, without a model.

Every chain searches, first for the question itself. Before each further action it says what it has found, or
that a passage is not there; then it searches for the name of the next passage that it needs, and answers when
it has seen all. What the searches return is what the policy's own would: the same back end, the same number
of passages, cut to the same length.

The questions are those of wiki_lookups.py and wiki_reading.py, whose steps are known, and those of a file
whose gold answer stands in a passage that is about the question. All is a function of the files and the seed.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_collections
import numpy as np

from jaxsearch import setup
from jaxsearch.data.corpus import Document, first_words, join_contents, words as words_of
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.questions import Question, write_questions
from jaxsearch.data.sources import load_corpus
from jaxsearch.methods.actions import written
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards.match import normalize_answer
from jaxsearch.training import row_files
from jaxsearch.trees.grammars import Called, Tagged
from recipes import wiki_hotpotqa as hotpotqa, wiki_lookups as lookups, wiki_reading as reading
from recipes.wiki_composing import compose

Search = Callable[[str], list[Document]]
ABOUT = 0.5  # a passage is about a question if it has at least this share of the weight of its words


@dataclasses.dataclass
class Chain:
  """Role and text of spans as `sft.read_demonstrations` wants them, and how often it searches."""
  question: Question
  spans: list[dict]
  searches: int = 0

  def add(self, role: str, text: str) -> None:
    self.spans.append({'role': role, 'text': text})

  def lengths(self, tokenizer: Tokenizer, role: str = '') -> list[int]:
    """Tokens of each span of a role; of every span without one."""
    return [len(tokenizer.encode(span['text'])) for span in self.spans if role in ('', span['role'])]

  def fits(self, tokenizer: Tokenizer, most: int, room: int) -> bool:
    """Tells whether a policy could write it: at most `most` tokens a span, and `room` in all."""
    return max(self.lengths(tokenizer, 'policy')) <= most and sum(self.lengths(tokenizer)) <= room


def write_chain(lookup: lookups.Lookup, search: Search, prompt: str, speech: Tagged,
                most: int) -> Chain | None:
  """The chain of a question by its steps; None if it would take more than `most` searches or does not find a
  passage."""
  question, missing = lookup.question, list(lookup.steps)
  chain, seen, thought = Chain(question, [{'role': 'prompt', 'text': prompt}]), set(), []
  query, safe = question.question, speech.safe
  while chain.searches < most:
    think = ' '.join(thought) or 'Search for the question.'
    chain.add('policy', speech.retell(f'<think> {safe(think)} </think>\n<search> {safe(query)} </search>'))
    documents, call = search(query), Called('search', {'query': query})
    chain.add('observation', speech.observe(None, [(call, written(speech, call, [documents]))]))
    chain.searches += 1
    seen |= {document.id for document in documents}
    if query != question.question and missing[0].passage not in seen:
      return None
    thought = []
    while missing and missing[0].passage in seen:
      thought.append(missing.pop(0).finding)
    if not missing:
      think = ' '.join([*thought, *filter(None, [lookup.conclusion])])
      answer = safe(question.golden_answers[0])
      chain.add('policy', speech.retell(f'<think> {safe(think)} </think>\n<answer> {answer} </answer>'))
      return chain
    query = missing[0].query
    if question.score(query):  # the query is the answer: whoever knows it need not search
      return None
    if not thought:
      thought = [f'There is nothing about {query}. Search for it.']
  return None


def supported(question: Question, documents: Sequence[Document],
              weight: Callable[[str], float]) -> lookups.Step | None:
  """The first document that is about a question and has its answer, with the sentence that has it; None if
  there is none."""
  golds = [gold for gold in map(normalize_answer, question.golden_answers) if gold not in ('', 'yes', 'no')]
  asked, own = set(words_of(question.question)), f' {normalize_answer(question.question)} '
  if any(f' {gold} ' in own for gold in golds):
    return None
  for document in documents:
    shared = asked & set(words_of(f'{document.title} {document.text}'))
    if sum(map(weight, shared)) < ABOUT * sum(map(weight, asked)):
      continue
    for sentence in re.split(r'(?<=[.!?]) +', document.text):
      if any(f' {gold} ' in f' {normalize_answer(sentence)} ' for gold in golds):
        return lookups.Step(document.id, document.title, sentence.strip())
  return None


def weights(documents: Iterable[Document]) -> Callable[[str], float]:
  """Word -> its weight in BM25 over these documents."""
  holders, number = collections.Counter(), 0
  for document in documents:
    holders.update(set(words_of(f'{document.title} {document.text}')))
    number += 1
  return lambda word: math.log1p((number - holders[word] + 0.5) / (holders[word] + 0.5))


def write(config: ml_collections.ConfigDict, out: str | pathlib.Path, number: int) -> dict[str, float]:
  """Writes passages under exchanged names, questions about them, and chains.

  corpus.jsonl      the passages of `config.data.corpus` under exchanged names, then those of `config.squad`
                    and `config.hotpotqa`
  questions.jsonl   questions about them to train on, and held_out.jsonl those that are held out
  hard_questions.jsonl, hard_held_out.jsonl  for reinforcement learning: the part of both that chains can be
                    written for, in the proportions of `config.hard` among the kinds that there are.
                    Within a kind, questions that chains.jsonl does not use come first
  own_held_out.jsonl  the questions of `config.data.questions` that are held out; chains are made of the
                      others alone
  chains.jsonl      the chains: the kinds take turns, each with one chain or as many as `config.chains` says,
                    and within a kind so do the attributes

  Args:
    config: whose model, template, search and lengths the chains are written for.
    out: the folder of the files.
    number: of chains, at most.
  Returns:
    `figures` of the chains; `questions`, `held_out`, `own`, `hard_questions` and `hard_held_out`: the number
    of questions of each; for every kind `tried_KIND`, the number of questions that a chain was tried for, and
    `chains_KIND`, of those that gave one.
  Raises DataError where there is not one chain.
  """
  out, settings = pathlib.Path(out), config.search
  documents = load_corpus(config.data.corpus)
  tokenizer = setup.load_tokenizer(config)
  speech = setup.open_grammar(config, tokenizer)
  exchanged = lookups.exchange(documents, config.seed, settings.words)
  texts, read = reading.read(config.squad, settings.words, config.seed) if config.squad else ([], [])
  others, asked = hotpotqa.read(config.hotpotqa, settings.words, config.seed) if config.hotpotqa else ([], [])
  row_files.write(out / 'corpus.jsonl', ({'id': one.id, 'contents': join_contents(one.title, one.text)}
                                         for one in [*exchanged, *texts, *others]))
  made = [*lookups.make(exchanged, config.seed, settings.words), *read, *compose(read), *asked]
  own = setup.load_questions(config, config.data.questions)
  for name, held in (('questions', False), ('held_out', True)):
    write_questions([one.question for one in made if one.held_out == held], out / f'{name}.jsonl')
  held_out = [question for question in own if lookups.held_out(question.question)]
  write_questions(held_out, out / 'own_held_out.jsonl')

  def searching(corpus: str) -> Search:
    backend = setup.open_backend(config, corpus)
    return lambda query: [dataclasses.replace(one, text=first_words(one.text, settings.words))
                          for one in backend.search([query], settings.topk)[0]]

  tried, found = collections.Counter(), collections.Counter()

  def chains_of(kind: str, asked: Iterable[lookups.Lookup], search: Search) -> Iterator[Chain]:
    for lookup in asked:
      tried[kind] += 1
      prompt = speech.prompt(lookup.question.question, config.grow.template, config.grow.chat)
      chain = write_chain(lookup, search, prompt, speech, config.grow.max_turns)
      if chain and chain.fits(tokenizer, config.grow.max_tokens, config.sampler.length):
        found[kind] += 1
        yield chain

  search, weight = searching(config.data.corpus), weights(documents)
  trained = [question for question in own if not lookups.held_out(question.question)]
  in_passages = (lookups.Lookup(question, (step,)) for question in trained
                 if (step := supported(question, search(question.question), weight)))
  search_exchanged = searching(str(out / 'corpus.jsonl'))

  def sources(held: bool) -> list[Iterator[Chain]]:
    kinds = collections.defaultdict(lambda: collections.defaultdict(list))
    for lookup in made:
      if lookup.held_out == held:
        about = lookup.question.metadata
        kinds[about['source']][about.get('attribute')].append(lookup)
    return [turn for kind, by_attribute in kinds.items()
            for chains in [chains_of(kind, in_turn(map(iter, by_attribute.values())), search_exchanged)]
            for turn in [chains] * config.chains.get(kind.replace(' ', '_'), 1)]

  stream = in_turn([chains_of('own', in_passages, search), *sources(held=False)])
  chains = list(itertools.islice(stream, number))
  if not chains:
    raise DataError(f'{config.data.corpus}: no question about these passages that searches can answer')
  held = sum(one.held_out for one in made)
  counts = {'questions': len(made) - held, 'held_out': held, 'own': len(own)}
  result = figures(chains, tokenizer) | counts
  for kind in tried:
    name = kind.replace(' ', '_')
    result |= {f'tried_{name}': tried[kind], f'chains_{name}': found[kind]}
  others = itertools.islice(stream, number)
  hard_ones = {'hard_questions': [*others, *chains], 'hard_held_out': in_turn(sources(held=True))}
  for name, answerable in hard_ones.items():
    asked = [chain.question for chain in answerable]
    kinds = {question.metadata.get('source', '') for question in asked}
    hard = lookups.mixed(asked, {kind: config.hard.get(kind.replace(' ', '_'), 0) for kind in kinds})
    write_questions(hard, out / f'{name}.jsonl')
    result[name] = len(hard)
  # The last file: where it is, launch/smollm2.sh takes all of them for written.
  row_files.write(out / 'chains.jsonl', ({'id': chain.question.id, 'spans': chain.spans} for chain in chains))
  return result


def in_turn(sources: Iterable[Iterator]) -> Iterator:
  """One of each, again and again; a source that has no more is passed over."""
  rounds = itertools.zip_longest(*sources)
  return (one for one_of_each in rounds for one in one_of_each if one is not None)


def figures(chains: Sequence[Chain], tokenizer: Tokenizer) -> dict[str, float]:
  """Means over chains: searches, tokens of the policy's spans and of all, and the share of each number of
  searches."""
  lengths = np.array([[sum(chain.lengths(tokenizer, role)) for role in ('policy', '')] for chain in chains])
  searches = collections.Counter(chain.searches for chain in chains)
  return {'chains': len(chains), 'searches': float(np.mean([chain.searches for chain in chains])),
          'tokens_trained': float(lengths[:, 0].mean()), 'tokens': float(lengths[:, 1].mean()),
          'tokens_most': int(lengths[:, 1].max())} | {
            f'share_{number}_searches': searches[number] / len(chains) for number in sorted(searches)}
