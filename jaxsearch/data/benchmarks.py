"""The public files of NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultiHopQA, MuSiQue, Bamboogle, GSM8K and FinQA, as published.

`read_questions` reads the questions. `metadata` says where a question is from (`source`) and how an answer to it is matched:
`match` and `tolerance` are arguments of `rewards.match.matches`. HotpotQA, 2WikiMultiHopQA and MuSiQue print the passages that
they were written from next to each question, FinQA the report: `read_documents` makes one corpus of them. Names for all of it
('hotpotqa:PATH') are in `sources.py`. `find` looks for a benchmark in a folder, under the names that FlashRAG, Search-R1, verl
and the authors publish it by. Files that end in `.gz` are unpacked on the way.
"""

import csv
import functools
import io
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction

from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError, field, opened, read_array, read_records, shortened, text_field, unique
from jaxsearch.data.questions import Question
from jaxsearch.data.tables import STATE, texts
from jaxsearch.rewards.match import read_number

FINQA_TOLERANCE = 0.01  # relative
Found = Iterator[tuple[str, Question]]  # with the place of each, for messages


def _gsm8k(path: str | os.PathLike) -> Found:
  """GSM8K (`train.jsonl`, `test.jsonl`): `{"question", "answer"}` a line, the answer a solution that ends in '#### 72'.

  The gold is the number after the last '####', without commas. The files have no ids: questions are gsm8k_0, gsm8k_1, ...
  """
  for number, (place, record) in enumerate(read_records(path)):
    _, mark, end = text_field(record, 'answer', place).rpartition('####')
    if not mark:
      raise DataError(f"{place}: 'answer' does not end in '#### NUMBER'")
    gold = end.strip().replace(',', '')
    if not re.fullmatch(r'-?[0-9]+(\.[0-9]+)?', gold):
      raise DataError(f"{place}: 'answer' has no number after '####' but {shortened(end.strip())}")
    question = text_field(record, 'question', place)
    yield place, Question(f'gsm8k_{number}', question, (gold,), {'match': 'numeric', 'source': 'gsm8k'})


def _hotpotqa(path: str | os.PathLike, source: str = 'hotpotqa') -> Found:
  """HotpotQA (`hotpot_dev_distractor_v1.json`) and 2WikiMultiHopQA (`dev.json`): one array of objects.

  `{"_id", "question", "answer", "type", "supporting_facts": [[title, sentence], ...], "context": ...}`; what 2WikiMultiHopQA
  has besides (evidences, ids in Wikidata) is not used. Hugging Face's export (`id`, and columns in place of pairs) is read as
  well. `metadata` holds the `supporting_facts` and their titles, `gold_titles`, each once.
  """
  for place, record in read_array(path):
    name = text_field(record, 'id' if 'id' in record and '_id' not in record else '_id', place)
    facts = _pairs(record, 'supporting_facts', ('title', 'sent_id'), place)
    metadata = {'type': text_field(record, 'type', place), 'source': source,
                'gold_titles': _once(title for title, _ in facts), 'supporting_facts': facts}
    answer = text_field(record, 'answer', place)
    yield place, Question(name, text_field(record, 'question', place), (answer,), metadata)


def _musique(path: str | os.PathLike) -> Found:
  """MuSiQue (`musique_ans_v1.0_dev.jsonl` and the files of musique_full), an object a line.

  Golds are `answer` and `answer_aliases`. Questions that are not `answerable` are left out: they have no gold, and share
  their ids with the answerable ones. `metadata` holds `hops`, the number of steps in `question_decomposition`, and
  `gold_titles`, those of the paragraphs that support the answer.
  """
  for place, record in read_records(path):
    if not field(record, 'answerable', bool, place):
      continue
    aliases = field(record, 'answer_aliases', list, place, str)
    if not all(alias.strip() for alias in aliases):
      raise DataError(f"{place}: 'answer_aliases' has one that is blank: it would be matched by an empty answer")
    golds = tuple(_once([text_field(record, 'answer', place), *aliases]))
    steps = field(record, 'question_decomposition', list, place)
    if not steps:
      raise DataError(f"{place}: 'question_decomposition' is empty")
    titles = _once(text_field(paragraph, 'title', inside) for inside, paragraph in _paragraphs(record, place)
                   if field(paragraph, 'is_supporting', bool, inside))
    metadata = {'hops': len(steps), 'gold_titles': titles, 'source': 'musique'}
    yield place, Question(text_field(record, 'id', place), text_field(record, 'question', place), golds, metadata)


def _finqa(path: str | os.PathLike, search: bool = False) -> Found:
  """FinQA (`train.json`, `dev.json`, `test.json`): one array of reports, each with one question (`qa`).

  The model sees the text before the table, the table (a row a line, cells joined by ' | '), the text after it, and the
  question, with empty lines between. With `search` ('finqa_search') it sees the name of the report in place of the text, which
  is to be searched for (the corpus 'finqa'). `metadata` holds the `table`, the `program` of the annotators, and how to match.

  Gold is `exe_ans`, what the program gives ('yes' and 'no' for comparisons). FinQA's own evaluation runs a predicted program
  and wants the same number to five decimals; answers in words are rounded, so 1 % of the gold is tolerated here. Percentages
  are fractions in `exe_ans` (0.12346) and rounded by hand in `answer` ('12.3%', sometimes '12.3'). The rule: where `answer`
  is `exe_ans`, or a hundred times `exe_ans`, as far as its digits go, it is a gold of its own; where it is a percentage by
  its sign or by the hundred, the gold is '12.346%', which `numeric_match` finds in '12.346%', '12.346' and '0.12346' alike.
  Without such an answer (some are blank or wrong) 0.12346 stays: '0.12346' and '12.346%' are right, '12.346' is not.
  """
  for place, record in read_array(path):
    qa, inside, table = field(record, 'qa', dict, place), f"{place}: 'qa'", _table(record, place)
    question = text_field(qa, 'question', inside)
    metadata = {'match': 'numeric', 'tolerance': FINQA_TOLERANCE, 'table': table,
                'program': text_field(qa, 'program', inside), 'source': 'finqa'}
    before, after = (' '.join(field(record, name, list, place, str)) for name in ('pre_text', 'post_text'))
    if search:
      before, after = f'Report: {_report(record, place)}', ''
    text = '\n\n'.join(part for part in (before, _shown(table), after, question) if part.strip())
    yield place, Question(text_field(record, 'id', place), text, _finqa_golds(qa, inside), metadata)


def _report(record: dict, place: str) -> str:
  """The name of a FinQA report, such as ADI/2009/page_49.pdf; its questions are numbered behind it."""
  return text_field(record, 'id', place).rpartition('-')[0] or text_field(record, 'id', place)


def _shown(table: list[list[str]]) -> str:
  return '\n'.join(' | '.join(row) for row in table)


def _finqa_passages(path: str | os.PathLike) -> Iterator[tuple[str, str]]:
  """The table of each report, and its text, four sentences a passage; the title is the name of the report."""
  for place, record in read_array(path):
    title = _report(record, place)
    yield title, _shown(_table(record, place))
    for name in ('pre_text', 'post_text'):
      sentences = [sentence.strip() for sentence in field(record, name, list, place, str) if sentence.strip(' .')]
      for start in range(0, len(sentences), 4):
        yield title, ' '.join(sentences[start:start + 4])


def _finqa_golds(qa: dict, place: str) -> tuple[str, ...]:
  """The golds of a question by the rule of `_finqa`."""
  result = field(qa, 'exe_ans', (int, float, str), place)
  if isinstance(result, str):
    if result not in ('yes', 'no'):
      raise DataError(f"{place}: 'exe_ans' must be a number, 'yes' or 'no', not {shortened(result)}")
    return (result,)
  if not math.isfinite(result):
    raise DataError(f"{place}: 'exe_ans' must be finite, not {result}")
  value, answer = Decimal(str(result)), str(qa.get('answer', '')).strip()
  if found := read_number(answer):
    decimals = re.search(r'\.([0-9]+)', answer)
    unit = Fraction(1, 10 ** len(decimals[1]) if decimals else 1)
    for scale in (100, 1) if found[1] else (1, 100):
      # Not half a unit: some answers were cut off, not rounded.
      if abs(found[0] - Fraction(value * scale)) < unit:
        sign = '%' if found[1] or scale == 100 else ''
        return tuple(_once([f'{(value * scale).normalize():f}{sign}', answer]))
  return (f'{value.normalize():f}',)


def _table(record: dict, place: str) -> list[list[str]]:
  """The rows of a FinQA table, all of one length."""
  table = field(record, 'table', list, place)
  if not table:
    raise DataError(f"{place}: 'table' is empty")
  for number, row in enumerate(table, start=1):
    if not isinstance(row, list) or not all(isinstance(cell, str) for cell in row):
      raise DataError(f"{place}: row {number} of 'table' must be a list of texts, not {shortened(row)}")
    if len(row) != len(table[0]):
      raise DataError(f"{place}: row {number} of 'table' has {len(row)} cells, the first has {len(table[0])}")
  return table


def _nq(path: str | os.PathLike) -> Found:
  """NQ-open (`NQ-open.dev.jsonl`): `{"question", "answer": [...]}` a line. There are no ids: questions are nq_0, nq_1, ..."""
  for number, (place, record) in enumerate(read_records(path)):
    yield place, _question(record, place, 'nq', f'nq_{number}', 'question', texts(field(record, 'answer', list, place)))


def _triviaqa(path: str | os.PathLike) -> Found:
  """TriviaQA (`unfiltered-web-dev.json` and the others): an object with the questions under `Data`; aliases are golds too."""
  for place, record in read_array(path, 'Data'):
    answer, inside = field(record, 'Answer', dict, place), f"{place}: 'Answer'"
    golds = [text_field(answer, 'Value', inside), *field(answer, 'Aliases', list, inside, str)]
    yield place, _question(record, place, 'triviaqa', text_field(record, 'QuestionId', place), 'Question', _once(golds))


def _popqa(path: str | os.PathLike) -> Found:
  """PopQA (`popQA.tsv`): tab-separated, with the golds as JSON in `possible_answers`."""
  for place, record in _csv(path, '\t'):
    try:
      golds = texts(json.loads(text_field(record, 'possible_answers', place)))
    except ValueError as error:
      raise DataError(f"{place}: 'possible_answers' is no JSON: {shortened(record.get('possible_answers'))}") from error
    yield place, _question(record, place, 'popqa', text_field(record, 'id', place), 'question', golds)


def _bamboogle(path: str | os.PathLike) -> Found:
  """Bamboogle (`Bamboogle Prerelease - Sheet1.csv`): `Question,Answer`. Questions are bamboogle_0, bamboogle_1, ..."""
  for number, (place, record) in enumerate(_csv(path, ',')):
    yield place, _question(record, place, 'bamboogle', f'bamboogle_{number}', 'Question', [text_field(record, 'Answer', place)])


def _question(record: dict, place: str, source: str, name: str, key: str, golds: Iterable[str]) -> Question:
  golds = tuple(gold for gold in golds if gold.strip())
  if not golds:
    raise DataError(f'{place}: no gold answer')
  return Question(name, text_field(record, key, place), golds, {'source': source})


def _csv(path: str | os.PathLike, delimiter: str) -> Iterator[tuple[str, dict]]:
  with opened(path) as file:
    rows = csv.DictReader(io.TextIOWrapper(file, encoding='utf-8-sig', newline=''), delimiter=delimiter)
    for row in rows:
      yield f'{path}:{rows.line_num}', row


SOURCES: dict[str, Callable[[str | os.PathLike], Found]] = {
  'nq': _nq, 'triviaqa': _triviaqa, 'popqa': _popqa, 'bamboogle': _bamboogle, 'gsm8k': _gsm8k,
  'hotpotqa': _hotpotqa, '2wiki': functools.partial(_hotpotqa, source='2wiki'), 'musique': _musique,
  'finqa': _finqa, 'finqa_search': functools.partial(_finqa, search=True)}  # fmt: skip


# name -> (source, names of its folder or of the beginning of its files, names of its authors' files)
BENCHMARKS = {
  'nq': ('nq', ('nq', 'nq_open'), ('NQ-open.dev.jsonl', 'NQ-open.efficientqa.test.1.1.jsonl')),
  'triviaqa': ('triviaqa', ('triviaqa',), ('unfiltered-web-dev.json', 'triviaqa-unfiltered/unfiltered-web-dev.json')),
  'popqa': ('popqa', ('popqa',), ('popQA.tsv',)),
  'hotpotqa': ('hotpotqa', ('hotpotqa',), ('hotpot_dev_distractor_v1.json', 'hotpot_dev_fullwiki_v1.json')),
  '2wikimultihopqa': ('2wiki', ('2wikimultihopqa', '2wiki'), ('2wikimultihop/dev.json', 'data_ids_april7/dev.json')),
  'musique': ('musique', ('musique',), ('musique_ans_v1.0_dev.jsonl', 'data/musique_ans_v1.0_dev.jsonl')),
  'bamboogle': ('bamboogle', ('bamboogle',), ('Bamboogle Prerelease - Sheet1.csv',)),
  'gsm8k': ('gsm8k', ('gsm8k',), ('grade_school_math/data/test.jsonl',)),
  'finqa': ('finqa', ('finqa',), ('dataset/test.json',)),
}  # fmt: skip
ALIASES = {'2wiki': '2wikimultihopqa'}
SPLITS = ('test', 'dev', 'validation')  # the first that is there, as Search-R1 evaluates


def find(name: str, folder: str | os.PathLike) -> str:
  """What `sources.load_questions` takes for a benchmark in a folder of data, or in the folder `qa` or `data` in it.

  The first of: NAME/SPLIT.jsonl (FlashRAG), NAME/SPLIT.parquet, NAME/SPLIT/ (`datasets`), NAME.jsonl, NAME_SPLIT.jsonl and the
  like, the authors' files, and SPLIT.parquet with the questions of several benchmarks, as Search-R1 has it.
  Raises ValueError for an unknown name, FileNotFoundError if it is not there.
  """
  name = ALIASES.get(name, name)
  if name not in BENCHMARKS:
    raise ValueError(f'no benchmark is called {name!r}; there are {", ".join(BENCHMARKS)}')
  source, stems, files = BENCHMARKS[name]
  endings = ('.jsonl', '.jsonl.gz', '.json', '.parquet', '')
  own = [f'{stem}{joint}{split}{ending}' for stem in stems for joint in ('/', '_') for split in SPLITS for ending in endings]
  places = [*own, *(stem + ending for stem in stems for ending in endings), *files,
            *(f'{stem}/{file}' for stem in stems for file in files), *(f'{split}.parquet' for split in SPLITS)]
  for inner, place in itertools.product(('', 'qa', 'data'), places):
    path = pathlib.Path(folder, inner, place)
    if path.is_file() or (path / STATE).is_file():
      flashrag = path.is_dir() or path.suffix == '.parquet' or _is_flashrag(path)
      return str(path) if flashrag else f'{source}:{path}'
  raise FileNotFoundError(f'{folder}: no {name} in it, such as {name}/{SPLITS[0]}.jsonl or {name}.jsonl')


def _is_flashrag(path: pathlib.Path) -> bool:
  """Whether a file is in the FlashRAG format: authors publish theirs under the same names."""
  return '.jsonl' in path.name and any('golden_answers' in record for _, record in itertools.islice(read_records(path), 1))


def split_of(name: str) -> str:
  """The split that the file of a benchmark says it is, '' if it does not."""
  return next((split for split in (*SPLITS, 'train') if re.search(rf'(?<![a-z]){split}(?![a-z])', pathlib.Path(name).name)), '')


def read_questions(source: str, path: str | os.PathLike) -> list[Question]:
  """The questions of a file in the format of `source`, one of `SOURCES`, in file order.

  Raises:
    DataError: bad JSON, a missing key, a value of the wrong kind, an id given twice, or no question at all; names file, line or
      record (counted from 1) and key.
    OSError: the file cannot be opened.
  """
  return unique(path, SOURCES[source](path), 'questions')


def read_documents(source: str, path: str | os.PathLike) -> list[Document]:
  """The passages of all questions of a file, each (title and text) once, in the order in which they are first met.

  Ids are hotpotqa_0, hotpotqa_1, ... A file without answers will do; a passage without text is left out.

  Raises:
    ValueError: a source that is not in `PASSAGES`.
    DataError, OSError: as `read_questions`.
  """
  if source not in PASSAGES:
    raise ValueError(f'no documents come with {source!r}; they do with {", ".join(PASSAGES)}')
  texts = _once((' '.join(title.split()), text.strip()) for title, text in PASSAGES[source](path) if text.strip())
  return unique(path, ((str(path), Document(f'{source}_{number}', *text)) for number, text in enumerate(texts)), 'documents')


def _hotpotqa_passages(path: str | os.PathLike) -> Iterator[tuple[str, str]]:
  for place, record in read_array(path):
    for title, sentences in _pairs(record, 'context', ('title', 'sentences'), place):
      if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise DataError(f"{place}: 'context' must hold lists of sentences, not {shortened(sentences)}")
      # HotpotQA's sentences bring the space before them, those of 2WikiMultiHopQA do not.
      yield title, ' '.join(sentence.strip() for sentence in sentences if sentence.strip())


def _musique_passages(path: str | os.PathLike) -> Iterator[tuple[str, str]]:
  for place, record in read_records(path):
    for inside, paragraph in _paragraphs(record, place):
      yield text_field(paragraph, 'title', inside), field(paragraph, 'paragraph_text', str, inside)


PASSAGES: dict[str, Callable[[str | os.PathLike], Iterator[tuple[str, str]]]] = {  # source -> (title, text) of its passages
  'hotpotqa': _hotpotqa_passages, '2wiki': _hotpotqa_passages, 'musique': _musique_passages, 'finqa': _finqa_passages}


def _paragraphs(record: dict, place: str) -> Iterator[tuple[str, dict]]:
  """(place, paragraph) of a record of MuSiQue."""
  for number, paragraph in enumerate(field(record, 'paragraphs', list, place, dict), start=1):
    yield f"{place}: paragraph {number} of 'paragraphs'", paragraph


def _pairs(record: dict, key: str, columns: tuple[str, str], place: str) -> list[list]:
  """The pairs [title, ...] under a key of HotpotQA; two columns of one length are zipped."""
  pairs = field(record, key, (list, dict), place)
  if isinstance(pairs, dict):
    titles, others = (field(pairs, column, list, f'{place}: {key!r}') for column in columns)
    if len(titles) != len(others):
      raise DataError(f'{place}: {key!r} has {len(titles)} {columns[0]!r} and {len(others)} {columns[1]!r}')
    pairs = [list(pair) for pair in zip(titles, others, strict=True)]
  for pair in pairs:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
      raise DataError(f'{place}: {key!r} must hold pairs [title, {columns[1]}], not {shortened(pair)}')
  return pairs


def _once(items: Iterable) -> list:
  return list(dict.fromkeys(items))
