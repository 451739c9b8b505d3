"""The client of SERPER against a server on this machine that speaks its protocol."""

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools.calls import paid
from jaxsearch.tools.http_client import RequestError
from jaxsearch.tools.search_web import WebSearch, parse_response
from tests.tools.serving import server

ORGANIC = [{'title': f'Page {i}', 'link': f'https://example.org/{i}', 'snippet': f'About {i} ...'}
           for i in (1, 2, 3, 4)]
GOOD = {'searchParameters': {'q': 'x', 'type': 'search'}, 'organic': ORGANIC, 'credits': 1}
PAGES = [Document(f'https://example.org/{i}', f'Page {i}', f'About {i} ...') for i in (1, 2, 3, 4)]


@pytest.fixture(autouse=True)
def key(monkeypatch):
  monkeypatch.setenv('SERPER_API_KEY', 'sesame')


def test_request_and_documents():
  with server((200, GOOD)) as (url, seen):
    assert WebSearch(url + '/search').search(['capital  of\nFrance', 'Lyon'], 3) == [PAGES[:3]] * 2
  assert [(path, body) for path, _, body in seen] == [
    ('/search', {'q': 'capital of France', 'num': 3}), ('/search', {'q': 'Lyon', 'num': 3})]
  assert {name.lower(): value for name, value in seen[0][1].items()}['x-api-key'] == 'sesame'


def test_boxes_come_first_and_count():
  box = {'title': 'France / Capital', 'answer': 'Paris', 'snippet': 'Paris is the capital.',
         'link': 'https://a.org'}
  graph = {'title': 'Paris', 'type': 'Capital of France', 'description': 'A city.', 'imageUrl': 'c',
           'descriptionLink': 'https://b.org', 'attributes': {'Population': '2.1 million', 'Elevation': 35}}
  found = parse_response({**GOOD, 'answerBox': box, 'knowledgeGraph': graph}, 3)
  assert found == [
    ('https://a.org', 'France / Capital', 'Paris. Paris is the capital.'),
    ('https://b.org', 'Paris', 'Capital of France. A city. Population: 2.1 million. Elevation: 35'),
    ('https://example.org/1', 'Page 1', 'About 1 ...')]
  assert parse_response({**GOOD, 'answerBox': box}, 1) == found[:1]


def test_pages_without_text_and_searches_without_pages():
  bare = {'title': 'Bare', 'link': 'https://a.org'}
  with server((200, {'organic': [bare, {'snippet': 'half \ud83d'}]})) as (url, _):
    assert WebSearch(url).search(['x'], 2) == [[Document('', '', 'half ?')]]
  assert parse_response({'organic': [], 'answerBox': {}, 'knowledgeGraph': None}, 2) == []


@pytest.mark.parametrize('value', [None, ''])
def test_a_missing_key_is_named(monkeypatch, value):
  monkeypatch.delenv('SERPER_API_KEY') if value is None else monkeypatch.setenv('SERPER_API_KEY', value)
  with pytest.raises(ValueError, match='SERPER_API_KEY'):
    WebSearch()


def test_what_is_paid_for_is_counted_and_what_is_kept_costs_nothing(tmp_path):
  """A credit where the response names none, several where it does, none for failures and what is kept."""
  unnamed = {'organic': ORGANIC}
  with server((200, GOOD), (500, b'oops'), (200, unnamed), (200, GOOD | {'credits': 2})) as (url, seen):
    backend = WebSearch(url, cache=tmp_path / 'searches', price=0.25, backoff=0.01)
    for query, credits in (('a', 1), (' a ', 1), ('b', 2), ('c', 4), ('b', 4)):
      backend.search([query], 1)
      assert backend.paid == credits
  assert paid(backend, before=1) == {'searches_paid': 3, 'searches_cost': 0.75} and paid(None) == {}
  gone = WebSearch(url, cache=tmp_path / 'searches', attempts=1)
  assert gone.search(['a', 'a'], 1) == [PAGES[:1]] * 2 and len(seen) == 4
  with pytest.raises(RequestError, match='ConnectError'):  # not the results of another server
    WebSearch(f'{url}/other', cache=tmp_path / 'searches', attempts=1).search(['a'], 1)
  with pytest.raises(RequestError, match='ConnectError'):
    gone.search(['a'], 2)


def test_a_blank_query_finds_nothing_and_asks_nobody():
  assert WebSearch('http://127.0.0.1:9').search([' ', '']) == [[], []]
