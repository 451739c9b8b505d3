"""The sampler as it decodes on accelerators: by a kernel, interpreted here, in the cache itself."""

import functools

import jax
import pytest

from jaxsearch.models.architecture import parameter_axes, parameter_shapes
from jaxsearch.models.kernels import decode_attention as kernels
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler import segment
from tests.sampler.test_engine import PROMPTS, chains, run, tokens_of
from tests.sampler.test_lanes import siblings


@pytest.fixture(params=['tpu', 'gpu'])
def platform(request, monkeypatch):
  """As if the devices were of this platform."""
  monkeypatch.setattr(kernels, 'platform_of', lambda *_: request.param)
  monkeypatch.setattr(segment, 'decode_attention', functools.partial(kernels.decode_attention, interpret=True))
  return request.param


def test_tokens_are_those_of_the_dense_path(make_engine, platform, monkeypatch):
  """Prefill, forks, tool turns, slots that stop early or stay idle, and rows that are used again."""
  growths = chains(PROMPTS * 2, turns=3) + [siblings] * 2
  found, metrics = run(make_engine(), growths)
  monkeypatch.undo()
  expected, dense = run(make_engine(), growths)
  assert tokens_of(found) == tokens_of(expected)
  assert metrics['tokens_decoded'] == dense['tokens_decoded'] and metrics['tokens_forked'] == dense['tokens_forked'] > 0


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
def test_lanes_with_split_heads(make_engine, platform, monkeypatch, config, params):
  mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2)
  placed = jax.device_put(params, meshes.shardings(parameter_axes(config), parameter_shapes(config), mesh))
  growths = chains(PROMPTS * 2, turns=2) + [siblings] * 2
  found, _ = run(make_engine(mesh=mesh, params=placed, slots=8, spare=8, prefill_lengths=(16,)), growths)
  monkeypatch.undo()
  expected, _ = run(make_engine(), growths)
  assert tokens_of(found) == tokens_of(expected)


def test_nothing_compiles_after_compile_all(make_engine, platform, compiled):
  engine = make_engine(slots=4, spare=2)
  engine.compile_all()
  compiled.clear()
  run(engine, chains(PROMPTS * 3, turns=3))
  assert not compiled
