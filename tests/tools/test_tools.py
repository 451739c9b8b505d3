"""A search back end is one file and its line in BACKENDS."""

import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs import base
from jaxsearch import tools
from jaxsearch.config_check import check, check_files
from jaxsearch.data.corpus import Document
from jaxsearch.setup import open_backend


class Notes:
  def __init__(self, settings, corpus, seed, **_):
    self.notes, self.shelf, self.seed = corpus, settings.shelf, seed

  def search(self, queries, topk=3):
    return [self.notes[:topk] for _ in queries]


@pytest.fixture
def config(monkeypatch):
  module = types.ModuleType('jaxsearch.tools.notes')
  module.BACKEND = tools.Backend(
    Notes, fields={'shelf': '', 'depth': 1}, checks={'depth': '>= 1'},
    needs=lambda settings: {'shelf': 'path'},
    mistakes=lambda settings: ['too deep'] if settings.depth > 9 else [], corpus=lambda settings: True)
  monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setitem(tools.BACKENDS, 'notes', 'notes')
  config = base.get_config()
  config.search.backend = 'notes'
  return config


def test_a_back_end_of_your_own_has_its_fields_checks_and_needs(config, tmp_path):
  assert config.search.depth == 1
  config.search.depth, config.search.by_source = 0, True
  with pytest.raises(ValueError) as error:
    check(config)
  assert 'search.depth=0 must be >= 1' in str(error.value)
  assert "by_source=True is for the backends 'bm25', 'index', 'http', not 'notes'" in str(error.value)
  with pytest.raises(ValueError, match='search.shelf is not set'):
    check_files(config, ['search'])
  config.search.shelf, config.search.depth = str(tmp_path / 'missing'), 10
  with pytest.raises(ValueError, match='too deep; search.shelf=.*missing.*no such file or folder'):
    check_files(config, ['search'])
  check_files(config, ['model'])


def test_a_back_end_of_your_own_is_opened_on_the_passages(config, tmp_path):
  (tmp_path / 'c.jsonl').write_text('{"id": "1", "contents": "\\"Paris\\"\\nA city."}')
  config.search.shelf, config.seed = 'oak', 5
  backend = open_backend(config, str(tmp_path / 'c.jsonl'))
  assert backend.search(['x'], 1) == [[Document('1', 'Paris', 'A city.')]]
  assert (backend.shelf, backend.seed) == ('oak', 5)


def test_a_back_end_of_a_source_is_opened_once_by_threads_that_want_it(config):
  opened = []

  def open_one(source):
    opened.append(source)
    time.sleep(0.1)
    return object()

  backend = tools.SearchBySource(open_one)
  with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(backend.of, ['a', 'b', None] * 3))
  assert len(opened) == 3 == len(set(found)) and backend.of('a') is found[0]


@pytest.mark.parametrize('name', tools.BACKENDS)
def test_a_shipped_back_end_reads_fields_of_the_config_alone(name, monkeypatch):
  backend, search = tools.find_backend(name), base.get_config().search
  monkeypatch.setattr('jaxsearch.tools.index.read_manifest', lambda folder: {'kind': 'bm25', 'files': {}})
  for search.writer in ('world', 'chat', 'model'):
    assert set(backend.needs(search)) <= set(search)
  assert not backend.fields and 'files' not in backend.identity(search)  # base.py lists and explains all
