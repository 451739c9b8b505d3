"""Approximate search against NumPy: its recall, and what becomes of a build that is killed or has no room."""

import numpy as np
import pytest

from jaxsearch.tools import approximate, dense
from tests.tools.test_index import Killed, disk_that_fills_up

SIZE, WIDTH = 3000, 16
SILENT = lambda stage, done: None


@pytest.fixture
def vectors(monkeypatch):
  """Around 60 centres, as the topics of a corpus are."""
  monkeypatch.setattr(approximate, 'SHARD', 700)
  rng = np.random.default_rng(0)
  found = rng.normal(size=(60, WIDTH))[rng.integers(0, 60, SIZE)] + 0.5 * rng.normal(size=(SIZE, WIDTH))
  return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def stored(folder, vectors, precision='float16'):
  found = dense.Vectors(folder, *vectors.shape, precision, create=True)
  found.write(0, vectors)
  return found


def nearest(queries, vectors, topk):
  return np.argsort(-(queries @ vectors.T), axis=1, kind='stable')[:, :topk]


def shared(found, judge):
  return np.mean([len(set(row) & set(right)) / len(right) for row, right in zip(found.tolist(), judge.tolist())])


@pytest.mark.parametrize(('precision', 'least'), [('float16', 0.98), ('int8', 0.93)])
def test_it_finds_what_its_manifest_says(tmp_path, vectors, precision, least):
  found = approximate.build(tmp_path, stored(tmp_path, vectors, precision), SILENT)
  assert found['lists'] == SIZE // 40 and found['probes'] < 32 and found['recall3'] >= least and found['sample'] == 512
  assert sorted(path.name for path in tmp_path.glob('*.*')) == ['list_sizes.uint64', 'lists.bytes', 'trained.faiss']
  lists, queries = approximate.Lists(tmp_path, found['probes']), vectors[1::7]
  numbers, scores = lists.search(queries, 4)
  assert shared(numbers[:, 1:], nearest(queries, vectors, 4)[:, 1:]) == pytest.approx(found['recall3'], abs=0.03)
  right = np.einsum('bd,bnd->bn', queries, vectors[numbers])
  np.testing.assert_allclose(scores, right, atol=1e-3 if precision == 'float16' else 0.03)
  np.testing.assert_allclose(lists.scores(queries, numbers), scores, atol=1e-5)
  assert shared(*(one.search(queries, 4)[0] for one in (approximate.Lists(tmp_path, found['lists']), lists))) > 0.97


def test_the_exact_search_that_recall_is_measured_by(tmp_path, vectors):
  whole = stored(tmp_path, vectors).read_float(0, SIZE)
  np.testing.assert_array_equal(approximate._exact(stored(tmp_path, vectors), whole[:50], 5), nearest(whole[:50], whole, 5))


def test_too_few_in_the_lists_that_are_looked_into(tmp_path, vectors):
  approximate.build(tmp_path, stored(tmp_path, vectors), SILENT)
  numbers, _ = approximate.Lists(tmp_path, probes=1).search(vectors[:5], 2000)
  found = numbers[0] >= 0
  assert 0 < found.sum() < 2000 and not found[found.sum():].any() and len(set(numbers[0][found])) == found.sum()


def test_where_the_codes_round_more_lists_are_not_worth_it(tmp_path, vectors, monkeypatch):
  """Two lists hold 95 % of the neighbours that codes can tell, four hardly more."""
  recalls = {1: 0.5, 2: 0.95, 4: 0.951}
  asked = []

  def search(self, queries, topk, probes):
    asked.append(probes)
    right = approximate._exact(whole, queries, topk)
    lost = np.random.default_rng(0).random(right.shape) > recalls[probes]
    return np.where(lost & (np.arange(topk) > 0), -1, right), None

  monkeypatch.setattr(approximate.Lists, 'search', search)
  whole = stored(tmp_path, vectors)
  found = approximate.build(tmp_path, whole, SILENT)
  assert asked == [1, 2, 4] and found['probes'] == 2 and found['recall3'] == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize('size', [1, 2, 39, 90])
def test_few_vectors(tmp_path, vectors, size):
  found = approximate.build(tmp_path, stored(tmp_path, vectors[:size]), SILENT)
  assert found == {'lists': max(1, size // 40), 'probes': found['probes'], 'recall3': found['recall3'], 'sample': size}
  numbers, _ = approximate.Lists(tmp_path, found['lists']).search(vectors[:1], 5)
  assert numbers.shape == (1, min(5, size)) and numbers[0, 0] == 0


@pytest.mark.parametrize('stop', range(7))
def test_killed_anywhere_it_resumes(tmp_path, vectors, stop):
  (tmp_path / 'whole').mkdir()
  whole, steps = stored(tmp_path, vectors), []
  approximate.build(tmp_path / 'whole', whole, lambda *at: steps.append(at))
  assert steps == [('centres of lists', 0), *(('lists', first) for first in range(0, SIZE, 700)), ('recall', 0)]

  def killed(*at, counted=[]):  # noqa: B006
    if len(counted) == stop:
      raise Killed
    counted.append(at)

  with pytest.raises(Killed):
    approximate.build(tmp_path, whole, killed)
  resumed = []
  found = approximate.build(tmp_path, whole, lambda *at: resumed.append(at))
  assert resumed == steps[stop:] and not list(tmp_path.glob('shard-*'))
  ours, judge = (approximate.Lists(folder, found['lists']).search(vectors[:20], 3)[0]
                 for folder in (tmp_path, tmp_path / 'whole'))
  np.testing.assert_array_equal(ours, judge)


@pytest.mark.parametrize(('stage', 'file'), [(('lists', 1400), 'shard-000002.faiss'), (('lists', 2800), 'lists.bytes')])
def test_a_full_disk_is_named_and_the_build_resumes(tmp_path, vectors, stage, file):
  """The last shard is small enough; all lists in one file are not."""
  whole = stored(tmp_path, vectors)
  with disk_that_fills_up() as fill, pytest.raises(OSError, match='File too large') as error:
    approximate.build(tmp_path, whole, lambda *at: fill(20_000) if at == stage else None)
  assert error.value.filename == str(tmp_path / file) and not (tmp_path / 'list_sizes.uint64').exists()
  resumed = []
  assert approximate.build(tmp_path, whole, lambda *at: resumed.append(at))['recall3'] > 0.98
  assert resumed[0] == (('lists', 1400) if 'shard' in file else ('recall', 0))
