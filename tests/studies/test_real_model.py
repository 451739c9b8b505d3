"""The page of the real model: its tables from results of bench."""

import json

import numpy as np
import pytest

from jaxsearch.evaluation import results
from studies import common, real_model

NAMES = [(benchmark, str(number)) for benchmark in ('hotpotqa', 'nq') for number in range(20)]


def test_gains_are_paired_by_question_and_pooled_over_seeds(tmp_path, monkeypatch, capsys):
  rng, right = np.random.default_rng(0), {}

  def read_result(path):
    right[path.stem] = rng.integers(0, 2, len(NAMES))
    return {'predictions': [
      {'benchmark': benchmark, 'id': name, 'question': name, 'em': float(em), 'f1': 0.5, 'em_substring': 1.0}
      | ({'em_open': float(em)} if int(name) % 2 else {})
      for (benchmark, name), em in zip(NAMES, right[path.stem])]}

  for name in ('cold_policy', 'rl_1', 'rl_2', 'cusearch_0', 'cusearch_1', 'cusearch_2'):
    (tmp_path / f'{name}.json').write_text(json.dumps({}))
  monkeypatch.setattr(results, 'read_result', read_result)
  run = lambda: common.main('real_model', real_model.study, {'full': {}}, ['--out', str(tmp_path)],
                            folder=str(tmp_path)) or capsys.readouterr().out
  said = run()
  both = lambda name: (right[f'{name}_1'] + right[f'{name}_2']) / 2  # the seeds that both have
  gains = {'cold start': both('rl') - right['cold_policy'],
           'reinforcement learning': both('cusearch') - both('rl')}
  for keep in (lambda source, number: source == 'hotpotqa' and number % 2, lambda source, number: number % 2,
               lambda source, number: source == 'hotpotqa', lambda source, number: True):
    chosen = [bool(keep(source, int(name))) for source, name in NAMES]
    for other, gained in gains.items():
      assert any(line.startswith(f'| {other} |') and f' {100 * gained[chosen].mean():+.1f} [' in line
                 for line in said.splitlines())
  assert '20 questions, 10 of them open' in said and '40 questions, 20 of them open' in said
  monkeypatch.setattr(results, 'read_result', lambda _: pytest.fail('read again'))
  assert run() == said.replace(said[:said.index('hotpotqa')], '')
