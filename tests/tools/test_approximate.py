"""Approximate search against NumPy: its recall, from whatever place, and a disk without room."""


import numpy as np
import pytest

from jaxsearch.files import naming
from jaxsearch.tools import approximate, dense
from tests.processes import small_files

SIZE, WIDTH = 3000, 16
SILENT = lambda stage, done: None


@pytest.fixture
def vectors():
  """Around 60 centres, as the topics of a corpus are."""
  rng = np.random.default_rng(0)
  centres = rng.normal(size=(60, WIDTH))[rng.integers(0, 60, SIZE)]
  vectors = centres + 0.5 * rng.normal(size=(SIZE, WIDTH))
  return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def stored(folder, vectors, precision='float16'):
  dense.write_vectors(folder, 0, vectors, precision)
  return dense.Vectors(folder, vectors.shape[1], precision)


@pytest.mark.parametrize(('precision', 'least'), [('float16', 0.98), ('int8', 0.93)])
def test_it_finds_what_its_manifest_says_wherever_the_folder_moves(tmp_path, vectors, precision, least):
  (tmp_path / 'built').mkdir()
  made = approximate.build(tmp_path / 'built', stored(tmp_path, vectors, precision), precision, SILENT)
  folder = (tmp_path / 'built').rename(tmp_path / 'moved')
  assert made['lists'] == SIZE // 40 and made['probes'] < 32 and made['recall3'] >= least
  assert sorted(path.name for path in folder.iterdir()) == ['lists.faiss']
  lists, queries = approximate.Lists(folder, made['probes']), vectors[1::7]
  numbers, scores = lists.search(queries, 4)
  nearest = np.argsort(-(queries @ vectors.T), axis=1, kind='stable')[:, 1:4]
  pairs = zip(numbers[:, 1:].tolist(), nearest.tolist())
  recall = np.mean([len({*row} & {*right}) / 3 for row, right in pairs])
  assert recall == pytest.approx(made['recall3'], abs=0.03)
  right = np.einsum('bd,bnd->bn', queries, vectors[numbers])
  np.testing.assert_allclose(scores, right, atol=1e-3 if precision == 'float16' else 0.03)


def test_too_few_in_the_lists_that_are_looked_into(tmp_path, vectors):
  approximate.build(tmp_path, stored(tmp_path, vectors), 'float16', SILENT)
  numbers, _ = approximate.Lists(tmp_path, probes=1).search(vectors[:5], 2000)
  there = numbers[0] >= 0
  assert 0 < there.sum() < 2000 and not there[there.sum():].any()
  assert len(set(numbers[0][there])) == there.sum()


@pytest.mark.parametrize('size', [1, 90])
def test_few_vectors(tmp_path, vectors, size):
  made = approximate.build(tmp_path, stored(tmp_path, vectors[:size]), 'float16', SILENT)
  assert (made['lists'], made['sample']) == (max(1, size // 40), size)
  numbers, _ = approximate.Lists(tmp_path, made['lists']).search(vectors[:1], 5)
  assert numbers.shape == (1, min(5, size)) and numbers[0, 0] == 0


def test_a_disk_without_room_for_the_lists_is_named(tmp_path, vectors):
  whole = stored(tmp_path, vectors)
  with small_files(20_000), pytest.raises(OSError, match=r'lists\.part.*File too large'), naming(tmp_path):
    approximate.build(tmp_path, whole, 'float16', SILENT)
  assert not (tmp_path / 'lists.faiss').exists()
