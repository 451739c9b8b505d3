import json

import pytest

from jaxsearch.data.corpus import Passage
from jaxsearch.tools import open_search
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.http import HttpSearch


def test_opens_bm25_from_passages_or_a_file(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text(json.dumps({'id': '1', 'contents': '"Paris"\nA city.'}))
  for corpus in (path, str(path), [Passage('1', 'Paris', 'A city.')]):
    backend = open_search('bm25', corpus=corpus)
    assert isinstance(backend, BM25) and backend.search(['paris'], 3)[0][0].title == 'Paris'


def test_opens_http():
  backend = open_search('http', url='http://127.0.0.1:8000')
  assert isinstance(backend, HttpSearch) and backend.url == 'http://127.0.0.1:8000/retrieve'


@pytest.mark.parametrize(('kind', 'reason'), [
    ('bm25', 'corpus'), ('http', 'url'), ('google', "'google'.*bm25, http")])
def test_what_is_missing_is_named(kind, reason):
  with pytest.raises(ValueError, match=reason):
    open_search(kind)
