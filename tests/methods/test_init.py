"""Finding methods, and what all of them keep to."""

import inspect
import pathlib

import pytest

from jaxsearch import methods
from tests.methods.driving import context

SHARED = ('__init__', 'actions', 'credit', 'refiner', 'folding')
NAMES = sorted(path.stem
               for path in pathlib.Path(methods.__file__).parent.glob('*.py') if path.stem not in SHARED)


@pytest.mark.parametrize('name', NAMES)
def test_a_method_keeps_the_contract(name):
  method = methods.find_method(name)
  assert list(inspect.signature(method.grow).parameters)[:2] == ['question', 'tree']
  assert list(inspect.signature(method.credit).parameters)[:2] == ['groups', 'context']
  for function in (method.grow, method.credit):  # the rest are settings: config.grow, config.credit
    settings = list(inspect.signature(function).parameters.values())[2:]
    assert all(setting.kind is setting.KEYWORD_ONLY and setting.default is not setting.empty
               for setting in settings)
  method.credit([], context())  # a step of which no tree is left
