"""What benchmarks/branching.py times: a step with reviews by the policy and questions to the judge, beside one without either."""

import importlib.util
import pathlib

from jaxsearch.training import loop

_SPEC = importlib.util.spec_from_file_location('benchmarks_branching',
                                               pathlib.Path(__file__).parents[1] / 'benchmarks' / 'branching.py')
branching = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(branching)


def test_reviews_and_the_judge_are_in_the_measured_step(monkeypatch, tmp_path):
  monkeypatch.setattr(loop, 'make_learner', lambda config: config)
  one, two = (branching.learner_of(name, 1.5, str(tmp_path)) for name in ('search_r1', 'search_r2'))
  assert (two.grow.refiner, two.grow.threshold, two.grow.max_revisions, two.grow.process) == ('policy', 1.5, 1, True)
  assert (one.grow.max_revisions, one.grow.process) == (0, False)
  one.grow.update(max_revisions=1, process=True)
  assert one.to_dict() == two.to_dict()  # nothing else differs
