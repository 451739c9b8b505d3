"""`jaxsearch table`: results of bench side by side, as far as they compare.

A row is a result, a column a benchmark. Results enter one column only if their manifests agree in `SETTINGS`.
An agent that never searched has no corpus, index, k or turns to agree in; turns count within a method only.
Rows of papers come from published.csv; what differs is written below them.
"""

import csv
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsearch.data import benchmarks
from jaxsearch.data.jsonl import shortened
from jaxsearch.evaluation import metrics
from jaxsearch.evaluation.figures import MACRO, MISSING, Figure, averages, look_up
from jaxsearch.evaluation.results import by_question, read_result
from jaxsearch.evaluation.tables import escaped, layout

PUBLISHED = pathlib.Path(__file__).with_name('published.csv')
SETTINGS = ('corpus', 'index', 'k', 'turns', 'questions', 'split', 'metric', 'decoding')
SEARCHING = ('corpus', 'index', 'k', 'turns')  # of agents that search
# Questions of a published row on 'all' of them.
SIZES = {'nq': 3610, 'triviaqa': 11313, 'popqa': 14267, 'hotpotqa': 7405, '2wikimultihopqa': 12576,
         'musique': 2417, 'bamboogle': 125, 'gsm8k': 1319, 'finqa': 1147}
LISTED = {'em': ('',), 'f1': ('_f1',), 'em_f1': ('', '_f1')}  # figure -> endings of columns of published.csv
POOLED = 'all questions'


class Row(NamedTuple):
  name: str
  cells: Mapping[str, tuple[float, ...]]  # column -> a figure, and the ends of its interval if it has one
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
  parts = [of for result in results.values() for of in (result['macro'], *result['benchmarks'].values())]
  if metric not in (known := {name for of in parts for name in of['intervals']}):
    raise ValueError(f'--metric={metric}: no such figure in these results; '
                     f'there are {", ".join(sorted(known))}')
  means = {kind: over for kind, over in averages(columns).items()
           if len(over) > 1 and (kind == MACRO or over != columns)}
  rows = [Row(label, {column: (of[metric], *of['intervals'][metric])
                      for column, of in _figures(result, means).items() if metric in of['intervals']})
          for label, result in results.items()]
  papers = list(_published(published, next(iter(results.values())), columns, means, metric))
  shown, figure = [*columns, *means], look_up(metric)
  if form == 'csv':  # three numbers for each column, shares from 0 to 1
    heading = ['row', *(column + end for column in shown for end in ('', '_low', '_high')), 'note']
    return layout([heading, *(_numbers(row, shown) for row in [*rows, *papers])], form)
  cells = [['', *shown]]
  for row in [*rows, *papers]:
    marked = {column for column, label, *_ in unlike if label == row.name}
    cells.append([row.name + ' *' * bool(row.note),
                  *(figure.shown(*row.cells.get(column, [None])) + ' †' * (column in marked)
                    for column in shown)])
  notes = [f'{metric}, {"%, " * (figure.scale == 100)}with 95 % intervals (bootstrap over questions)']
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
  stems = [pathlib.Path(path).stem for path in paths]
  labels = stems if len(set(stems)) == len(stems) else list(map(str, paths))
  if len(set(labels)) < len(labels):
    raise ValueError('the same result is given twice')
  return labels


def _differing(results: Mapping[str, Mapping], column: str) -> Iterator[tuple[str, str, str]]:
  """Yields (label, setting, sentence) of every result that differs from the first with the setting."""
  firsts = {}  # (setting, of which method) -> label, value and text of the first result
  for label, result in results.items():
    for name, (value, text) in _settings(result, column).items():
      kind = name, result['manifest']['method'] if name == 'turns' else ''
      first, wanted, other = firsts.setdefault(kind, (label, value, text))
      if value != wanted:
        differs = f'{_apart(text, other)}, not {_apart(other, text)}'
        yield label, name, f'{label} differs from {first} in {name} ({differs})'


def _settings(result: Mapping, column: str) -> dict[str, tuple[Any, Any]]:
  """Returns setting -> (what has to agree, how it is shown) of what a column of a result depends on."""
  if column not in result['benchmarks']:
    return {}
  manifest = result['manifest']
  asked, corpus = manifest['questions'][column], manifest['corpus']
  values = {name: (value, value) for name, value in (manifest | {'split': asked['split']}).items()}
  values |= {'corpus': (corpus['sha256'], corpus['name']),
             'questions': ((asked['ids'], asked['golds']), asked['n'])}
  return {name: values[name] for name in SETTINGS if manifest['searched'] or name not in SEARCHING}


def _apart(value: Any, other: Any) -> str:
  if isinstance(value, dict) and isinstance(other, dict):
    fields = [f'{name}={field}' for name, field in value.items() if other.get(name) != field]
    return ' '.join(fields) or 'no such field'
  return 'other ones of that number' if value == other else shortened(value)


def _figures(result: Mapping, means: Mapping[str, Sequence[str]]) -> dict[str, Mapping]:
  """Returns column -> figures of a result; of `means` those that it has over the same benchmarks."""
  of_all, over = result.get('hops', {}) | {MACRO: result['macro']}, averages(result['benchmarks'])
  return result['benchmarks'] | {kind: of_all[kind] for kind, names in means.items()
                                 if kind in of_all and set(over.get(kind, ())) == set(names)}


def _numbers(row: Row, columns: Sequence[str]) -> list:
  cells = [[*row.cells.get(column, ()), None, None, None][:3] for column in columns]
  numbers = [number if number is None else round(number, 6) for cell in cells for number in cell]
  return [row.name, *numbers, row.note]


def _tests(results: Mapping[str, Mapping], columns: Sequence[str], metric: str) -> list[list[str]]:
  """Returns a heading, and for each result but the first a row of differences to it, paired by question."""
  shown = [*columns, *[POOLED] * (len(columns) > 1)]
  values = {label: by_question(result['predictions'], metric) for label, result in results.items()}
  first, *others = values
  tests = ([f'{label} - {first}', *(_test(values[label], values[first], column, look_up(metric))
                                    for column in shown)] for label in others)
  rows = [row for row in tests if set(row[1:]) != {MISSING}]
  return [['', *shown], *rows] if rows else []


def _test(a: Mapping[tuple, float], b: Mapping[tuple, float], column: str, figure: Figure) -> str:
  """Returns the mean of a - b over the common questions of a column, its interval and p."""
  common = sorted(question for question in a.keys() & b.keys() if column in (question[0], POOLED))
  if not common:
    return MISSING
  test = metrics.paired(*(np.array([values[question] for question in common]) for values in (a, b)))
  difference = figure.shown(test['difference'], test['low'], test['high'], sign='+')
  return f'{difference} p' + (f'={test["p"]:.3f}' if test['p'] >= 0.001 else '<0.001')


def read_published() -> list[dict[str, str]]:
  """Returns the rows of published.csv in per cent: NAME is a score by the row's `metric`, NAME_f1 its F1."""
  with open(PUBLISHED, encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _published(wanted: str, result: Mapping, columns: Sequence[str], means: Mapping[str, Sequence[str]],
               metric: str) -> Iterator[Row]:
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
    averaged = {kind: np.mean([scores[column] for column in over]) for kind, over in means.items()
                if scores.keys() >= set(over)}
    if scores:
      cells = {column: (float(score),) for column, score in (scores | averaged).items()}
      yield Row(f'{row["method"]}, {row["model"]}', cells, _note(row, result, scores, metric))


def _note(row: Mapping[str, str], result: Mapping, columns: Collection[str], metric: str = 'em') -> str:
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
