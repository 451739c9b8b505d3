"""The client of several servers: failover, and results kept on disk."""

import json
import time

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools import search_http
from jaxsearch.tools.http_server import search_app
from jaxsearch.tools.search_http import SearchError, SearchServers
from tests.tools.running import serve
from tests.tools.serving import server

FAST = dict(backoff=0.01, timeout=5.0)


def hits(*queries):
  hit = lambda query: {'document': {'id': query, 'contents': f'"{query}"\nabout {query}'}, 'score': 1.0}
  return {'result': [[hit(query)] * 3 for query in queries]}


def respond(handler):
  """Each query finds a document of its own name."""
  body = json.dumps(hits(*json.loads(handler.body)['queries'])).encode()
  handler.send_response(200)
  handler.send_header('content-length', str(len(body)))
  handler.end_headers()
  handler.wfile.write(body)


def ids(found):
  return [[one.id for one in documents] for documents in found]


def test_more_than_one_request_may_hold_is_split(monkeypatch):
  monkeypatch.setattr(search_http, 'MAX_QUERIES', 3)
  with server(respond) as (url, seen):
    assert ids(SearchServers([url], **FAST).search([*'abcdefgh'], 1)) == [[name] for name in 'abcdefgh']
  assert [len(body['queries']) for _, _, body in seen] == [3, 3, 2]


def test_a_dead_and_a_slow_server_are_passed_over():
  def slow(handler):
    time.sleep(2)

  with server(slow) as (slow_url, _), server(respond) as (url, seen):
    client = SearchServers(['http://127.0.0.1:9', slow_url, url], timeout=3.0, backoff=0.01)
    start = time.monotonic()
    for name in 'abcd':
      assert ids(client.search([name], 1)) == [[name]]
    assert len(seen) == 4 and time.monotonic() - start < 15


def test_a_lying_server_is_an_error_and_not_asked_again():
  with server((200, {'result': [[], []]})) as (liar, _), server(respond) as (url, seen):
    with pytest.raises(SearchError, match='2 lists for 1 queries'):
      SearchServers([liar, url], **FAST).search(['x'], 1)
  assert not seen


class Corpus:
  corpus_hash = 'abc'

  def __init__(self):
    self.asked = []

  def search(self, queries, topk):
    self.asked += queries
    return [[Document(f'{query}{i}', 'T', 't', 1.5) for i in range(topk)] for query in queries]


def test_results_are_kept_by_corpus_and_replayed_without_a_server(tmp_path):
  corpus, file = Corpus(), tmp_path / 'searches'
  with serve(search_app(corpus)) as url:
    client = SearchServers([url], cache=file, **FAST)
    first = client.search(['a', 'b', 'a'], 2)
    assert corpus.asked == ['a', 'b'] and ids(first) == [['a0', 'a1'], ['b0', 'b1'], ['a0', 'a1']]
    assert client.search(['a'], 1)[0] == first[0][:1] and corpus.asked == ['a', 'b', 'a']
    corpus.corpus_hash = 'another'
  with serve(search_app(corpus)) as other:
    SearchServers([other], cache=file, **FAST).search(['a'], 2)
    assert corpus.asked == ['a', 'b', 'a', 'a']  # not the results of the other corpus
  replay = SearchServers([url], cache=file, replay=True, **FAST)  # nobody listens there any more
  assert replay.search(['b', 'a'], 2) == [first[1], first[0]]
  with pytest.raises(SearchError, match='not in the recording'):
    replay.search(['c'], 2)


def test_servers_of_different_corpora_are_refused(tmp_path):
  other = Corpus()
  other.corpus_hash = 'other'
  with serve(search_app(Corpus())) as one, serve(search_app(other)) as two:
    with pytest.raises(SearchError, match='different corpora'):
      SearchServers([one, two], cache=tmp_path / 'searches', **FAST).search(['x'])
