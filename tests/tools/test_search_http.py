"""The client of retrieval servers; faults of servers are in test_server_faults.py."""

import json

import pytest

from configs import base
from jaxsearch.data.corpus import Document
from jaxsearch.setup import open_backend
from jaxsearch.tools.http_server import search_app
from jaxsearch.tools.search_http import HttpSearch
from tests.tools.running import serve
from tests.tools.serving import send, server

GOOD = {'result': [[{'document': {'id': '1', 'contents': '"Paris"\nA city.'}, 'score': 2.5}]]}
PARIS = Document('1', 'Paris', 'A city.', 2.5)
FAST = dict(backoff=0.01, timeout=5.0)


def test_request_and_answer():
  with server((200, GOOD)) as (url, seen):
    assert HttpSearch(url, token='secret').search(['capital of France'], 5) == [[PARIS]]
    HttpSearch(url + '/v2/find').search(['x'])
    HttpSearch(url + '/').search(['x'])
  path, headers, body = seen[0]
  assert path == '/retrieve' and headers['authorization'] == 'Bearer secret'
  assert body == {'queries': ['capital of France'], 'topk': 5, 'return_scores': True}
  assert [path for path, _, _ in seen[1:]] == ['/v2/find', '/retrieve']


@pytest.mark.parametrize(('status', 'fault', 'asked'), [(422, 'refused', 4), (None, 'malformed', 4), (500, 'server', 10)])
def test_a_query_that_is_not_served_fails_no_other(status, fault, asked):
  def answer(handler):
    queries = json.loads(handler.body)['queries']
    if status and 'bad' in queries:
      return handler.send_error(status)
    result = [[{'contents': None if query == 'bad' else query}] for query in queries]
    send(handler, json.dumps({'result': result}).encode())

  with server(answer) as (url, seen):
    search = HttpSearch(url, **FAST)
    results = search._batched(1)(['a', 'bad', 'b'])
  assert [results[i][0].title for i in (0, 2)] == ['a', 'b'] and results[1].fault == fault
  assert len(seen) == asked  # a 500 is tried four times


def test_a_server_that_answers_nothing_is_not_asked_each_query():
  with server((500, 'down')) as (url, seen):
    results = HttpSearch(url, **FAST)._batched(1)(['a', 'b', 'c', 'd'])
  assert [one.status for one in results] == [500] * 4 and len(seen) == 12


def test_both_forms_missing_ids_and_too_many_documents():
  document = {'contents': '"T"\nt\ud83d'}
  scored = {'document': {'id': 7, 'contents': 'T\nt'}, 'score': 1}
  with server((200, {'result': [[document] * 5]}), (200, {'result': [[], [scored]]})) as (url, _):
    assert HttpSearch(url).search(['x'], 2) == [[Document('', 'T', 't?')] * 2]
    assert HttpSearch(url).search(['x', 'y'], 3) == [[], [Document('7', 'T', 't', 1.0)]]


def test_the_token_of_search_servers_goes_to_them_alone(monkeypatch):
  monkeypatch.setenv('JAXSEARCH_SEARCH_TOKEN', 'sesame')
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  reply = {'result': [[]], 'organic': [], 'choices': [{'message': {'content': 'Doc 1: a'}}]}
  with server((200, reply)) as (url, seen):
    for kind in ('http', 'web', 'simulated'):
      config = base.get_config()
      config.search.update(backend=kind, url=url, writer='chat', writer_model='m')
      open_backend(config).search(['a'])
  assert [headers.get('authorization') for _, headers, _ in seen] == ['Bearer sesame', None, None]


def ids(results):
  return [[document.id for document in documents] for documents in results]


class Corpus:
  def __init__(self):
    self.asked, self.known = [], {'corpus': 'abc', 'index': 'bm25'}

  def search(self, queries, topk):
    self.asked += queries
    return [[Document(f'{query}{i}', 'T', 't', 1.5) for i in range(topk)] for query in queries]


def test_results_are_kept_by_corpus_and_replayed_without_a_server(tmp_path):
  corpus, file = Corpus(), tmp_path / 'searches'
  with serve(search_app(corpus)) as url:
    client = HttpSearch(url, cache=file, **FAST)
    first = client.search(['a', 'b', 'a'], 2)
    assert corpus.asked == ['a', 'b'] and ids(first) == [['a0', 'a1'], ['b0', 'b1'], ['a0', 'a1']]
    assert client.search(['a'], 1)[0] == first[0][:1] and corpus.asked == ['a', 'b', 'a']
  for corpus.known in ({'corpus': 'another', 'index': 'bm25'}, {'corpus': 'abc', 'index': 'dense'}):
    corpus.asked.clear()
    with serve(search_app(corpus)) as other:
      HttpSearch(other, cache=file, **FAST).search(['a'], 2)
      assert corpus.asked == ['a']  # not the results of the other corpus or index
  replay = HttpSearch(url, cache=file, replay=True, **FAST)  # nobody listens there any more
  assert replay.search(['b', 'a'], 2) == [first[1], first[0]]
  with pytest.raises(LookupError, match='not in the recording'):
    replay.search(['c'], 2)


def test_a_server_that_is_down_costs_no_search_that_is_kept(tmp_path):
  with serve(search_app(Corpus())) as url:
    client = HttpSearch(f'http://127.0.0.1:9,{url}', cache=tmp_path / 'searches', **FAST)
    assert ids(client.search(['a'], 1)) == [['a0']]


@pytest.mark.parametrize('page', [(404, b'no'), (200, b'[1]'), (200, b'<html>')])
def test_results_of_a_server_that_tells_no_corpus_are_kept_by_its_address(page, tmp_path):
  with server(page, (200, GOOD)) as (url, seen):
    client = HttpSearch(url, cache=tmp_path / 'searches', **FAST)
    assert client.search(['x', 'x'], 1) == [[PARIS]] * 2 == client.search(['x', 'x'], 1)
    asked = [path for path, _, _ in seen]
    HttpSearch(f'{url}?corpus=other', cache=tmp_path / 'searches', **FAST).search(['x'], 1)
  assert asked == ['/health', '/retrieve'] and seen[-1][0] == '/retrieve?corpus=other'
  assert b'corpus=other' not in (tmp_path / 'searches').read_bytes()  # it might be a key
