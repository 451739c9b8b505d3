import json

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools import open_search
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.search_remote import SearchServers


def test_opens_bm25_from_passages_or_a_file(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text(json.dumps({'id': '1', 'contents': '"Paris"\nA city.'}))
  for corpus in (path, str(path), [Document('1', 'Paris', 'A city.')]):
    backend = open_search('bm25', corpus=corpus)
    assert isinstance(backend, BM25) and backend.search(['paris'], 3)[0][0].title == 'Paris'


def test_opens_http():
  backend = open_search('http', url='http://127.0.0.1:8000')
  assert isinstance(backend, SearchServers) and [server.url for server in backend._servers] == ['http://127.0.0.1:8000/retrieve']


def test_opens_web(monkeypatch):
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  assert open_search('web', url='').url == 'https://google.serper.dev/search'
  assert open_search('web', url='http://127.0.0.1:9/find').url == 'http://127.0.0.1:9/find'


def test_opens_the_simulator_with_any_writer():
  class Echo:
    def write(self, queries, topk, noisy, seeds, question=None):
      return [[Document('', query, str(noise))] for query, noise in zip(queries, noisy)]

  always = dict(noise_start=1.0, noise_end=1.0)
  assert open_search('simulated', writer=Echo(), **always).search(['x'], 1) == [[Document('', 'x', 'True')]]
  assert open_search('simulated', writer=Echo()).search(['x'], 1) == [[Document('', 'x', 'False')]]
  corpus = [Document('city-1', 'Paris', 'Paris is a city in France.'), Document('city-2', 'Lyon', 'Lyon is a city in France.'),
            Document('city-3', 'Oslo', 'Oslo is a city in Norway.')]
  assert open_search('simulated', corpus=corpus).search(['paris'], 1)[0][0].text == 'Paris is a city in France.'
  assert open_search('simulated', corpus=corpus, **always).search(['paris'], 1)[0][0].text in (
    'Lyon is a city in France.', 'Oslo is a city in Norway.')
  false = open_search('simulated', corpus=corpus, noise_false=True, **always)
  assert false.search(['paris'], 1)[0][0].text == 'Paris is a city in Norway.'


@pytest.mark.parametrize(('kind', 'settings', 'reason'), [
    ('bm25', {}, 'corpus'), ('http', {}, 'url'), ('google', {}, "'google'.*bm25, index, http, web, simulated"),
    ('web', {}, 'SERPER_API_KEY'), ('simulated', {}, "writer 'world' needs a corpus"),
    ('simulated', dict(writer='chat', url='http://a'), "writer 'chat' needs a url and a writer_model"),
    ('simulated', dict(writer='poet'), "unknown writer 'poet'")])
def test_what_is_missing_is_named(monkeypatch, kind, settings, reason):
  monkeypatch.delenv('SERPER_API_KEY', raising=False)
  with pytest.raises(ValueError, match=reason):
    open_search(kind, **settings)
