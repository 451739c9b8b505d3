"""`jaxsearch table`: results of bench side by side, as far as they compare.

A row is a result, a column a benchmark. Results enter one column only if their manifests agree in what scores depend on
(`SETTINGS`). An agent that never searched has no corpus, index, k or turns to agree in, and turns count within a method only.
Prompt, method, policy, tokenizer and limits are the agent's own and may differ. Rows of papers come from published.csv; what
differs is written below them. Results may come from strangers, so their names and texts are `escaped`.
"""

import collections
import csv
import io
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsearch.data import benchmarks
from jaxsearch.data.jsonl import shortened
from jaxsearch.evaluation import metrics
from jaxsearch.evaluation.bench import FIGURES, HOPS, read_result

PUBLISHED = pathlib.Path(__file__).with_name('published.csv')
SETTINGS = ('corpus', 'index', 'k', 'turns', 'questions', 'split', 'metric', 'decoding')
SEARCHING = ('corpus', 'index', 'k', 'turns')  # of agents that search
COUNTS = ('searches', 'model_calls', 'tokens', 'seconds')  # all other figures are shares
SIZES = {'nq': 3610, 'triviaqa': 11313, 'popqa': 14267, 'hotpotqa': 7405, '2wikimultihopqa': 12576, 'musique': 2417,
         'bamboogle': 125, 'gsm8k': 1319, 'finqa': 1147}  # questions of a published row on 'all' of them
_LATEX = str.maketrans({'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
                        **{character: f'\\{character}' for character in '{}$&#_%'}})
LISTED = {'em': ('',), 'f1': ('_f1',), 'em_f1': ('', '_f1')}  # figure -> endings of the columns of published.csv
MACRO, POOLED, MISSING = 'average', 'all questions', '–'


class Unlike(ValueError):
  """Results that must not stand in one column."""


def render(paths: Sequence[str], *, metric: str = 'em', form: str = 'text', published: str = '',
           allow: Sequence[str] = ()) -> str:
  """The table of results of bench.

  Args:
    metric: one of the figures of bench, such as em, f1, searches or pass@4.
    form: 'text', 'markdown', 'latex' or 'csv'.
    published: methods of published.csv with commas, or 'all'; '' shows none.
    allow: settings that may differ within a column, or 'all'.
  Raises:
    Unlike: settings differ that are not allowed to; names them.
    ValueError: no such setting, figure or published method. DataError, OSError: a file that bench did not write.
  """
  if unknown := set(allow) - {*SETTINGS, 'all'}:
    raise ValueError(f'--allow={",".join(sorted(unknown))}: settings are {", ".join(SETTINGS)}')
  results = dict(zip(_labels(paths), map(read_result, paths)))
  known = [name for name in benchmarks.BENCHMARKS if any(name in result['benchmarks'] for result in results.values())]
  columns = list(dict.fromkeys([*known, *(name for result in results.values() for name in result['benchmarks'])]))
  differing = {column: _differing(results, column) for column in columns}
  _refuse(differing, allow)
  if metric not in (known := {name for result in results.values() for name in result['macro']['intervals']}):
    raise ValueError(f'--metric={metric}: no such figure in these results; there are {", ".join(sorted(known))}')
  averages = _averages(columns)
  shown = [*columns, *averages]
  if form == 'csv':
    return _csv(results, columns, averages, metric, published)
  marks = {(label, column): ' †' for column, unlike in differing.items() for label, _ in unlike}
  rows = [['', *shown]] + [[label, *(_cell(_figures(result, column, averages), metric) + marks.get((label, column), '')
                                     for column in shown)] for label, result in results.items()]
  notes = [f'{metric}, {"%, " * (metric not in COUNTS)}with 95 % intervals (bootstrap over questions)']
  notes += [f'† {label} differs from {first} on {column} in {", ".join(named.values())}'
            for column, unlike in differing.items() for (label, first), named in unlike.items()]
  for row, note in _published(published, next(iter(results.values())), columns, metric):
    rows.append([f'{row["method"]}, {row["model"]} *', *(row.get(column) or MISSING for column in columns),
                 *(_average(row, own) for own in averages.values())])
    notes.append(f'* {row["method"]}, {row["model"]}: {note}')
  tables = [_table(rows, form)]
  if tests := _tests(results, columns, metric):
    tables.append(_table([['', *columns, *[POOLED] * (len(columns) > 1)], *tests], form))
    notes.append(f'second table: {metric} minus that of {next(iter(results))}, paired by question; p of a sign-flip permutation '
                 'test, not corrected for their number')
  comment = {'latex': '% ', 'markdown': '- ', 'text': ''}[form]
  return '\n\n'.join([*tables, '\n'.join(comment + escaped(note, form) for note in notes)]) + '\n'


def escaped(text: str, form: str) -> str:
  """A text on one line, without what would be a command, a formula, markup or an escape sequence in a form of `render`."""
  text = ''.join(character if character.isprintable() else ' ' for character in text)
  if form == 'latex':
    return text.translate(_LATEX).replace(' †', r'$^\dagger$')
  if form == 'markdown':
    return re.sub(r'[\\`|]|<(?=[A-Za-z/!?])|(?<=\])\(', r'\\\g<0>', text)
  return f"'{text}" if form == 'csv' and text.lstrip().startswith(tuple('=+-@＝＋－＠')) else text


def _refuse(differing: Mapping[str, Mapping], allow: Sequence[str]) -> None:
  """Raises Unlike for what `_differing` found in a column and is not allowed."""
  refused = []
  for column, unlike in differing.items():
    for (label, first), named in unlike.items():
      if own := [text for name, text in named.items() if not {name, 'all'} & set(allow)]:
        refused.append(f'{column}: {label} differs from {first} in {", ".join(own)}')
  if refused:
    raise Unlike(f'{"; ".join(refused)}. Settings named by --allow may differ')


def _labels(paths: Sequence[str]) -> list[str]:
  """Names of the files, without ending where that tells them apart."""
  stems = [pathlib.Path(path).stem for path in paths]
  labels = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
  if len(set(labels)) < len(labels):
    raise ValueError('the same result is given twice')
  return labels


def _settings(result: Mapping, column: str) -> dict[str, Any]:
  """Setting -> (what has to agree, how it is shown)."""
  manifest = result['manifest']
  of, searched = manifest['questions'][column], manifest['searched']
  found = {'corpus': (manifest['corpus']['sha256'], manifest['corpus']['name']), 'questions': ([of['ids'], of['golds']], of['n'])}
  found |= {name: (value, value) for name, value in (('split', of['split']), *((name, manifest[name]) for name in (
    'index', 'k', 'turns', 'metric', 'decoding')))}
  return {name: found[name] for name in SETTINGS if searched or name not in SEARCHING}


def _differing(results: Mapping[str, Mapping], column: str) -> dict[tuple[str, str], dict[str, str]]:
  """(label, the first that has the setting) -> setting -> how the two differ on a benchmark."""
  own = {label: _settings(result, column) for label, result in results.items() if column in result['benchmarks']}
  unlike, methods = {}, {label: result['manifest']['method'] for label, result in results.items()}
  for name in SETTINGS:
    having = {label: settings[name] for label, settings in own.items() if name in settings}
    for label, (value, shown) in having.items():
      # How many turns there may be is a setting of a method; what another method calls a turn is its own affair.
      first = next(one for one in having if name != 'turns' or methods[one] == methods[label])
      wanted, other = having[first]
      if value != wanted:
        unlike.setdefault((label, first), {})[name] = f'{name} ({_parted(shown, other)}, not {_parted(other, shown)})'
  return unlike


def _parted(value: Any, other: Any) -> str:
  """A value for a message; of groups what the other has not."""
  if isinstance(value, dict) and isinstance(other, dict):
    return ' '.join(f'{name}={own}' for name, own in value.items() if other.get(name) != own) or 'no such field'
  return 'other ones of that number' if value == other else shortened(value)


def _averages(columns: Sequence[str]) -> dict[str, Sequence[str]]:
  """Name -> the benchmarks it is over: of those with one hop, with several, of all, as far as they are several and differ."""
  hops = {kind: [column for column in columns if column in names] for kind, names in HOPS.items()}
  return {kind: own for kind, own in (hops | {MACRO: columns}).items() if len(own) > 1 and (kind == MACRO or own != columns)}


def _figures(result: Mapping, column: str, averages: Mapping[str, Sequence[str]]) -> Mapping | None:
  if column not in averages:
    return result['benchmarks'].get(column)
  own = [name for name in result['benchmarks'] if column == MACRO or name in HOPS[column]]
  if set(own) != set(averages[column]):  # an average over other benchmarks is no entry of this column
    return None
  return result['macro'] if column == MACRO else result.get('hops', {}).get(column)


def _cell(figures: Mapping | None, metric: str) -> str:
  if figures is None or metric not in figures['intervals']:
    return MISSING
  low, high = figures['intervals'][metric]
  return f'{_shown(figures[metric], metric)} [{_shown(low, metric)}, {_shown(high, metric)}]'


def _shown(value: float, metric: str, sign: str = '') -> str:
  return f'{value:{sign}.2f}' if metric in COUNTS else f'{100 * value:{sign}.1f}'


def _tests(results: Mapping[str, Mapping], columns: Sequence[str], metric: str) -> list[list[str]]:
  """A row for each result but the first: the difference to the first, question by question; with several columns also over the
  questions of all of them."""
  values, (first, *others) = collections.defaultdict(lambda: collections.defaultdict(list)), results
  for label, result in results.items() if metric in FIGURES else ():
    for record in result['predictions']:
      for column in (record['benchmark'], POOLED) if FIGURES[metric] in record else ():
        values[label, column][record['benchmark'], record['id']].append(record[FIGURES[metric]])
  shown = [*columns, *[POOLED] * (len(columns) > 1)]
  rows = [[f'{label} - {first}', *(_test(values[label, column], values[first, column], metric) for column in shown)]
          for label in others]
  return [row for row in rows if set(row[1:]) != {MISSING}]


def _test(a: Mapping[tuple, list], b: Mapping[tuple, list], metric: str) -> str:
  """The mean of a - b over their common questions, its interval and p; both are (benchmark, id) -> values of the samples."""
  common = sorted(a.keys() & b.keys())
  if not common:
    return MISSING
  test = metrics.paired(*(np.array([np.mean(own[name]) for name in common]) for own in (a, b)))
  difference, low, high = (_shown(test[name], metric, '+') for name in ('difference', 'low', 'high'))
  return f'{difference} [{low}, {high}] ' + (f'p={test["p"]:.3f}' if test['p'] >= 0.001 else 'p<0.001')


def read_published() -> list[dict[str, str]]:
  """The rows of published.csv: scores in per cent, under NAME by `metric`, under NAME_f1 F1; `checked` says against what ('yes':
  the paper itself)."""
  with open(PUBLISHED, encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))


def _published(wanted: str, result: Mapping, columns: Sequence[str], metric: str) -> list[tuple[dict, str]]:
  """(row, what is to be known about it) of the published rows with a score in these columns."""
  if not wanted:
    return []
  if metric not in LISTED:
    raise ValueError(f'--published: papers are listed with {", ".join(LISTED)}, not {metric}')
  rows, names = read_published(), wanted.lower().split(',')
  own = [row for row in rows if wanted == 'all' or any(row['method'].lower().startswith(name) for name in names)]
  if not own:
    raise ValueError(f'--published={wanted}: no such method; there are {", ".join(sorted({row["method"] for row in rows}))}')
  own = [row | {column: _score(row, column, metric) for column in columns} for row in own]
  return [(row, _note(row, result, columns, metric)) for row in own if any(row[column] for column in columns)]


def _score(row: Mapping[str, str], column: str, metric: str) -> str:
  """A published score in per cent, '' where the paper has none; `em_f1` is the mean of two."""
  scores = [row.get(column + ending) for ending in LISTED[metric]]
  return '' if not all(scores) else scores[0] if len(scores) == 1 else f'{sum(map(float, scores)) / len(scores):.2f}'


def _note(row: Mapping[str, str], result: Mapping, columns: Sequence[str], metric: str = 'em') -> str:
  """Source of a published row, and where its setting differs from that of a result."""
  manifest = result['manifest']
  questions = manifest['questions']
  asked = {column: questions[column]['n'] for column in columns if row.get(column) and column in questions}
  differs = []
  if row['questions'] != 'all' or any(asked[column] != SIZES[column] for column in asked):
    differs.append(f'questions: {row["questions"]} of a benchmark, not {", ".join(map(str, dict.fromkeys(asked.values())))}')
  if row['metric'] != 'EM':
    differs.append(f'metric: {row["metric"]}, not EM')
  if metric != 'em':
    differs.append('F1: without a rule for yes and no')
  if row['retriever'] and manifest['searched']:
    here = {'corpus': pathlib.Path(manifest['corpus']['name'] or '').stem or MISSING,
            'retriever': manifest['index']['backend'], 'k': str(manifest['k'])}
    differs += [f'{name}: {row[name]}, not {value}' for name, value in here.items() if row[name].lower() != value.lower()]
  elif bool(row['retriever']) != manifest['searched']:
    differs.append('searches' if row['retriever'] else 'does not search')
  unchecked = '' if row['checked'] == 'yes' else f'; not checked against the paper, {row["checked"]}'
  return f'{row["source"]}{unchecked}; {"differs in " * bool(differs)}{"; ".join(differs) or "same setting as far as named"}'


def _average(row: Mapping[str, str], columns: Sequence[str]) -> str:
  scores = [float(row[column]) for column in columns if row.get(column)]
  return f'{sum(scores) / len(scores):.1f}' if len(scores) == len(columns) else MISSING


def _table(rows: Sequence[Sequence[str]], form: str) -> str:
  rows = [[escaped(cell, form) for cell in row] for row in rows]
  if form == 'latex':
    body = [f'{" & ".join(row)} \\\\' for row in rows]
    return '\n'.join([f'\\begin{{tabular}}{{l{"r" * (len(rows[0]) - 1)}}}', '\\hline', body[0], '\\hline', *body[1:], '\\hline',
                      '\\end{tabular}'])
  if form == 'markdown':
    return '\n'.join(f'| {" | ".join(row)} |' for row in [rows[0], ['---', *['--:'] * (len(rows[0]) - 1)], *rows[1:]])
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join('  '.join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(
    zip(row, widths))).rstrip() for row in rows)


def _csv(results: Mapping[str, Mapping], columns: Sequence[str], averages: Mapping[str, Sequence[str]], metric: str,
         published: str) -> str:
  """A line for each result, with three numbers for each column, shares from 0 to 1; then the published rows with one."""
  file = io.StringIO()
  writer = csv.writer(file, lineterminator='\n')
  names = [escaped(name, form='csv') for name in (*columns, *averages)]
  writer.writerow(['row', *itertools.chain.from_iterable((name, f'{name}_low', f'{name}_high') for name in names), 'note'])
  for label, result in results.items():
    cells = [_figures(result, column, averages) for column in (*columns, *averages)]
    writer.writerow([escaped(label, 'csv'), *itertools.chain.from_iterable(
      (of[metric], *of['intervals'][metric]) if of and metric in of else ('', '', '') for of in cells), ''])
  for row, note in _published(published, next(iter(results.values())), columns, metric):
    scores = [*(row.get(column) or '' for column in columns), *(_average(row, own) for own in averages.values())]
    writer.writerow([f'{row["method"]}, {row["model"]}', *itertools.chain.from_iterable(
      ('' if score in ('', MISSING) else f'{float(score) / 100:.3f}', '', '') for score in scores), escaped(note, 'csv')])
  return file.getvalue()
