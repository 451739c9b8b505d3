"""`jaxsearch table`: results of bench side by side, as far as they compare.

A row is a result, a column a benchmark. Results enter one column only if their manifests agree in what scores
depend on (`SETTINGS`). An agent that never searched has no corpus, index, k or turns to agree in, and turns
count within a method only. Prompt, method, policy, tokenizer and limits are the agent's own and may differ.
Rows of papers come from published.csv; what differs is written below them.
"""

import collections
import csv
import io
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsearch.data import benchmarks
from jaxsearch.data.jsonl import shortened
from jaxsearch.evaluation import metrics
from jaxsearch.evaluation.figures import HOPS, look_up
from jaxsearch.evaluation.results import read_result

PUBLISHED = pathlib.Path(__file__).with_name('published.csv')
SETTINGS = ('corpus', 'index', 'k', 'turns', 'questions', 'split', 'metric', 'decoding')
SEARCHING = ('corpus', 'index', 'k', 'turns')  # of agents that search
# Questions of a published row on 'all' of them.
SIZES = {'nq': 3610, 'triviaqa': 11313, 'popqa': 14267, 'hotpotqa': 7405, '2wikimultihopqa': 12576,
         'musique': 2417, 'bamboogle': 125, 'gsm8k': 1319, 'finqa': 1147}
LISTED = {'em': ('',), 'f1': ('_f1',), 'em_f1': ('', '_f1')}  # figure -> endings of columns of published.csv
MACRO, POOLED, MISSING = 'average', 'all questions', '–'
_LATEX = str.maketrans({'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
                        **{character: f'\\{character}' for character in '{}$&#_%'}})

Cell = tuple[float, float | None, float | None]  # a figure, the ends of its interval


class Row(NamedTuple):
  name: str
  cells: Mapping[str, Cell]  # by column
  note: str = ''


def render(paths: Sequence[str], *, metric: str = 'em', form: str = 'text', published: str = '',
           allow: Sequence[str] = ()) -> str:
  """Returns the table of results of bench.

  Args:
    metric: one of the figures of bench, such as em, f1, searches or pass@4.
    form: 'text', 'markdown', 'latex' or 'csv'.
    published: methods of published.csv with commas, or 'all'; '' shows none.
    allow: settings that may differ within a column, or 'all'.
  Raises:
    ValueError: settings differ that are not allowed to; no such setting, figure or published method.
    DataError, OSError: a file that bench did not write.
  """
  if unknown := set(allow) - {*SETTINGS, 'all'}:
    raise ValueError(f'--allow={",".join(sorted(unknown))}: settings are {", ".join(SETTINGS)}')
  results = dict(zip(_labels(paths), map(read_result, paths)))
  there = list(dict.fromkeys(name for result in results.values() for name in result['benchmarks']))
  columns = sorted(there, key=lambda name: [*benchmarks.BENCHMARKS, *there].index(name))
  unlike = [(column, *difference) for column in columns for difference in _differing(results, column)]
  if refused := [f'{column}: {text}' for column, _, name, text in unlike if not {name, 'all'} & set(allow)]:
    raise ValueError(f'{"; ".join(refused)}. Settings named by --allow may differ')
  if metric not in (known := {name for result in results.values() for name in result['macro']['intervals']}):
    raise ValueError(f'--metric={metric}: no such figure in these results; '
                     f'there are {", ".join(sorted(known))}')
  averages = _averages(columns)
  shown = [*columns, *averages]
  rows = [Row(label, {column: (of[metric], *of['intervals'][metric])
                      for column, of in _figures(result, averages).items() if metric in of['intervals']})
          for label, result in results.items()]
  papers = list(_published(published, next(iter(results.values())), columns, averages, metric))
  if form == 'csv':
    return _csv([*rows, *papers], shown)
  cells = [['', *shown]]
  for row in [*rows, *papers]:
    marked = {column for column, label, *_ in unlike if label == row.name}
    cells.append([row.name + ' *' * bool(row.note),
                  *(_cell(row.cells.get(column), metric) + ' †' * (column in marked) for column in shown)])
  unit = '%, ' if look_up(metric).scale == 100 else ''
  notes = [f'{metric}, {unit}with 95 % intervals (bootstrap over questions)']
  notes += [f'† {column}: {text}' for column, _, _, text in unlike]
  notes += [f'* {row.name}: {row.note}' for row in papers]
  tables = [layout(cells, form)]
  if tests := _tests(results, columns, metric):
    tables.append(layout(tests, form))
    notes.append(f'second table: {metric} minus that of {next(iter(results))}, paired by question; p of a '
                 'sign-flip permutation test, not corrected for their number')
  comment = {'latex': '% ', 'markdown': '- ', 'text': ''}[form]
  return '\n\n'.join([*tables, '\n'.join(comment + escaped(note, form) for note in notes)]) + '\n'


def _labels(paths: Sequence[str]) -> list[str]:
  """Returns the names of the files, without ending where that tells them apart."""
  stems = [pathlib.Path(path).stem for path in paths]
  labels = stems if len(set(stems)) == len(stems) else list(map(str, paths))
  if len(set(labels)) < len(labels):
    raise ValueError('the same result is given twice')
  return labels


def _differing(results: Mapping[str, Mapping], column: str) -> Iterator[tuple[str, str, str]]:
  """Yields (label, setting, sentence) of every result that differs from the first with the setting."""
  for name in SETTINGS:
    firsts = {}
    for label, result in results.items():
      manifest = result['manifest']
      if column in result['benchmarks'] and (manifest['searched'] or name not in SEARCHING):
        # How many turns there may be is a setting of a method: what another method calls a turn does not
        # matter.
        kind = manifest['method'] if name == 'turns' else ''
        value, shown = _setting(manifest, column, name)
        first, wanted, other = firsts.setdefault(kind, (label, value, shown))
        if value != wanted:
          text = f'{_apart(shown, other)}, not {_apart(other, shown)}'
          yield label, name, f'{label} differs from {first} in {name} ({text})'


def _setting(manifest: Mapping, column: str, name: str) -> tuple[Any, Any]:
  """Returns what has to agree, and how it is shown."""
  if name == 'corpus':
    return manifest['corpus']['sha256'], manifest['corpus']['name']
  asked = manifest['questions'][column]
  if name == 'questions':
    return (asked['ids'], asked['golds']), asked['n']
  value = asked['split'] if name == 'split' else manifest[name]
  return value, value


def _apart(value: Any, other: Any) -> str:
  """Returns a value for a message; of groups what the other has not."""
  if isinstance(value, dict) and isinstance(other, dict):
    fields = [f'{name}={field}' for name, field in value.items() if other.get(name) != field]
    return ' '.join(fields) or 'no such field'
  return 'other ones of that number' if value == other else shortened(value)


def _averages(columns: Sequence[str]) -> dict[str, Sequence[str]]:
  """Returns name -> the benchmarks it is over: by hops, and of all, as far as they are several and differ."""
  hops = {kind: [column for column in columns if column in names] for kind, names in HOPS.items()}
  return {kind: over for kind, over in (hops | {MACRO: columns}).items()
          if len(over) > 1 and (kind == MACRO or over != columns)}


def _figures(result: Mapping, averages: Mapping[str, Sequence[str]]) -> dict[str, Mapping]:
  """Returns column -> figures of a result; of the averages those that are over the same benchmarks."""
  of_all = result.get('hops', {}) | {MACRO: result['macro']}
  over = lambda kind: {name for name in result['benchmarks'] if kind == MACRO or name in HOPS[kind]}
  return result['benchmarks'] | {kind: of_all[kind] for kind, names in averages.items()
                                 if kind in of_all and over(kind) == set(names)}


def _cell(cell: Cell | None, metric: str) -> str:
  if cell is None:
    return MISSING
  value, *ends = (look_up(metric).shown(number) for number in cell if number is not None)
  return f'{value} [{ends[0]}, {ends[1]}]' if ends else value


def _tests(results: Mapping[str, Mapping], columns: Sequence[str], metric: str) -> list[list[str]]:
  """Returns a heading, and for each result but the first a row of differences to the first, by question.

  With several columns also over the questions of all of them.
  """
  values, (first, *others) = collections.defaultdict(lambda: collections.defaultdict(list)), results
  for label, result in results.items():
    for record in result['predictions']:
      for column in (record['benchmark'], POOLED) if metric in record else ():
        values[label, column][record['benchmark'], record['id']].append(record[metric])
  shown = [*columns, *[POOLED] * (len(columns) > 1)]
  tests = {label: [_test(values[label, column], values[first, column], metric) for column in shown]
           for label in others}
  rows = [[f'{label} - {first}', *of] for label, of in tests.items() if set(of) != {MISSING}]
  return [['', *shown], *rows] if rows else []


def _test(a: Mapping[tuple, list], b: Mapping[tuple, list], metric: str) -> str:
  """Returns the mean of a - b over common questions, interval and p; both are (benchmark, id) -> values."""
  common = sorted(a.keys() & b.keys())
  if not common:
    return MISSING
  test = metrics.paired(*(np.array([np.mean(values[name]) for name in common]) for values in (a, b)))
  difference, low, high = (look_up(metric).shown(test[name], '+') for name in ('difference', 'low', 'high'))
  return f'{difference} [{low}, {high}] ' + (f'p={test["p"]:.3f}' if test['p'] >= 0.001 else 'p<0.001')


def read_published() -> list[dict[str, str]]:
  """Returns the rows of published.csv: scores in per cent, under NAME by `metric`, under NAME_f1 F1."""
  with open(PUBLISHED, encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _published(wanted: str, result: Mapping, columns: Sequence[str], averages: Mapping[str, Sequence[str]],
               metric: str) -> Iterator[Row]:
  """Yields the published rows with a score in these columns."""
  if not wanted:
    return
  if metric not in LISTED:
    raise ValueError(f'--published: papers are listed with {", ".join(LISTED)}, not {metric}')
  rows, names = read_published(), tuple(wanted.lower().split(','))
  chosen = [row for row in rows if wanted == 'all' or row['method'].lower().startswith(names)]
  if not chosen:
    methods = ', '.join(sorted({row['method'] for row in rows}))
    raise ValueError(f'--published={wanted}: no such method; there are {methods}')
  for row in chosen:
    printed = {column: [row.get(column + ending) for ending in LISTED[metric]] for column in columns}
    scores = {column: np.mean(list(map(float, of))) / 100 for column, of in printed.items() if all(of)}
    means = {name: np.mean([scores[column] for column in over]) for name, over in averages.items()
             if scores.keys() >= set(over)}
    if scores:
      cells = {column: (float(score), None, None) for column, score in (scores | means).items()}
      yield Row(f'{row["method"]}, {row["model"]}', cells, _note(row, result, list(scores), metric))


def _note(row: Mapping[str, str], result: Mapping, columns: Sequence[str], metric: str = 'em') -> str:
  """Returns the source of a published row, and where its setting differs from that of a result."""
  manifest, differs = result['manifest'], []
  asked = {column: of['n'] for column, of in manifest['questions'].items() if column in columns}
  if row['questions'] != 'all' or any(asked[column] != SIZES[column] for column in asked):
    numbers = ', '.join(map(str, dict.fromkeys(asked.values())))
    differs.append(f'questions: {row["questions"]} of a benchmark, not {numbers}')
  if row['metric'] != 'EM':
    differs.append(f'metric: {row["metric"]}, not EM')
  if metric != 'em':
    differs.append('F1: without a rule for yes and no')
  if row['retriever'] and manifest['searched']:
    here = {'corpus': pathlib.Path(manifest['corpus']['name'] or '').stem or MISSING,
            'retriever': manifest['index']['backend'], 'k': str(manifest['k'])}
    differs += [f'{name}: {row[name]}, not {value}' for name, value in here.items()
                if row[name].lower() != value.lower()]
  elif bool(row['retriever']) != manifest['searched']:
    differs.append('searches' if row['retriever'] else 'does not search')
  unchecked = '' if row['checked'] == 'yes' else f'; not checked against the paper, {row["checked"]}'
  setting = f'differs in {"; ".join(differs)}' if differs else 'same setting as far as named'
  return f'{row["source"]}{unchecked}; {setting}'


def _csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
  """Returns a line for each row, with three numbers for each column, shares from 0 to 1."""
  file, safe = io.StringIO(), lambda text: escaped(text, 'csv')
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow(['row', *(safe(name) + end for name in columns for end in ('', '_low', '_high')), 'note'])
  for row in rows:
    numbers = [number for column in columns for number in row.cells.get(column, (None, None, None))]
    shown = ['' if number is None else round(number, 6) for number in numbers]
    writer.writerow([safe(row.name), *shown, safe(row.note)])
  return file.getvalue()


def escaped(text: str, form: str) -> str:
  """Returns a text on one line, without what would be a command, a formula, markup or an escape sequence.

  Names and texts in tables may come from strangers.
  """
  text = ''.join(character if character.isprintable() else ' ' for character in text)
  if form == 'latex':
    return text.translate(_LATEX).replace(' †', r'$^\dagger$')
  if form == 'markdown':
    return re.sub(r'[\\`|]|<(?=[A-Za-z/!?])|(?<=\])\(', r'\\\g<0>', text)
  return f"'{text}" if form == 'csv' and text.lstrip().startswith(tuple('=+-@＝＋－＠')) else text


def layout(rows: Sequence[Sequence[str]], form: str) -> str:
  """Returns a table in 'text', 'markdown' or 'latex', its heading row first."""
  rows = [[escaped(cell, form) for cell in row] for row in rows]
  if form == 'latex':
    heading, *body = [f'{" & ".join(row)} \\\\' for row in rows]
    begin = f'\\begin{{tabular}}{{l{"r" * (len(rows[0]) - 1)}}}'
    return '\n'.join([begin, '\\hline', heading, '\\hline', *body, '\\hline', '\\end{tabular}'])
  if form == 'markdown':
    rows.insert(1, ['---', *['--:'] * (len(rows[0]) - 1)])
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
  return '\n'.join('  '.join(line).rstrip() for line in lines)
