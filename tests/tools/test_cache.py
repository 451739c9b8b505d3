import sqlite3
import threading
import time

import pytest

from jaxsearch.tools.cache import Cache


def never():
  raise AssertionError('fetched')


def test_a_response_is_kept_by_everything_in_the_request_and_outlives_the_process(tmp_path):
  cache = Cache(tmp_path / 'new' / 'answers')
  assert cache.get({'q': 'a', 'n': 1}, lambda: ['é', None, 1.5]) == ['é', None, 1.5]
  assert cache.get({'n': 1, 'q': 'a'}, never) == ['é', None, 1.5]
  assert cache.get({'q': 'a', 'n': 2}, lambda: '') == ''
  del cache
  again = Cache(tmp_path / 'new' / 'answers')
  assert again.get({'q': 'a', 'n': 1}, never) == ['é', None, 1.5]
  assert again.get({'q': 'a', 'n': 2}, never) == ''


def test_threads_that_want_the_same_fetch_it_once(tmp_path):
  cache, fetched, results = Cache(tmp_path / 'answers'), [], []

  def fetch():
    time.sleep(0.2)
    fetched.append(1)
    return 'yes'

  threads = [threading.Thread(target=lambda: results.append(cache.get('x', fetch))) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == ['yes'] * 8 and fetched == [1]


def test_another_file_is_refused_and_left_as_it_is(tmp_path):
  path = tmp_path / 'notes.txt'
  path.write_text('my notes\n' * 100)
  with pytest.raises(ValueError, match=r'notes\.txt is no file of cached responses'):
    Cache(path)
  assert path.read_text() == 'my notes\n' * 100
  with pytest.raises(ValueError, match='is no file of cached responses'):
    Cache(tmp_path)


@pytest.mark.parametrize('lock', ['IMMEDIATE', 'EXCLUSIVE'])
def test_a_response_is_not_lost_where_the_file_takes_none(lock, tmp_path):
  cache = Cache(tmp_path / 'answers')
  (other := sqlite3.connect(tmp_path / 'answers')).execute(f'BEGIN {lock}')
  cache._db.execute('PRAGMA busy_timeout = 10')
  with pytest.warns(UserWarning, match='answers does not keep responses: database is locked'):
    assert cache.get('x', lambda: 7) == 7
  other.rollback()
  assert cache.get('x', lambda: 8) == cache.get('x', never) == 8


def test_a_file_that_is_busy_may_be_tried_again_and_one_that_is_damaged_keeps_nothing(tmp_path, monkeypatch):
  path = tmp_path / 'answers'
  cache = Cache(path)
  assert cache.get('x', lambda: 7) == 7
  (other := sqlite3.connect(path)).execute('BEGIN EXCLUSIVE')
  connect = sqlite3.connect
  monkeypatch.setattr(sqlite3, 'connect', lambda *args, **options: connect(*args, **options | {'timeout': 0.01}))
  with pytest.raises(ConnectionError, match='answers cannot be opened now: database is locked'):
    Cache(path)
  other.rollback()
  Cache(path).get('y', lambda: 1)
  path.write_bytes(path.read_bytes()[:100] + b'?' * (path.stat().st_size - 100))
  with pytest.warns(UserWarning, match='answers does not keep responses: '):
    assert cache.get('x', lambda: 8) == 8


def test_failures_are_not_kept_nor_anything_without_a_file(tmp_path):
  counts = iter(range(9))
  cache = Cache('')
  assert [cache.get('x', lambda: next(counts)) for _ in range(3)] == [0, 1, 2]
  cache = Cache(tmp_path / 'answers')
  with pytest.raises(AssertionError, match='fetched'):
    cache.get('x', never)
  assert cache.get('x', lambda: next(counts)) == cache.get('x', never) == 3
