"""The questions of an evaluation, and what it reads beside them: benchmarks, tiers, corpora."""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import ml_collections

from jaxsearch import registry, setup
from jaxsearch.data import benchmarks, sources
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError, read_records, shortened, text_field
from jaxsearch.data.questions import Question
from jaxsearch.data.tables import is_table
from jaxsearch.rewards.match import normalize_answer

NUMERIC = {'gsm8k': 0.0, 'finqa': benchmarks.FINQA_TOLERANCE}  # benchmark -> tolerance
# Names of a corpus beside benchmarks.
CORPORA = ('wiki_corpus.jsonl', 'wiki-18.jsonl', 'wiki-18.jsonl.gz', 'corpus.jsonl')


@dataclasses.dataclass(frozen=True)
class QuestionSet:
  """Questions with the `source` they were read from, as `sources.load_questions` takes it."""
  name: str
  source: str
  questions: Sequence[Question]


def load(config: ml_collections.ConfigDict, name: str, folder: str = '',
         limit: int | None = None) -> QuestionSet:
  """Loads the first `limit` questions of a benchmark in a folder, or of a source such as 'world:test'.

  Raises ValueError, FileNotFoundError, DataError: no such benchmark, not in the folder, not readable.
  """
  if not folder or ':' in name:
    return QuestionSet(name, name, setup.load_questions(config, name)[:limit])
  source, label = benchmarks.find(name, folder), benchmarks.BENCHMARKS.get(name, name)
  questions, known = sources.load_questions(source), benchmarks.SOURCES[label].names
  name = known[0]
  others = {question.metadata.get('source') for question in questions} - {None, *known}
  if others and is_table(source):  # of several benchmarks
    questions = [question for question in questions if question.metadata.get('source') in known]
    if not questions:
      raise DataError(f'{source}: no question of {name} in it, but of {", ".join(sorted(others))}')
  about = {'source': label} | ({'match': 'numeric', 'tolerance': NUMERIC[name]} if name in NUMERIC else {})
  return QuestionSet(name, source, [dataclasses.replace(question, metadata=about | question.metadata)
                                    for question in questions[:limit]])


def present(folder: str) -> list[str]:
  """Returns the benchmarks that a folder has."""
  names, found = [], []
  for name in benchmarks.BENCHMARKS:
    with contextlib.suppress(FileNotFoundError):
      found.append(benchmarks.find(name, folder))
      names.append(name)
  within = {path: {one.metadata.get('source') for one in sources.load_questions(path)}  # a table of several
            for path in set(found) if found.count(path) > 1}
  return [name for name, path in zip(names, found) if path not in within
          or within[path].intersection(benchmarks.SOURCES[benchmarks.BENCHMARKS[name]].names)]


def corpus_beside(config: ml_collections.ConfigDict, sets: Sequence[QuestionSet], folder: str) -> str:
  """Returns the corpus in a folder of benchmarks or in the one above, where the config names the world's.

  '' if there is none, or the config's is to be used.
  """
  paths = [pathlib.Path(folder, above, name) for above in ('', '..') for name in CORPORA]
  inside, published = [str(path) for path in paths if path.is_file()], [':' not in one.name for one in sets]
  if config.data.corpus not in registry.ENTRIES['corpora'] or not any(published) or not inside:
    return ''
  return inside[0] if all(published) else f'{config.data.corpus}+{inside[0]}'


def read_held_out(config: ml_collections.ConfigDict) -> tuple[list[Question], dict[str, int]]:
  """Returns the questions of `config.eval`, and the tiers of `config.eval.tiers`, {} without one."""
  questions = first_of_each(setup.load_questions(config, config.eval.questions), config.eval.number)
  return questions, read_tiers(config.eval.tiers) if config.eval.tiers else {}


def first_of_each(questions: Iterable[Question], number: int) -> list[Question]:
  """Returns the first `number` questions of every source, all if 0."""
  met, taken = collections.Counter(), []
  for question in questions:
    met[source := question.metadata.get('source')] += 1
    if not number or met[source] <= number:
      taken.append(question)
  return taken


def read_tiers(path: str) -> dict[str, int]:
  """Returns question id -> tier, from the file that `jaxsearch tiers` writes."""
  tiers = {}
  for place, record in read_records(path):
    if record.get('tier') not in (1, 2) or 'id' not in record:
      raise DataError(f"{place}: an 'id' and a 'tier' of 1 or 2 are wanted, not {shortened(record)}")
    tiers[text_field(record, 'id', place)] = record['tier']
  return tiers


def golds_in(corpus: str, records: Iterable[Mapping]) -> set[str] | None:
  """Returns those golds of the records that a corpus holds; None without a corpus."""
  golds = {gold for record in records for gold in record['golden_answers']}
  return find_golds(golds, sources.load_corpus(corpus)) if corpus else None


def find_golds(golds: Iterable[str], documents: Iterable[Document]) -> set[str]:
  """Returns the golds that are in a document as whole words: `match.answer_found`, for many."""
  bare = {gold: normalize_answer(gold) for gold in golds}
  missing, met = collections.defaultdict(set), set()  # first word -> golds that were not met yet
  for gold in filter(None, bare.values()):
    missing[gold.split()[0]].add(gold)
  for document in documents:
    text = f' {normalize_answer(f"{document.title} {document.text}")} '
    for word in missing.keys() & text.split():
      here = {gold for gold in missing[word] if f' {gold} ' in text}
      met |= here
      missing[word] -= here
  return {gold for gold, text in bare.items() if text in met}
