"""Requests that make no sense are refused where they are made."""

import pytest

from jaxsearch.sampler.requests import Generate
from jaxsearch.trees.tree import Tree


@pytest.mark.parametrize('wrong', [
    {'max_tokens': 0}, {'stop': '</search>'}, {'stop': ('',)}, {'temperature': -1.0}, {'temperature': float('nan')},
    {'top_p': 0.0}, {'top_p': 1.5}, {'top_k': -1}])
def test_generate_names_what_is_wrong(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    Generate(Tree(None).root, **wrong)
  Generate(Tree(None).root, stop=('</search>',), max_tokens=1, temperature=0.0, top_p=1.0, top_k=0)
