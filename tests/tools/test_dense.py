"""Exact nearest vectors against NumPy, on one and on eight simulated devices."""

import jax
import numpy as np
import pytest

from jaxsearch.tools import dense


def unit(rng, *shape):
  vectors = rng.normal(size=shape).astype(np.float32)
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.fixture
def vectors():
  vectors = unit(np.random.default_rng(0), 1000, 24)
  vectors[3] = vectors[700] = vectors[999]  # ties over devices and chunks
  return vectors


@pytest.mark.parametrize('precision', dense.PRECISIONS)
@pytest.mark.parametrize(('devices', 'chunk'), [(1, 2**14), (8, 32), (3, 100)])
def test_the_nearest_are_those_of_numpy(tmp_path, vectors, precision, devices, chunk):
  for first in (0, 300, 600, 300):  # the last as after a kill
    dense.write_vectors(tmp_path, first, vectors[first:], precision)
  stored = dense.Vectors(tmp_path, 24, precision)
  whole = stored[:]
  np.testing.assert_allclose(whole, vectors, atol=5e-3)
  queries = np.concatenate([vectors[[999]], unit(np.random.default_rng(1), 69, 24)])
  scores = queries @ whole.T
  for topk in (5, 200):
    numbers, found = dense.Dense(stored, jax.devices()[:devices], chunk).search(queries, topk)
    assert numbers.shape == (70, topk) and numbers[0, :3].tolist() == [3, 700, 999][:topk]
    np.testing.assert_allclose(found, -np.sort(-scores, axis=1)[:, :topk], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, numbers, 1), found, atol=1e-5)


def test_fewer_passages_than_asked_for(tmp_path, vectors):
  dense.write_vectors(tmp_path, 0, vectors[:5], 'float16')
  numbers, scores = dense.Dense(dense.Vectors(tmp_path, 24, 'float16')).search(vectors[:2], 50)
  assert numbers.shape == (2, 5) and np.isfinite(scores).all() and sorted(numbers[0]) == list(range(5))


def test_int8_keeps_nearly_all_neighbours():
  rng = np.random.default_rng(0)
  vectors, queries = unit(rng, 5000, 64), unit(rng, 100, 64)
  rounded, scales = dense.quantized(vectors)
  assert np.abs(rounded * scales[:, None] - vectors).max() <= scales.max() / 2 + 1e-7
  best = lambda found: np.argsort(-(queries @ found.T), axis=1)[:, :10]
  shared = [len(set(a) & set(b)) / 10 for a, b in zip(best(vectors), best(rounded * scales[:, None]))]
  assert np.mean(shared) > 0.97
