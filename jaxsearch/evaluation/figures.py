"""Figures of answers: one table says how each is computed and how people see it.

A new metric is an entry of `FIGURES`: `eval`, evaluations during training and `bench` compute it, reports,
sweeps and tables show it. Figures come from records, the JSON that is kept of each answer, and are means over
questions: one that was answered n times counts as one, with the mean of its n values.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.evaluation import metrics
from jaxsearch.rewards.match import entity_match, f1, normalize_answer, substring_match, vote
from jaxsearch.trees.tree import Role, Tree, spans

FOLDS = ('folds', 'tokens_saved', 'answers_lost')  # of trees whose context is folded, see methods/folding.py
OF_SOURCE = 'em_of_'  # begins the names of EM of single data sets
MACRO, MISSING = 'average', '–'

Record = Mapping[str, Any]  # of an answer, see `record_of`


class Figure(NamedTuple):
  """A figure: how it is computed, and how people see its mean."""
  heading: str  # of a column
  of: Callable[[Tree], float] | None = None  # computes it; None where the rollout or competence.py does
  scale: float = 100  # of what is shown: shares are shown in %
  digits: str = '.1f'
  main: bool = False  # reports and sweeps show it, where they have it

  def shown(self, value: float | None, low: float | None = None, high: float | None = None, *,
            sign: str = '') -> str:
    """Returns a value as people see it, with its interval where it has one."""
    if value is None:
      return MISSING
    text = f'{self.scale * value:{sign}{self.digits}}'
    return text if low is None else f'{text} [{self.shown(low, sign=sign)}, {self.shown(high, sign=sign)}]'


def _em(tree: Tree) -> float:
  return tree.question.score(tree.answer)


def _f1(tree: Tree) -> float:
  return f1(tree.answer, tree.question.golden_answers)


def _number(heading: str, digits: str = '.2f') -> Figure:
  return Figure(heading, None, 1, digits)


FIGURES = {
  'em': Figure('EM', _em, main=True),
  'f1': Figure('F1', _f1, main=True),
  'em_f1': Figure('mean of EM and F1', lambda tree: (_em(tree) + _f1(tree)) / 2),  # R-Search's averages
  'em_entity': Figure('EM, entities',  # CARL's looser rule
                      lambda tree: max(_em(tree), entity_match(tree.answer, tree.question.golden_answers))),
  'em_substring': Figure('contains a gold answer',
                         lambda tree: substring_match(tree.answer, tree.question.golden_answers)),
  'answer_recall': Figure('gold answer retrieved'),
  'searches': Figure('searches', lambda tree: tree.metrics['searches'], 1, '.2f', main=True),
  **{name: _number(name.replace('_', ' ')) for name in FOLDS},
  'model_calls': _number('model calls'), 'tokens': _number('tokens generated'), 'seconds': _number('seconds'),
}
# EM by what an answer is, see `kind_of`: a coin answers half of the last two right.
OF_KINDS = {'em_open': Figure('EM, open'), 'em_choice': Figure('EM, choices'),
            'em_yes_no': Figure('EM, yes or no')}
# Of BrowseComp-Plus, see browsecomp_plus.py.
OF_EVIDENCE = {'evidence_recall': Figure('evidence retrieved'), 'judged': Figure('right by the judge')}
# Of many answers, where `config.eval.tiers` or a critic gives them: see competence.py.
OF_TIERS = {
  'em_tier_1': Figure('EM tier 1'), 'em_tier_2': Figure('EM tier 2'),
  'tool_rate_tier_1': Figure('tool use tier 1'), 'tool_rate_tier_2': Figure('tool use tier 2'),
  'confident_wrong': Figure('confident and wrong'), 'tokens_per_answer': _number('tokens an answer', '.0f'),
  'auc': _number('AUC'), 'ece': _number('ECE'), 'explained_variance': _number('explained variance'),
}
# Of training with Search-R2: its drafts, and the terms of what revising them gains.
OF_REFINEMENT = {
  'em_draft_per_tree': Figure('EM of drafts'), 'em_kept_per_tree': Figure('EM of kept traces'),
  'a_prec': _number('A_prec', '.3f'), 'v_inter': _number('V_inter', '.3f'),
  's_trim': _number('S_trim', '.3f'), 'g_bar': _number('Ḡ', '.3f'),
  'gain_predicted': _number('gain, predicted', '.3f'),
  'gain_measured': _number('gain, measured', '.3f'),
}
MAIN = {name: figure for name, figure in FIGURES.items() if figure.main} | OF_TIERS
# Averages that `bench` and tables have beside that of all benchmarks.
HOPS = {'single-hop': ('nq', 'triviaqa', 'popqa'),
        'multi-hop': ('hotpotqa', '2wikimultihopqa', 'musique', 'bamboogle')}


def kind_of(question: Question) -> str:
  """Returns 'yes_no' where that is the answer, 'choice' where the question names it, else 'open'."""
  golds, asked = map(normalize_answer, question.golden_answers), f' {normalize_answer(question.question)} '
  kinds = {'yes_no' if gold in ('yes', 'no') else 'choice' if f' {gold} ' in asked else 'open'
           for gold in golds}
  return min(kinds, key=('yes_no', 'choice', 'open').index)


def record_of(tree: Tree) -> dict[str, Any]:
  """Returns a finished tree as JSON can hold it: what was asked and answered, how, and its `FIGURES`."""
  asked = tree.question
  record = {'id': asked.id, 'source': asked.metadata.get('source', ''), 'question': asked.question,
            'golden_answers': list(asked.golden_answers), 'prediction': tree.answer, 'stop': tree.stop,
            'tokens': tree.count(Role.POLICY), 'spans': spans(tree)}
  record |= {name: figure.of(tree) for name, figure in FIGURES.items() if figure.of}
  record[f'em_{kind_of(asked)}'] = record['em']
  if 'match' in asked.metadata:
    record['vote'] = vote(tree.answer, asked.metadata['match'])
  record |= {name: tree.metrics[name] for name in FOLDS if name in tree.metrics}
  record |= {} if tree.reward is None else {'reward': float(tree.reward)}
  return record | ({'hops': asked.metadata['hops']} if 'hops' in asked.metadata else {})


def policy_spans(record: Record) -> list[dict]:
  """Returns the spans that the policy wrote, in order; of CARL its segments."""
  return [span for span in record['spans'] if span['role'] == Role.POLICY.value]


def sources_in(rows: Iterable[Mapping]) -> list[str]:
  """Returns the names of the EM of single data sets in rows of figures."""
  return sorted({name for row in rows for name in row if name.startswith(OF_SOURCE)})


def column(rows: Sequence[Mapping], name: str) -> np.ndarray:
  """Returns [rows] floats, NaN where a row has no such value."""
  return np.array([row.get(name) for row in rows], float)


def look_up(name: str) -> Figure:
  """Returns the figure of a name: that of EM for EM of a data set, shares for pass@k and the like."""
  if name.startswith(OF_SOURCE):
    return FIGURES['em']._replace(heading=f'EM {name.removeprefix(OF_SOURCE)}')
  return (FIGURES | OF_KINDS | OF_EVIDENCE | OF_TIERS | OF_REFINEMENT).get(name, Figure(name))


def means(records: Sequence[Record]) -> dict[str, float]:
  """Returns the mean of every figure over records of different questions, and their number n."""
  known = [name for name in FIGURES if records and name in records[0]]
  return {name: float(np.mean([record[name] for record in records])) for name in known} | {'n': len(records)}


def averages(benchmarks: Iterable[str]) -> dict[str, list[str]]:
  """Returns what is averaged: the benchmarks of each kind of `HOPS`, if there are any, and all of them."""
  names = list(benchmarks)
  hops = {kind: [name for name in names if name in listed] for kind, listed in HOPS.items()}
  return {kind: over for kind, over in hops.items() if over} | {MACRO: names}


def scores(records: Sequence[Record], in_corpus: set[str] | None = None,
           closed_book: Mapping[tuple[str, str, str], float] | None = None) -> dict[str, Any]:
  """Returns {'benchmarks': {name: figures}, 'macro': figures, 'hops': {kind of `HOPS`: figures}} of records.

  Records also have a `benchmark` and a `sample`, the number of the answer to the question. Figures are those
  of `FIGURES`, `n` questions, `ci95` (the interval of em) and `intervals` of all; with several samples
  pass@k, pass^k and maj@k for k = 1, 2, 4, … . A figure that no question has is left out.

  Args:
    in_corpus: golds that the corpus holds. Adds share_in_corpus, and em_in_corpus over those questions.
    closed_book: (benchmark, id, question) -> whether it is answered right without a search (0 to 1, right
      from one half). Adds needless_searches (of the questions so answered, the share that searched),
      missing_searches (of the others, the share that did not) and em_closed_book.
  """
  samples, rows = collections.defaultdict(list), collections.defaultdict(list)
  for record in records:
    samples[record['benchmark'], record['id']].append(record)
  for (benchmark, _), answers in samples.items():
    rows[benchmark].append(_of_question(answers, in_corpus, closed_book))
  every = (name for questions in rows.values() for row in questions for name in row)
  names = np.array(list(dict.fromkeys(every)))
  means, draws = {}, {}
  for seed, (benchmark, questions) in enumerate(rows.items()):
    values = np.array([column(questions, name) for name in names]).T
    means[benchmark], draws[benchmark] = metrics.mean(values), metrics.resampled(values, seed=seed)

  def average(benchmarks: Sequence[str]) -> dict[str, Any]:
    """Averages over benchmarks; leaves out what one of them has not."""
    mean, drawn = (np.mean([of[name] for name in benchmarks], axis=0) for of in (means, draws))
    known = ~np.isnan(mean)
    ends = np.stack(metrics.interval(drawn[:, known]), axis=-1)  # [figures, 2]
    intervals = dict(zip(names[known].tolist(), ends.tolist()))
    number = sum(len(rows[name]) for name in benchmarks)
    return dict(zip(intervals, mean[known].tolist())) | {
      'n': number, 'ci95': intervals['em'], 'intervals': intervals}

  hops = {kind: average(over) | {'benchmarks': len(over)} for kind, over in averages(rows).items()}
  return {'benchmarks': {name: average([name]) for name in rows}, 'macro': hops.pop(MACRO), 'hops': hops}


def _of_question(samples: Sequence[Record], in_corpus: set[str] | None, closed_book: Mapping | None) -> dict:
  first, n, right = samples[0], len(samples), [record['em'] for record in samples]
  row = {name: float(np.mean([record[name] for record in samples]))
         for name in FIGURES | OF_KINDS | OF_EVIDENCE if name in first}
  votes = [record.get('vote', record['prediction']) for record in samples]
  for k in (2 ** power for power in range(n.bit_length())) if n > 1 else ():
    row[f'pass@{k}'] = metrics.pass_at_k(n, int(sum(right)), k)
    row[f'pass^{k}'] = metrics.pass_all_k(n, int(sum(right)), k)
    row[f'maj@{k}'] = metrics.maj_at_k(votes, right, k)
  if in_corpus is not None:
    row['share_in_corpus'] = float(any(gold in in_corpus for gold in first['golden_answers']))
    row |= {'em_in_corpus': row['em']} if row['share_in_corpus'] else {}
  known = (closed_book or {}).get(tuple(first[name] for name in ('benchmark', 'id', 'question')))
  if known is not None:
    searched = float(np.mean([record['searches'] > 0 for record in samples]))
    row['em_closed_book'] = known
    row |= {'needless_searches': searched} if known >= 0.5 else {'missing_searches': 1.0 - searched}
  return row
