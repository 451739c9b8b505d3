"""The sampler as it decodes on accelerators: by a kernel, interpreted here, in the pages themselves."""

import functools

import jax
import pytest

from jaxsearch.models.architecture import parameter_axes, parameter_shapes
from jaxsearch.models.kernels import paged_attention
from jaxsearch.parallel import mesh as meshes
from tests.sampler.test_engine import PROMPTS, chains, run, tokens_of
from tests.sampler.test_lanes import siblings


@pytest.fixture
def kernel(monkeypatch):
  """As if the devices were GPUs; the kernel of TPUs takes minutes of interpretation."""
  monkeypatch.setattr(paged_attention, 'KERNELS', {'cpu': 'gpu'})
  monkeypatch.setattr(paged_attention, 'attend', functools.partial(paged_attention.attend, interpret=True))


def test_tokens_are_those_of_the_dense_path(make_engine, kernel, monkeypatch):
  """Prefill, branches, tool turns, slots that stop early or stay idle, and pages that are used again."""
  growths = chains(PROMPTS * 2, turns=3) + [siblings] * 2
  found, metrics = run(make_engine(pages=30), growths)
  monkeypatch.undo()
  expected, dense = run(make_engine(), growths)
  assert tokens_of(found) == tokens_of(expected)
  assert metrics['tokens_decoded'] == dense['tokens_decoded'] and metrics['tokens_reused'] > 0


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
def test_lanes_with_split_heads(make_engine, kernel, monkeypatch, config, params):
  mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2)
  placed = jax.device_put(params, meshes.shardings(parameter_axes(config), parameter_shapes(config), mesh))
  growths = chains(PROMPTS * 2, turns=2) + [siblings] * 2
  found, _ = run(make_engine(mesh=mesh, params=placed, slots=8, prefill_lengths=(16,)), growths)
  monkeypatch.undo()
  expected, _ = run(make_engine(), growths)
  assert tokens_of(found) == tokens_of(expected)


def test_a_dozen_programs_and_nothing_compiles_after_compile_all(make_engine, kernel, compiled):
  engine = make_engine(slots=4)
  compiled.clear()
  engine.compile_all(score=True)
  assert 0 < len(compiled) <= 12
  compiled.clear()
  run(engine, chains(PROMPTS * 3, turns=3))
  assert not compiled
