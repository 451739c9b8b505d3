"""`jaxsearch bench`: an agent over several benchmarks. Questions in, records out (`run.answer`), from these every figure.

A figure of a benchmark is a mean over its questions, a question sampled n times counting once with the mean of its n answers. The
macro average is the mean over benchmarks. Intervals are bootstrapped over questions. The manifest says what scores depend on;
`table.py` compares manifests before it puts scores into one column.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
import pydantic

from jaxsearch import registry, setup
from jaxsearch.config_check import without_secrets
from jaxsearch.data import benchmarks, sources
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.questions import Question
from jaxsearch.data.tables import is_table
from jaxsearch.evaluation import metrics, run
from jaxsearch.rewards.match import normalize_answer, substring_match
from jaxsearch.sampler.driver import Agent, first_requests
from jaxsearch.sampler.requests import Sampling
from jaxsearch.tools import find_backend
from jaxsearch.trees import templates

METRIC = 'SQuAD 1.1 normalisation, strict EM, numbers for GSM8K and FinQA; 1'  # raise the number when a score may change
FIGURES = {  # name -> key of a record
  'em': 'em', 'f1': 'f1', 'em_f1': 'em_f1', 'em_substring': 'em_substring', 'answer_recall': 'answer_retrieved',
  'searches': 'searches', 'model_calls': 'model_calls', 'tokens': 'tokens_generated', 'seconds': 'seconds'}  # fmt: skip
HOPS = {'single-hop': ('nq', 'triviaqa', 'popqa'),  # averages that tables have beside that of all benchmarks
        'multi-hop': ('hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')}
NUMERIC = {'gsm8k': 0.0, 'finqa': benchmarks.FINQA_TOLERANCE}  # benchmark -> tolerance
CORPORA = ('wiki_corpus.jsonl', 'wiki-18.jsonl', 'wiki-18.jsonl.gz', 'corpus.jsonl')  # names of a corpus beside benchmarks
# What methods call the limit of their turns.
TURNS = ('max_turns', 'budget', 'max_segments', 'rounds', 'max_searches', 'max_thoughts', 'max_sentences')


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """Questions with the `source` they were read from, as `sources.load_questions` takes it."""
  name: str
  source: str
  questions: Sequence[Question]


def load(config: ml_collections.ConfigDict, name: str, folder: str, limit: int | None = None) -> Benchmark:
  """A benchmark by its name (`benchmarks.find`), or by a source with a colon such as 'world:test'; the first `limit` questions.

  Raises ValueError, FileNotFoundError, DataError: no such benchmark, not in the folder, not readable.
  """
  if ':' in name:
    return Benchmark(name, name, setup.load_questions(config, name)[:limit])
  name = benchmarks.ALIASES.get(name, name)
  source = benchmarks.find(name, folder)
  own, known = sources.load_questions(source), benchmarks.BENCHMARKS[name][1]
  others = {question.metadata.get('source') for question in own} - {None, *known}
  if others and is_table(source):  # of several benchmarks
    own = [question for question in own if question.metadata.get('source') in known]
    if not own:
      raise DataError(f'{source}: no question of {name} in it, but of {", ".join(sorted(others))}')
  matched = {'match': 'numeric', 'tolerance': NUMERIC[name]} if name in NUMERIC else {}
  own = [dataclasses.replace(question, metadata={'source': benchmarks.BENCHMARKS[name][0]} | matched | question.metadata)
         for question in own[:limit]]
  return Benchmark(name, source, own)


def present(folder: str) -> list[str]:
  """The benchmarks that a folder has."""
  found = []
  for name in benchmarks.BENCHMARKS:
    with contextlib.suppress(FileNotFoundError):
      found += [name] * bool(benchmarks.find(name, folder))
  return found


def corpus_beside(config: ml_collections.ConfigDict, loaded: Sequence[Benchmark], folder: str) -> str:
  """The corpus in a folder of benchmarks or in the one above, where the config names the world's; '' if there is none, or the
  config's is to be used."""
  inside = [path for above in ('', '..') for name in CORPORA if (path := pathlib.Path(folder, above, name)).is_file()]
  published = [':' not in one.name for one in loaded]
  if config.data.corpus not in registry.ENTRIES['corpora'] or not any(published) or not inside:
    return ''
  return '+'.join([*[config.data.corpus] * (not all(published)), str(inside[0])])


def golds_in(corpus: str, records: Sequence[Mapping]) -> set[str] | None:
  """Those golds of the records that a corpus holds; None without a corpus."""
  golds = {gold for record in records for gold in record['golden_answers']}
  return found_in(golds, sources.load_corpus(corpus)) if corpus else None


def read_closed_book(path: str) -> dict[tuple[str, str], float]:
  """(benchmark, id) -> EM of a result of bench by an agent that never searched. Raises DataError for another file."""
  result = read_result(path)
  if result['manifest'].get('searched'):
    raise DataError(f'{path}: this agent searched, so its answers are not closed-book')
  found = collections.defaultdict(list)
  for record in result['predictions']:
    found[record['benchmark'], record['id']].append(record['em'])
  return {name: float(np.mean(own)) for name, own in found.items()}


class _Figures(pydantic.BaseModel, extra='allow'):
  intervals: dict[str, tuple[float, float]]

  @pydantic.model_validator(mode='after')
  def _has_them(self):
    if missing := [name for name in self.intervals if not isinstance(self.model_extra.get(name), int | float)]:
      raise ValueError(f'no {missing[0]}')
    return self


class _Questions(pydantic.BaseModel):
  ids: str
  golds: str
  n: int
  split: str | None


class _Corpus(pydantic.BaseModel):
  name: str | None
  sha256: str | None


class _Index(pydantic.BaseModel):
  backend: str


class _Manifest(pydantic.BaseModel):
  method: str
  questions: dict[str, _Questions]
  corpus: _Corpus
  searched: bool
  index: _Index
  k: int
  turns: int | None
  metric: str
  decoding: dict


class _Record(pydantic.BaseModel):
  benchmark: str
  id: str
  em: float


class _Result(pydantic.BaseModel):
  """What a table reads of a result."""
  benchmarks: dict[str, _Figures]
  macro: _Figures
  hops: dict[str, _Figures] = {}
  manifest: _Manifest
  predictions: list[_Record]

  @pydantic.model_validator(mode='after')
  def _agree(self):
    if missing := self.benchmarks.keys() - self.manifest.questions.keys():
      raise ValueError(f'manifest.questions has no {min(missing)}')
    return self


def read_result(path: str) -> dict[str, Any]:
  """What `jaxsearch bench --out` wrote. Raises DataError for anything else, OSError."""
  try:
    result = json.loads(pathlib.Path(path).read_bytes())
    _Result.model_validate(result)
  except pydantic.ValidationError as error:
    first = error.errors(include_url=False, include_input=False)[0]
    raise DataError(f'{path}: not a result of jaxsearch bench ({".".join(map(str, first["loc"]))}: {first["msg"]})') from error
  except (ValueError, RecursionError) as error:
    raise DataError(f'{path}: not a result of jaxsearch bench: not JSON') from error
  return result


def asked(loaded: Sequence[Benchmark], samples: int) -> list[Question]:
  """All questions of all benchmarks, each `samples` times, under ids of their own."""
  return [dataclasses.replace(question, id=f'{benchmark.name}\t{question.id}\t{sample}')
          for benchmark in loaded for question in benchmark.questions for sample in range(samples)]


def label(record: Mapping[str, Any]) -> dict[str, Any]:
  """A record of `asked` with its benchmark, the id that its question has in the file, and the number of the sample."""
  benchmark, name, sample = record['id'].split('\t')
  return {**record, 'benchmark': benchmark, 'id': name, 'sample': int(sample), 'em_f1': (record['em'] + record['f1']) / 2,
          'em_substring': substring_match(record['prediction'], record['golden_answers'])}


def found_in(golds: Iterable[str], documents: Iterable[Document]) -> set[str]:
  """Those of the golds that occur in a document as whole words, both normalised; the rule of `match.answer_found`, for many."""
  wanted = {gold: tuple(normalize_answer(gold).split()) for gold in golds}
  by_first, found = collections.defaultdict(set), set()
  for words in wanted.values():
    if words:
      by_first[words[0]].add(words)
  for document in documents:
    words = normalize_answer(f'{document.title}\n{document.text}').split()
    for place, word in enumerate(words):
      if word in by_first:
        here = {own for own in by_first[word] if tuple(words[place:place + len(own)]) == own}
        found |= here
        by_first[word] -= here
  return {gold for gold, words in wanted.items() if words in found}


def figures(records: Sequence[Mapping], in_corpus: set[str] | None = None,
            closed_book: Mapping[tuple[str, str], float] | None = None) -> dict[str, Any]:
  """The scores of labelled records: {'benchmarks': {name: figures}, 'macro': figures, 'hops': {kind of `HOPS`: figures}}.

  Figures are those of `FIGURES`, `n` questions, `ci95` (the interval of em) and `intervals` of all; with several samples pass@k
  and maj@k for k = 1, 2, 4, … . A figure that no question has is left out.

  Args:
    in_corpus: golds that the corpus holds, see `found_in`. Adds share_in_corpus, and em_in_corpus over those questions.
    closed_book: (benchmark, id) -> whether the question is answered right without a search (0 to 1, right from one half). Adds
      needless_searches, the share that searched of the questions so answered, missing_searches, the share that did not of the
      others, and em_closed_book.
  """
  groups = collections.defaultdict(lambda: collections.defaultdict(list))
  for record in records:
    groups[record['benchmark']][record['id']].append(record)
  rows = {name: [_of_question(samples, in_corpus, closed_book) for samples in own.values()] for name, own in groups.items()}
  names = list(dict.fromkeys(name for own in rows.values() for row in own for name in row))
  values = {benchmark: np.array([[row.get(name, np.nan) for name in names] for row in own]) for benchmark, own in rows.items()}
  draws = {benchmark: metrics.resampled(own, seed=number) for number, (benchmark, own) in enumerate(values.items())}
  means = {benchmark: metrics.mean(own) for benchmark, own in values.items()}
  found = {benchmark: _named(names, means[benchmark], draws[benchmark], len(own)) for benchmark, own in values.items()}

  def over(own: Sequence[str]) -> dict[str, Any]:
    mean, drawn = (np.mean([of[benchmark] for benchmark in own], axis=0) for of in (means, draws))
    return _named(names, mean, drawn, sum(len(rows[benchmark]) for benchmark in own)) | {'benchmarks': len(own)}

  hops = {kind: [benchmark for benchmark in rows if benchmark in of] for kind, of in HOPS.items()}
  return {'benchmarks': found, 'macro': over(list(rows)), 'hops': {kind: over(own) for kind, own in hops.items() if own}}


def _of_question(samples: Sequence[Mapping], in_corpus: set[str] | None, closed_book: Mapping | None) -> dict[str, float]:
  """The figures of one question."""
  first, n = samples[0], len(samples)
  row = {name: float(np.mean([record[key] for record in samples])) for name, key in FIGURES.items() if key in first}
  right = [record['em'] for record in samples]
  for k in (2 ** power for power in range(n.bit_length())) if n > 1 else ():
    row |= {f'pass@{k}': metrics.pass_at_k(n, int(sum(right)), k),
            f'maj@{k}': metrics.maj_at_k([record['prediction'] for record in samples], right, k)}
  if in_corpus is not None:
    row['share_in_corpus'] = float(any(gold in in_corpus for gold in first['golden_answers']))
    row |= {'em_in_corpus': row['em']} if row['share_in_corpus'] else {}
  known = (closed_book or {}).get((first['benchmark'], first['id']))
  if known is not None:
    searched = float(np.mean([record['searches'] > 0 for record in samples]))
    row |= {'em_closed_book': known} | ({'needless_searches': searched} if known >= 0.5 else {'missing_searches': 1.0 - searched})
  return row


def _named(names: Sequence[str], means: np.ndarray, draws: np.ndarray, n: int) -> dict[str, Any]:
  known = [number for number in range(len(names)) if not np.isnan(means[number])]
  low, high = metrics.interval(draws[:, known])
  intervals = {names[number]: [float(low[at]), float(high[at])] for at, number in enumerate(known)}
  return {names[number]: float(means[number]) for number in known} | {
    'n': n, 'ci95': intervals['em'], 'intervals': intervals}


def manifest(config: ml_collections.ConfigDict, loaded: Sequence[Benchmark], agent: Agent, *, corpus: str, sampling: Sampling,
             samples: int, policy: Mapping[str, Any]) -> dict[str, Any]:
  """What the scores depend on, as JSON can hold it; `policy` names the weights or the server."""
  grow = dict(config.grow) | dict(config.eval.grow)
  search = {name: config.search[name] for name in ('backend', 'by_source')}
  search |= {'words': config.search.words} if config.search.words else {}
  search |= find_backend(config.search.backend).identity(config.search)
  corpus_hash = search.pop('corpus_hash', None)
  tokenizer = agent.engine.tokenizer
  questions = {benchmark.name: {
    'source': benchmark.source, 'split': benchmarks.split_of(benchmark.source), 'n': len(benchmark.questions),
    'ids': _digest(question.id for question in benchmark.questions),
    'golds': _digest(f'{question.question}\n{question.golden_answers}' for question in benchmark.questions)}
    for benchmark in loaded}
  found = run.manifest(config, corpus=corpus) | {
    'method': config.method, 'policy': dict(policy), 'questions': questions, 'index': search, 'k': config.search.topk,
    'turns': next((grow[name] for name in TURNS if name in grow), None), 'prompt': _prompt_digest(agent, grow), 'metric': METRIC,
    'tokenizer': {'size': tokenizer.vocab_size, 'sha256': _digest([tokenizer.backend.to_str()])},
    'decoding': {'temperature': sampling.temperature, 'top_p': sampling.top_p, 'top_k': sampling.top_k, 'samples': samples},
    'limits': {'context': config.sampler.length, 'max_tokens': grow.get('max_tokens')}, 'seed': config.seed}  # fmt: skip
  by_file = found['files'].get('corpus', {}).get('sha256') or corpus_hash
  found['corpus'] = {'name': corpus, 'sha256': by_file or (_digest(
    f'{one.title}\n{one.text}' for one in sources.load_corpus(corpus)) if corpus else None)}
  return json.loads(json.dumps(without_secrets(found)))


def _prompt_digest(agent: Agent, grow: Mapping[str, Any]) -> str:
  """Of the prompt of a made-up question up to the first request of the policy, and of the templates (by name or in a folder) that
  `grow` names."""
  tokenizer = agent.engine.tokenizer
  first = first_requests(agent.grow, Question('probe', 'QUESTION', ('ANSWER',)), tokenizer)
  prompt = tokenizer.decode(first[0].node.path_tokens()) if first else ''
  named = [templates.find(grow[field], kind) for field, kind in templates.SETTINGS.items() if field in grow]
  folders = [value for value in grow.values() if isinstance(value, str) and os.path.isdir(value)]
  own = [file.read_text(encoding='utf-8') for folder in folders for file in sorted(pathlib.Path(folder).glob('*.txt'))]
  return _digest([prompt, *named, *own])


def _digest(texts: Iterable[str]) -> str:
  digest = hashlib.sha256()
  for text in texts:
    digest.update(f'{len(text)}\n{text}'.encode())
  return digest.hexdigest()
