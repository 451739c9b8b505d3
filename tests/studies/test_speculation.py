"""The study of guesses: which chains found every passage, its table, and that it runs."""

import types

import pytest

from configs import r_search as config_of
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import sweep
from jaxsearch.trees.tree import Role, Tree
from studies import common, speculation
from tests.methods.driving import Letters


def test_a_chain_found_all_where_its_searches_together_returned_every_passage():
  question = Question('1', 'Who?', ('Bo',), {'steps': [{'passage_id': '1'}, {'passage_id': '3'}]})
  tree = Tree(Letters(), question)
  node = tree.root.append('one', Role.POLICY)
  node.data['documents'] = [Document('1', 'Ann', 'of Oslo'), Document('2', 'Bergen', '')]
  node = node.append('two', Role.POLICY)
  assert not speculation.found_all(tree)
  node.data['documents'] = [Document('3', 'Ann', '')]
  assert speculation.found_all(tree)


def test_differences_are_paired_by_seed():
  row = lambda guessed: {'found': [1, 1, 0, 0], 'right': [1, 1, guessed, 0]}
  rows = {'R-Search/0': row(0), 'R-Search/1': row(1), 'no box/0': row(1), 'no box/1': row(1)}
  said = speculation.report(rows).splitlines()
  assert '+100.0 [+100.0, +100.0]' in said[2] and '+25.0 [' in said[2] and '+50.0 [' in said[3]
  assert said[4].startswith('| R-Search - no box | 2 | +0.0') and '-25.0 [' in said[4]


@pytest.mark.slow
def test_it_runs(tmp_path, capsys, monkeypatch):
  runs = [types.SimpleNamespace(variant=name, seed=0, out='', config=config_of.get_config())
          for name in (speculation.WITH, speculation.WITHOUT)]
  monkeypatch.setattr(sweep, 'plan', lambda _: runs)
  monkeypatch.setattr(sweep, 'finished', lambda _: True)
  common.main('speculation', speculation.study, speculation.SIZES, ['--size', 'tiny', '--out', str(tmp_path)])
  assert 'EM where it did not' in capsys.readouterr().out
