"""Approximate search against NumPy: its recall, and what becomes of a build that is killed or has no room."""

import collections

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
  dense.write_vectors(folder, 0, vectors, precision)
  return dense.Vectors(folder, vectors.shape[1], precision)


def nearest(queries, vectors, topk):
  return np.argsort(-(queries @ vectors.T), axis=1, kind='stable')[:, :topk]


def shared(found, judge):
  return np.mean([len(set(row) & set(right)) / len(right) for row, right in zip(found.tolist(), judge.tolist())])


@pytest.mark.parametrize(('precision', 'least'), [('float16', 0.98), ('int8', 0.93)])
def test_it_finds_what_its_manifest_says_wherever_the_folder_moves(tmp_path, vectors, precision, least):
  (tmp_path / 'built').mkdir()
  found = approximate.build(tmp_path / 'built', stored(tmp_path, vectors, precision), precision, SILENT)
  folder = (tmp_path / 'built').rename(tmp_path / 'moved')
  assert found['lists'] == SIZE // 40 and found['probes'] < 32 and found['recall3'] >= least and found['sample'] == 512
  assert sorted(path.name for path in folder.iterdir()) == ['lists.faiss', 'lists.ivfdata']
  lists, queries = approximate.Lists(folder, found['probes']), vectors[1::7]
  numbers, scores = lists.search(queries, 4)
  assert shared(numbers[:, 1:], nearest(queries, vectors, 4)[:, 1:]) == pytest.approx(found['recall3'], abs=0.03)
  right = np.einsum('bd,bnd->bn', queries, vectors[numbers])
  np.testing.assert_allclose(scores, right, atol=1e-3 if precision == 'float16' else 0.03)


def test_too_few_in_the_lists_that_are_looked_into(tmp_path, vectors):
  approximate.build(tmp_path, stored(tmp_path, vectors), 'float16', SILENT)
  numbers, _ = approximate.Lists(tmp_path, probes=1).search(vectors[:5], 2000)
  found = numbers[0] >= 0
  assert 0 < found.sum() < 2000 and not found[found.sum():].any() and len(set(numbers[0][found])) == found.sum()


@pytest.mark.parametrize('size', [1, 2, 39, 90])
def test_few_vectors(tmp_path, vectors, size):
  found = approximate.build(tmp_path, stored(tmp_path, vectors[:size]), 'float16', SILENT)
  assert found == {'lists': max(1, size // 40), 'probes': found['probes'], 'recall3': found['recall3'], 'sample': size}
  numbers, _ = approximate.Lists(tmp_path, found['lists']).search(vectors[:1], 5)
  assert numbers.shape == (1, min(5, size)) and numbers[0, 0] == 0


@pytest.mark.parametrize('stop', range(7))
def test_killed_anywhere_it_resumes(tmp_path, vectors, stop):
  (tmp_path / 'whole').mkdir()
  whole, steps = stored(tmp_path, vectors), []
  approximate.build(tmp_path / 'whole', whole, 'float16', lambda *at: steps.append(at))
  assert steps == [('centres of lists', 0), *(('lists', first) for first in range(0, SIZE, 700)), ('recall', 0)]

  def killed(*at, counted=[]):  # noqa: B006
    if len(counted) == stop:
      raise Killed
    counted.append(at)

  with pytest.raises(Killed):
    approximate.build(tmp_path, whole, 'float16', killed)
  resumed = []
  found = approximate.build(tmp_path, whole, 'float16', lambda *at: resumed.append(at))
  assert resumed == steps[stop:] and not list(tmp_path.glob('shard-*'))
  ours, judge = (approximate.Lists(folder, found['lists']).search(vectors[:20], 3)[0]
                 for folder in (tmp_path, tmp_path / 'whole'))
  np.testing.assert_array_equal(ours, judge)


def test_a_full_disk_is_named_and_the_build_resumes(tmp_path, vectors, monkeypatch):
  whole = stored(tmp_path, vectors)
  with disk_that_fills_up() as fill, pytest.raises(OSError, match='File too large') as error:
    approximate.build(tmp_path, whole, 'float16', lambda *at: fill(20_000) if at == ('lists', 1400) else None)
  assert error.value.filename == str(tmp_path / 'shard-000002.faiss')
  with monkeypatch.context() as patched, pytest.raises(OSError, match='No space left') as error:
    patched.setattr('shutil.disk_usage', lambda folder: collections.namedtuple('Usage', 'free')(1000))
    approximate.build(tmp_path, whole, 'float16', SILENT)
  assert error.value.filename == str(tmp_path / 'lists.ivfdata')
  resumed = []
  assert approximate.build(tmp_path, whole, 'float16', lambda *at: resumed.append(at))['recall3'] > 0.98
  assert resumed == [('recall', 0)]
