"""Tables of results that agree, and of those that do not."""

import csv
import io
import itertools
import json
import pathlib

import pytest

from jaxsearch import cli
from jaxsearch.data import benchmarks
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import figures, metrics, table
from jaxsearch.evaluation.figures import record_of
from jaxsearch.trees.tree import Tree
from tests.evaluation.test_figures import record
from tests.methods.driving import Letters

MANIFEST = {
  'corpus': {'name': 'data/wiki-18.jsonl', 'sha256': 'c1'}, 'index': {'backend': 'bm25', 'engine': 'sparse'},
  'k': 3, 'turns': 4, 'metric': 'em', 'method': 'search_r1', 'decoding': {'temperature': 0.0, 'samples': 1},
  'prompt': 'p1', 'searched': True,
  'questions': {name: {'ids': 'i', 'golds': 'g', 'n': 8, 'split': 'test'} for name in ('nq', 'hotpotqa')}}


@pytest.fixture
def write(tmp_path, monkeypatch):
  """write(name, right, manifest): a result in which the first `right` of eight questions are right."""
  monkeypatch.chdir(tmp_path)

  def made(name, right=4, names=('nq', 'hotpotqa'), **manifest):
    records = [record(one, str(i), float(i < right)) for one in names for i in range(8)]
    questions = {one: MANIFEST['questions'].get(one, MANIFEST['questions']['nq']) for one in names}
    made = {'manifest': MANIFEST | {'questions': questions} | manifest, 'predictions': records}
    (tmp_path / name).write_text(json.dumps(figures.scores(records) | made))
    return name

  return made


def of(questions, **changes):
  return {'questions': {name: own | changes for name, own in questions.items()}}


def test_rows_columns_intervals_and_the_average(write):
  first, second, *_ = table.render([write('a.json'), write('b.json', 6, prompt='p2')]).split('\n\n')
  header, a, b = first.splitlines()
  assert header.split() == ['nq', 'hotpotqa', 'average']
  assert a.split()[:2] == ['a', '50.0'] and b.split()[:2] == ['b', '75.0'] and a.count('[') == 3
  heading, row = second.splitlines()
  assert row.startswith('b - a') and heading.split() == ['nq', 'hotpotqa', 'all', 'questions']
  assert row.count('+25.0') == 3 and 'all questions' not in first


@pytest.mark.parametrize(('changes', 'named'), [
  ({'corpus': {'name': 'own.jsonl', 'sha256': 'c2'}}, "corpus ('own.jsonl', not 'data/wiki-18.jsonl')"),
  ({'k': 5}, 'k (5, not 3)'), ({'turns': 2}, 'turns (2, not 4)'),
  ({'index': {'backend': 'bm25', 'engine': 'rank_bm25'}}, 'index (engine=rank_bm25, not engine=sparse)'),
  ({'metric': 'entity'}, "metric ('entity', not 'em')"),
  (of(MANIFEST['questions'], split='dev'), "split ('dev', not 'test')"),
  (of(MANIFEST['questions'], ids='j', n=9), 'questions (9, not 8)'),
  (of(MANIFEST['questions'], golds='h'), 'questions (other ones of that number'),
  ({'decoding': {'temperature': 0.7, 'samples': 1}}, 'decoding (temperature=0.7, not temperature=0.0)')])
def test_unlike_settings_are_refused_and_named(write, capsys, changes, named):
  paths = [write('a.json'), write('b.json', **changes)]
  assert cli.main(['table', *paths]) == 2
  message = capsys.readouterr().err
  assert f'nq: b differs from a in {named}' in message and message.count('\n') == 1
  name = named.split()[0]
  assert cli.main(['table', *paths, f'--allow={name}']) == 0
  shown = capsys.readouterr().out
  a, b = shown.splitlines()[1:3]
  assert f'† nq: b differs from a in {named}' in shown and b.count('] †') == 2 and '†' not in a
  assert cli.main(['table', *paths, f'--allow={"k" if name != "k" else "turns"}']) == 2


def test_who_never_searched_has_no_corpus_and_turns_are_compared_within_a_method(write):
  closed = write('a.json', searched=False, k=1, turns=None, corpus={'name': 'world', 'sha256': 'c9'})
  paths = [closed, write('b.json'), write('d.json', method='ircot', turns=8)]
  assert 'differs' not in table.render(paths)
  with pytest.raises(ValueError, match=r'nq: c differs from b in k \(5, not 3\)'):
    table.render([*paths, write('c.json', k=5)])
  with pytest.raises(ValueError, match=r'nq: c differs from d in turns \(5, not 8\); hotpotqa'):
    table.render([*paths, write('c.json', method='ircot', turns=5)])


def test_an_average_over_other_benchmarks_is_left_out(write):
  rows = table.render([write('a.json'), write('b.json', names=('nq',))]).splitlines()
  assert rows[2].split()[-1] == '–' != rows[1].split()[-1]


def test_tests_are_paired_by_question(write):
  text = table.render([write('a.json', 2), write('b.json', 8)])
  found = metrics.paired([1.0] * 8, [1.0] * 2 + [0.0] * 6)
  low, high = (f'{100 * found[name]:+.1f}' for name in ('low', 'high'))
  assert f'+75.0 [{low}, {high}] p={found["p"]:.3f}' in text and found['p'] == 2 / 2**6


def test_forms(write, tmp_path):
  paths = [write('a.json'), write('b_2.json', 6)]
  markdown = table.render(paths, form='markdown').splitlines()
  assert markdown[:2] == ['|  | nq | hotpotqa | average |', '| --- | --: | --: | --: |']
  assert '| b_2 | 75.0 [' in markdown[3]
  latex = table.render(paths, form='latex')
  assert r'b\_2 & 75.0 [' in latex and latex.count(r'\begin{tabular}{lrrr}') == 2 and '\n% em' in latex
  rows = list(csv.DictReader(io.StringIO(table.render(paths, form='csv', published='CARL'))))
  assert float(rows[1]['nq']) == 0.75 and float(rows[1]['nq_low']) < 0.75 < float(rows[1]['nq_high'])
  assert float(rows[-1]['hotpotqa']) == pytest.approx(0.479) and 'EM or containment' in rows[-1]['note']
  assert cli.main(['table', *paths, '--out', str(tmp_path / 't.txt')]) == 0
  assert (tmp_path / 't.txt').read_text() == table.render(paths)


def test_a_new_figure_is_one_entry(monkeypatch, tmp_path):
  """It is computed, averaged with an interval and shown; nothing else knows its name."""
  figure = figures.Figure('letters', lambda tree: float(len(tree.answer)), 1, '.1f')
  monkeypatch.setitem(figures.FIGURES, 'letters', figure)
  records = []
  for name, answer in (('1', 'abc'), ('2', 'a')):
    tree = Tree(Letters(), Question(name, 'Which?', ('a',)))
    tree.answer, tree.metrics = answer, {'searches': 0}
    records.append(record_of(tree) | {'benchmark': 'nq'})
  path = tmp_path / 'r.json'
  path.write_text(json.dumps(figures.scores(records) | {'manifest': MANIFEST, 'predictions': records}))
  assert 'r  2.0 [1.0, 3.0]' in table.render([str(path)], metric='letters')


def test_published_rows_say_where_their_setting_differs(write):
  text = table.render([write('a.json')], published='r-search')
  assert 'R-Search, qwen2.5-7b-instruct *  ' in text and '38.0' in text and '52.2' in text
  note = next(line for line in text.splitlines() if line.startswith('* R-Search, qwen2.5-7b-instruct'))
  for part in ('questions: 500 of a benchmark, not 8', 'retriever: E5, not bm25', 'k: 5, not 3'):
    assert part in note
  own = MANIFEST | {'index': {'backend': 'e5'}} | of({'nq': MANIFEST['questions']['nq']}, n=table.SIZES['nq'])
  row = next(row for row in table.read_published()
             if (row['method'], row['model']) == ('Search-R2', 'qwen2.5-7b'))
  note = lambda row, **changes: table._note(row, {'manifest': own | changes}, ['nq'])
  assert note(row) == 'arXiv 2602.03647 table 2; same setting as far as named'
  assert note(row, k=5).endswith('differs in k: 3, not 5')
  assert note(row, searched=False).endswith('differs in searches')
  quoted = next(row for row in table.read_published() if row['method'] == 'Search-R1 PPO')
  assert '; not checked against the paper, as transcribed in ' in note(quoted)
  with pytest.raises(ValueError, match='no such method; there are Adaptive-RAG, CARL'):
    table.render(['a.json'], published='none')
  with pytest.raises(ValueError, match='papers are listed with em, f1, em_f1, not searches'):
    table.render(['a.json'], published='all', metric='searches')
  with pytest.raises(ValueError, match='no such figure in these results; there are answer_recall, em'):
    table.render(['a.json'], metric='pass@4')


# Of R-Search's table 2: what its columns 'Avg.' say of several hops, of one, of all; 3B and 7B.
PRINTED = {
  'direct': [13.5, 21.1, 16.8, 18.0, 28.2, 22.4], 'IRCoT': [31.8, 39.0, 34.9, 31.6, 42.2, 36.1],
  'Adaptive-RAG': [35.5, 47.2, 40.5, 31.6, 48.2, 38.8],  # 38.0 in print; 40.5 is what its scores say
  'Search-R1 (retrained)': [48.0, 46.5, 47.3, 52.4, 52.1, 52.3],
  'R-Search': [47.9, 47.2, 47.6, 54.6, 52.1, 53.6]}


def test_averages_of_em_and_f1_by_hops_are_those_of_r_search_s_table_2(write):
  names = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')
  result = json.loads((pathlib.Path(write('a.json', names=names))).read_text())
  text = table.render(['a.json'], form='csv', published='all', metric='em_f1')
  header, own, *rows = csv.reader(io.StringIO(text))
  places = [header.index(name) for name in ('multi-hop', 'single-hop', 'average')]
  found = {tuple(row[0].split(', ')): [100 * float(row[place]) for place in places] for row in rows}
  for name, printed in PRINTED.items():
    for size, expected in ((3, printed[:3]), (7, printed[3:])):
      assert found[name, f'qwen2.5-{size}b-instruct'] == pytest.approx(expected, abs=0.11), (name, size)
  assert float(own[places[0]]) == pytest.approx(result['hops']['multi-hop']['em_f1'])


def test_the_published_rows_are_whole():
  rows = table.read_published()
  scores = [float(row[name]) for row in rows for name in benchmarks.BENCHMARKS if row.get(name)]
  assert len(rows) > 60 and all(0 <= score < 100 for score in scores)
  assert all(row['source'].startswith('arXiv') and row['checked'] and row['metric'] for row in rows)
  assert all(bool(row['corpus']) == bool(row['retriever']) == bool(row['k']) for row in rows)
  for method, average in {'Search-R2': 40.4, 'Search-R1 GRPO': 35.0}.items():  # of its table 2
    row, = (row for row in rows if (row['method'], row['model']) == (method, 'qwen2.5-7b')
            and '2602.03647' in row['source'])
    printed = [float(row[name]) for name in itertools.islice(benchmarks.BENCHMARKS, 7)]
    assert sum(printed) / 7 == pytest.approx(average, abs=0.05)


HOSTILE = '=cmd|\x1b[2J\\input{/etc/passwd}\n![x](e.org)<b>'


@pytest.mark.parametrize(('form', 'shown', 'begins'), [
  ('text', r'=cmd| [2J\input{/etc/passwd} ![x](e.org)<b>', 'ab †=es'),
  ('markdown', r'=cmd\| [2J\\input{/etc/passwd} ![x]\(e.org)\<b>', '|-'),
  ('latex', r'=cmd| [2J\textbackslash{}input\{/etc/passwd\} ![x](e.org)<b>', '\\%ab &'),
  ('csv', r"'=cmd| [2J\input{/etc/passwd} ![x](e.org)<b>", 'rab')])
def test_a_strangers_names_are_text_in_every_form(write, capsys, form, shown, begins):
  write('a.json', 8, names=(HOSTILE,)), write('b.json', 8, names=(HOSTILE,), k=4)
  text = table.render(['a.json', 'b.json'], form=form, allow=['all'])
  assert shown in text and HOSTILE not in text and '\x1b' not in text
  assert {line[0] for line in text.splitlines() if line} <= set(begins)  # no name begins a line of its own
  assert cli.main(['table', 'a.json', 'b.json']) == 2
  message = capsys.readouterr().err
  assert '\x1b' not in message and message.count('\n') == 1
