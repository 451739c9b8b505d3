"""Every client of a server against every fault: the kind of failure, in bounded time, and the key unsaid."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsearch.tools.calls import FAULTS as KINDS
from jaxsearch.tools.chat import Chat
from jaxsearch.tools.http_client import RequestError
from jaxsearch.tools.search_http import HttpSearch
from jaxsearch.tools.simulated import ModelWriter, SimulatedSearch, WriterError
from tests.tools.server_faults import FAULTS, KEY, SAID, asking, kind, server_with_faults


@pytest.fixture(scope='module')
def url():
  with server_with_faults() as url:
    yield url


@pytest.fixture(autouse=True)
def key(monkeypatch):
  monkeypatch.setenv('OPENAI_API_KEY', KEY)


def clients(url, **settings):
  """What asks a server a question, by what it asks for."""
  settings = {'attempts': 2, 'backoff': 0.01} | settings
  search, chat = HttpSearch(url, token=KEY, **settings), Chat(url, 'm', **settings)
  written = SimulatedSearch(ModelWriter(chat.replies))
  return {'search': lambda question: search.search([question])[0], 'chat': chat.reply,
          'writer': lambda query: written.search([query])[0]}


def outcome(ask, question):
  """(seconds, what came of it)"""
  start = time.monotonic()
  try:
    found = ask(question)
  except (RequestError, WriterError) as error:
    found = error
  return time.monotonic() - start, found


@pytest.mark.parametrize('name', FAULTS)
def test_a_fault_is_survived_or_told_by_kind(url, name):
  timeout = 0.4 if kind(name, 'search') == 'timeout' else 30.0
  asked = clients(url, timeout=timeout)
  with ThreadPoolExecutor() as pool:
    outcomes = dict(zip(asked, pool.map(lambda ask: outcome(ask, asking(name)), asked.values())))
  for client, (seconds, found) in outcomes.items():
    expected = kind(name, client)
    assert seconds < 15, client
    if expected is None:
      assert found and not isinstance(found, Exception), (client, found)
    else:
      assert found.fault == expected and expected in KINDS, (client, found)
      assert 'sesame' not in str(found) and len(str(found)) < 500 and str(found).isprintable()
      assert url in str(found) or isinstance(found, WriterError)


def test_without_a_fault(url):
  asked = clients(url)
  document, = asked['search']('x')
  assert document.title == asked['writer']('x')[0].title == 'Paris'
  assert asked['chat']('x') == SAID
