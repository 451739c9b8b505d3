"""The public files of NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultiHopQA, MuSiQue, Bamboogle, GSM8K, FinQA and
BrowseComp-Plus.

`SOURCES` says how each is published; `tables.question_of_row` reads what all have in common. In `metadata`,
`source` is where a question is from; `match` and `tolerance` say how an answer to it is matched
(`rewards.match.matches`). `read_documents` makes a corpus of the passages that HotpotQA, 2WikiMultiHopQA,
MuSiQue and FinQA print next to their questions. `find` looks for a benchmark in a folder.
"""

import csv
import dataclasses
import functools
import io
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jaxsearch.data import browsecomp_plus
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError, opened, read_array, read_records, unique
from jaxsearch.data.questions import Question
from jaxsearch.data.tables import STATE, is_table, question_of_row
from jaxsearch.rewards.match import read_number

FINQA_TOLERANCE = 0.01  # relative
SPLITS = ('test', 'dev', 'validation')  # the first that is there, as Search-R1 evaluates
WITH_ANSWERS = SPLITS[1:] + SPLITS[:1]  # test last: the authors withhold its answers
Path = str | os.PathLike
Passages = Iterator[tuple[str, str]]  # title, text


@dataclasses.dataclass(frozen=True)
class Source:
  """A benchmark as its authors publish it."""
  rows: Callable[[Path], Iterator[tuple[str, dict]]]  # yields (place, row) of a file
  record: Callable[[dict], dict | None] = dict  # a row -> what `question_of_row` reads; None leaves it out
  passages: Callable[[dict], Passages] | None = None  # yields those that a row prints
  names: tuple[str, ...] = ()  # of its folder or of the beginning of its files; the first is the benchmark's
  files: tuple[str, ...] = ()  # of its authors
  splits: tuple[str, ...] = SPLITS  # the first that is there is taken
  reads_tables: bool = False  # whether `rows` reads tables too


def _csv(path: Path, delimiter: str = ',') -> Iterator[tuple[str, dict]]:
  with opened(path) as file:
    rows = csv.DictReader(io.TextIOWrapper(file, encoding='utf-8-sig', newline=''), delimiter=delimiter)
    try:
      for row in rows:
        if None in row:
          raise DataError(f'{path}:{rows.line_num}: more cells than columns')
        yield f'{path}:{rows.line_num}', row
    except (csv.Error, UnicodeError) as error:
      raise DataError(f'{path}:{rows.line_num}: {error}') from error


def _triviaqa(row: dict) -> dict:
  golds = {'value': row['Answer']['Value'], 'aliases': row['Answer']['Aliases']}
  return {'id': row['QuestionId'], 'question': row['Question'], 'answer': golds}


def _hotpotqa(row: dict) -> dict:
  """Reads HotpotQA's and 2WikiMultiHopQA's rows, and Hugging Face's export (`id`, columns in place of pairs).

  `metadata` holds the `supporting_facts` and their titles, `gold_titles`, each once.
  """
  facts = pairs(row['supporting_facts'])
  metadata = {'type': row['type'], 'gold_titles': _once(title for title, _ in facts),
              'supporting_facts': facts}
  return {'id': row.get('_id') or row.get('id'), 'question': row['question'], 'answer': row['answer'],
          'metadata': metadata}


def _hotpotqa_passages(row: dict) -> Passages:
  for title, sentences in pairs(row['context']):
    if not isinstance(sentences, list):
      raise TypeError("'context' must hold lists of sentences")
    # HotpotQA's sentences bring the space before them, those of 2WikiMultiHopQA do not.
    yield title, ' '.join(sentence.strip() for sentence in sentences if sentence.strip())


def pairs(value: Any) -> list[list]:
  """Returns pairs [title, ...]; two columns of one length are zipped."""
  if isinstance(value, dict):
    others = next((column for name, column in value.items() if name != 'title'), ())
    value = zip(value['title'], others, strict=True)
  return [[title, other] for title, other in value]


def _musique(row: dict) -> dict | None:
  """Reads MuSiQue's rows; `metadata` holds `hops` and the titles of the paragraphs that support the
  answer."""
  if not row['answerable']:  # no gold, and the id of an answerable one
    return None
  titles = _once(paragraph['title'] for paragraph in row['paragraphs'] if paragraph['is_supporting'])
  metadata = {'hops': len(row['question_decomposition']), 'gold_titles': titles}
  golds = {'value': row['answer'], 'aliases': row['answer_aliases']}
  return {'id': row['id'], 'question': row['question'], 'answer': golds, 'metadata': metadata}


def _musique_passages(row: dict) -> Passages:
  return ((paragraph['title'], paragraph['paragraph_text']) for paragraph in row['paragraphs'])


def _finqa(row: dict, search: bool = False) -> dict:
  """Reads FinQA's rows, each a report and one question.

  The model sees the text before the table, the table (a row a line, cells joined by ' | '), the text after
  it, and the question, with empty lines between. With `search` ('finqa_search') it sees the name of the
  report in place of the text, which is to be searched for (the corpus 'finqa'). `metadata` holds the `table`,
  the `program` of the annotators, and how to match: FinQA wants the number to five decimals of a program;
  answers in words are rounded, so 1 % of the gold is tolerated here.
  """
  qa, table = row['qa'], _shown(row['table'])
  before, after = ' '.join(row['pre_text']), ' '.join(row['post_text'])
  if search:
    before, after = f'Report: {_report(row)}', ''
  text = '\n\n'.join(part for part in (before, table, after, qa['question']) if part.strip())
  metadata = {'match': 'numeric', 'tolerance': FINQA_TOLERANCE, 'table': row['table'],
              'program': qa['program'], 'source': 'finqa'}
  golds = _finqa_golds(qa['exe_ans'], str(qa.get('answer', '')).strip())
  return {'id': row['id'], 'question': text, 'golden_answers': golds, 'metadata': metadata}


def _report(row: dict) -> str:
  """Returns the name of a report, such as ADI/2009/page_49.pdf; a question's id appends a number to it."""
  return row['id'].rpartition('-')[0] or row['id']


def _shown(table: list[list[str]]) -> str:
  if len(set(map(len, table))) != 1:
    raise ValueError("the rows of 'table' must have one length")
  return '\n'.join(map(' | '.join, table))


def _finqa_passages(row: dict) -> Passages:
  """Yields the table of a report and its text, four sentences a passage; the title is the report's name."""
  title = _report(row)
  yield title, _shown(row['table'])
  for name in ('pre_text', 'post_text'):
    sentences = [sentence.strip() for sentence in row[name] if sentence.strip(' .')]
    for start in range(0, len(sentences), 4):
      yield title, ' '.join(sentences[start:start + 4])


def _finqa_golds(result: float | str, answer: str) -> list[str]:
  """Returns the golds of a question: its `exe_ans` ('yes' and 'no' for comparisons), and its `answer`.

  Percentages are fractions in `exe_ans` (0.12346) and rounded by hand in `answer` ('12.3%', sometimes
  '12.3'). An `answer` that equals `exe_ans`, or a hundred times that, to its own digits is a gold too. If it
  has a per cent sign or equals the hundredfold, the other gold is '12.346%', which `numeric_match` finds in
  '12.346%', '12.346' and '0.12346' alike. If no such answer exists (some are blank or wrong), the only gold
  is 0.12346: '0.12346' and '12.346%' are right, '12.346' is not.
  """
  if result in ('yes', 'no'):
    return [result]
  if not math.isfinite(float(result)):
    raise ValueError("'exe_ans' must be finite")
  value = Decimal(str(result))
  if number := read_number(answer):
    shown, percent = number
    decimals = re.search(r'\.([0-9]+)', answer)
    unit = Fraction(1, 10 ** len(decimals[1]) if decimals else 1)
    for scale in (100, 1) if percent else (1, 100):
      # Not half a unit: some answers were cut off, not rounded.
      if abs(shown - Fraction(value * scale)) < unit:
        sign = '%' if percent or scale == 100 else ''
        return _once([f'{(value * scale).normalize():f}{sign}', answer])
  return [f'{value.normalize():f}']


SOURCES = {
  'nq': Source(read_records, names=('nq', 'nq_open'),
               files=('NQ-open.dev.jsonl', 'NQ-open.efficientqa.test.1.1.jsonl')),
  'triviaqa': Source(functools.partial(read_array, key='Data'), _triviaqa, names=('triviaqa',),
                     files=('unfiltered-web-dev.json', 'triviaqa-unfiltered/unfiltered-web-dev.json')),
  'popqa': Source(functools.partial(_csv, delimiter='\t'), names=('popqa',), files=('popQA.tsv',)),
  'hotpotqa': Source(read_array, _hotpotqa, _hotpotqa_passages, names=('hotpotqa',), splits=WITH_ANSWERS,
                     files=('hotpot_dev_distractor_v1.json', 'hotpot_dev_fullwiki_v1.json')),
  '2wiki': Source(read_array, _hotpotqa, _hotpotqa_passages, names=('2wikimultihopqa', '2wiki'),
                  splits=WITH_ANSWERS, files=('2wikimultihop/dev.json', 'data_ids_april7/dev.json')),
  'musique': Source(read_records, _musique, _musique_passages, names=('musique',), splits=WITH_ANSWERS,
                    files=('musique_ans_v1.0_dev.jsonl', 'data/musique_ans_v1.0_dev.jsonl')),
  'bamboogle': Source(_csv, lambda row: {'question': row['Question'], 'answer': row['Answer']},
                      names=('bamboogle',), files=('Bamboogle Prerelease - Sheet1.csv',)),
  'gsm8k': Source(read_records, names=('gsm8k',), files=('grade_school_math/data/test.jsonl',)),
  'finqa': Source(read_array, _finqa, _finqa_passages, names=('finqa',), files=('dataset/test.json',)),
  'browsecomp_plus': Source(browsecomp_plus.rows, browsecomp_plus.record, names=('browsecomp_plus',),
                            files=('browsecomp_plus_decrypted.jsonl',), reads_tables=True),
  'finqa_search': Source(read_array, functools.partial(_finqa, search=True)),
}
BENCHMARKS = {source.names[0]: name for name, source in SOURCES.items() if source.names}  # -> source


def read_questions(source: str, path: Path) -> list[Question]:
  """Reads the questions of a file in the format of `source`, one of `SOURCES`, in file order.

  A question without an id is 'nq_0', 'nq_1', … by the number of its row. Raises OSError, and DataError that
  names file, and line or record.
  """
  records = enumerate(_parsed(source, path, SOURCES[source].record))
  return unique(path, ((place, question_of_row({'data_source': source} | record, place, f'{source}_{number}'))
                       for number, (place, record) in records if record is not None), 'questions')


def read_documents(source: str, path: Path) -> list[Document]:
  """Reads the passages of all questions of a file, each (title and text) once, in the order of the file.

  Ids are hotpotqa_0, hotpotqa_1, … A file without answers will do; a passage without text is left out.
  Raises ValueError for a source that has none, and as `read_questions`.
  """
  if not (passages := SOURCES[source].passages):
    known = ', '.join(name for name, each in SOURCES.items() if each.passages)
    raise ValueError(f'no documents come with {source!r}; they do with {known}')
  clean = lambda row: [(' '.join(title.split()), text.strip()) for title, text in passages(row)]
  texts = _once(each for _, row in _parsed(source, path, clean) for each in row if each[1])
  documents = [Document(f'{source}_{number}', *text) for number, text in enumerate(texts)]
  return unique(path, ((str(path), document) for document in documents), 'documents')


def _parsed(source: str, path: Path, parse: Callable[[dict], Any]) -> Iterator[tuple[str, Any]]:
  """Yields (place, what `parse` makes of a row) of a file; DataError for a row in another format."""
  for place, row in SOURCES[source].rows(path):
    try:
      parsed = parse(row)
    except KeyError as error:
      raise DataError(f'{place}: no key {error}') from error
    except (TypeError, ValueError, AttributeError) as error:
      raise DataError(f'{place}: not in the format of {source}: {error}') from error
    yield place, parsed


def find(name: str, folder: Path) -> str:
  """Returns what `sources.load_questions` takes for a benchmark in a folder, or in `qa` or `data` in it.

  The first of: NAME/SPLIT.jsonl (FlashRAG), NAME/SPLIT.parquet, NAME/SPLIT/ (`datasets`), NAME.jsonl,
  NAME_SPLIT.jsonl and the like, the authors' files, and SPLIT.parquet with the questions of several
  benchmarks, as Search-R1 has it. Raises ValueError for an unknown name, FileNotFoundError if it is not
  there.
  """
  source = BENCHMARKS.get(name, name)
  if source not in BENCHMARKS.values():
    raise ValueError(f'no benchmark is called {name!r}; there are {", ".join(BENCHMARKS)}')
  stems, files, splits = SOURCES[source].names, SOURCES[source].files, SOURCES[source].splits
  name = stems[0]
  endings = ('.jsonl', '.jsonl.gz', '.json', '.parquet', '')
  places = [''.join(parts) for parts in itertools.product(stems, '/_', splits, endings)]
  places += [stem + ending for stem in stems for ending in endings]
  places += [*files, *(f'{stem}/{file}' for stem in stems for file in files)]
  places += [f'{split}.parquet' for split in SPLITS if not SOURCES[source].reads_tables]
  for inner, place in itertools.product(('', 'qa', 'data'), places):
    path = pathlib.Path(folder, inner, place)
    if path.is_file() or (path / STATE).is_file():
      flashrag = not SOURCES[source].reads_tables if is_table(path) else _is_flashrag(path)
      return str(path) if flashrag else f'{source}:{path}'
  raise FileNotFoundError(f'{folder}: no {name} in it, such as {name}/{splits[0]}.jsonl or {name}.jsonl')


def _is_flashrag(path: pathlib.Path) -> bool:
  """Tells whether a file is in the FlashRAG format: authors publish theirs under the same names."""
  first = itertools.islice(read_records(path), 1) if '.jsonl' in path.name else ()
  return any('golden_answers' in record for _, record in first)


def split_of(name: str) -> str:
  """Returns the split that the file of a benchmark says it is, '' if it does not."""
  split = re.search(rf'(?<![a-z])({"|".join(SPLITS)}|train)(?![a-z])', pathlib.Path(name).name)
  return split[1] if split else ''


def _once(items: Iterable) -> list:
  return list(dict.fromkeys(items))
