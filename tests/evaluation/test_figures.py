"""Figures against what the records say."""

import pytest

from jaxsearch.data.questions import Question
from jaxsearch.evaluation import figures
from jaxsearch.trees.tree import Tree
from tests.methods.driving import Letters


def record(benchmark, name, em, searches=1, sample=0, golds=('a',)):
  return {'benchmark': benchmark, 'id': name, 'question': f'{name}?', 'sample': sample, 'em': em, 'f1': em, 'em_f1': em,
          'em_substring': em, 'answer_recall': 0, 'searches': searches, 'model_calls': 1, 'tokens': 5,
          'prediction': 'a' if em else 'b', 'golden_answers': list(golds)}


def test_means_are_over_questions_then_over_benchmarks():
  records = [record('nq', '1', 1.0), record('nq', '1', 0.0, sample=1), record('nq', '2', 1.0),
             record('nq', '2', 1.0, sample=1), *(record('popqa', str(i), 0.0) for i in range(20))]
  scores = figures.scores(records)
  nq, macro = scores['benchmarks']['nq'], scores['macro']
  assert (nq['em'], nq['n'], macro['em'], nq['pass@2']) == (0.75, 2, 0.375, 1.0) and 'seconds' not in macro
  assert (nq['pass^2'], nq['maj@2']) == (0.5, 0.75)
  assert (nq['ci95'], macro['ci95']) == ([0.5, 1.0], [0.25, 0.5])
  assert scores['hops'] == {'single-hop': macro}
  scores = figures.scores([*records, record('musique', '1', 1.0), record('gsm8k', '1', 0.0)])
  assert {kind: (of['em'], of['n'], of['benchmarks']) for kind, of in scores['hops'].items()} == {
    'single-hop': (0.375, 22, 2), 'multi-hop': (1.0, 1, 1)}
  assert scores['macro']['em'] == (0.75 + 0 + 1 + 0) / 4


def test_answers_that_are_one_number_have_one_vote():
  records = []
  for sample, answer in enumerate(('72', '$72.00', '5', '6')):
    tree = Tree(Letters(), Question('1', 'Sum?', ('72',), {'match': 'numeric'}))
    tree.answer, tree.metrics = answer, {'searches': 0}
    records.append(figures.record_of(tree) | {'benchmark': 'gsm8k', 'sample': sample})
  assert figures.scores(records)['benchmarks']['gsm8k']['maj@4'] == 1.0


def test_needless_and_missing_searches():
  searches = {'1': (1.0, 2), '2': (1.0, 0), '3': (0.0, 0), '4': (1.0, 1), '5': (1.0, 1), '6': (1.0, 0)}
  records = [record('nq', name, em, searches=number) for name, (em, number) in searches.items()]
  known = {('nq', name, f'{name}?'): float(name in '12') for name in '12345'}
  nq = figures.scores(records, closed_book=known)['benchmarks']['nq']
  assert nq['needless_searches'] == 1 / 2 and nq['missing_searches'] == pytest.approx(1 / 3)
  assert nq['em_closed_book'] == 2 / 5


def test_answers_in_the_corpus_are_counted_apart():
  records = [record('nq', '1', 1.0, golds=('x', 'y')), record('nq', '2', 0.0, golds=('y',)),
             record('nq', '3', 0.0)]
  nq = figures.scores(records, in_corpus={'y'})['benchmarks']['nq']
  assert nq['share_in_corpus'] == pytest.approx(2 / 3) and nq['em_in_corpus'] == 1 / 2


def test_answers_are_yes_or_no_one_of_those_that_the_question_names_or_open():
  kinds = {('Is Oviedo in Spain?', 'Yes'): 'yes_no', ('Who is older, Ann or the Bo?', 'Bo'): 'choice',
           ('Who is older, Ann or Bo?', 'Bob'): 'open', ('Is it Bo?', 'Bo', 'no'): 'yes_no',
           ('Who?', ''): 'open'}
  assert {asked: figures.kind_of(Question('1', asked[0], asked[1:])) for asked in kinds} == kinds


def test_scores_by_kind_are_over_the_questions_of_the_kind():
  of = lambda name, em, kind: record('nq', name, em) | {f'em_{kind}': em}
  nq = figures.scores([of('1', 1.0, 'open'), of('2', 0.0, 'open'), of('3', 1.0, 'yes_no')])['benchmarks']['nq']
  assert (nq['em_open'], nq['em_yes_no'], nq['em']) == (1 / 2, 1, pytest.approx(2 / 3))
  assert 'em_choice' not in nq and figures.look_up('em_open').heading == 'EM, open'
