"""The sampler as it decodes on accelerators: by a kernel, interpreted here, in the pages themselves."""

import dataclasses
import functools
import re

import jax
import pytest

from jaxsearch.models.architecture import parameter_axes, parameter_shapes, preset
from jaxsearch.models.kernels import paged_attention
from jaxsearch.parallel import compiled as compiled_text, mesh as meshes
from jaxsearch.planning import programs, step
from jaxsearch.sampler.engine import Engine
from tests.parallel.compilers import devices_of
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
  found, metrics = run(make_engine(pages=30, slots=4), growths)
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


def primitives(jaxpr):
  """Yields the equations of a traced program and of what is inside them, but for kernels."""
  for equation in jaxpr.eqns:
    yield equation
    if equation.primitive.name != 'pallas_call':
      for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'jaxpr') or hasattr(x, 'eqns')):
        part = getattr(part, 'jaxpr', part)
        if hasattr(part, 'eqns'):
          yield from primitives(part)


def test_a_segment_is_one_loop_of_known_length(make_engine, kernel):
  """So the device asks its host for nothing, and neither waits for the other."""
  made, *_ = make_engine().largest_programs()
  found = list(primitives(programs.Program(*made['decode']).trace().jaxpr.jaxpr))
  assert {each.primitive.name for each in found}.isdisjoint({'cond', 'while', 'pure_callback', 'io_callback'})
  assert [each.params['length'] for each in found if each.primitive.name == 'scan'] == [16]


@pytest.mark.slow
@pytest.mark.parametrize(('target', 'tensor'), [('tpu:v5e:2x2', 1), ('cuda:h100:1x4', 1), ('cuda:h100:1x4', 2)])
def test_what_is_compiled_loops_alone_and_copies_nothing_large(target, tensor, tmp_path):
  """Eight steps without a conditional; neither the pool nor the logits are laid out anew; on a GPU a step is one graph."""
  devices = devices_of(target)[:2 * tensor]
  model = dataclasses.replace(preset('qwen2.5-3b'), num_layers=2, dtype='bfloat16')
  engine = Engine(model, programs.TOKENIZER, slots=128, length=4096, mesh=meshes.make_mesh(devices=devices), tensor=tensor)
  made, _, (cache, _) = engine.largest_programs()
  options = {'xla_dump_to': str(tmp_path), 'xla_dump_hlo_as_text': True} if target.startswith('cuda') else None
  text = programs.Program(*made['decode']).lower().compile(options).as_text()
  _, found = compiled_text.computations(text)
  loop, = [each for part in found.values() for each in part if each.opcode == 'while']
  assert compiled_text.loop_length(loop.line, found) == engine.segment_steps == 8
  assert not {'conditional', 'infeed', 'outfeed', 'send', 'recv'} & {each.opcode for part in found.values() for each in part}
  body = found[re.search(r'body=%?([\w.-]+)', loop.line)[1]]
  least = min(programs.on_device(cache[0][0]), 64 * model.vocab_size)
  copies = [each.line for each in body if each.opcode in ('copy', 'transpose') and each.bytes >= least]
  assert not copies
  kernels = [each for each in body if each.opcode in ('fusion', 'custom-call', 'copy')]
  if options:
    assert len(kernels) <= 30 + model.num_layers * step.CALIBRATION['kernels']
  if options and tensor == 1:  # collectives are launched between graphs
    (thunks,) = tmp_path.glob('*jit_decode*thunk_sequence_after_thunk_passes.txt')
    steps = re.split(r'^  body:$', thunks.read_text(), flags=re.MULTILINE)[1]
    assert re.findall(r'^ {4}\d+: (\w+)', steps, re.MULTILINE) == ['kCommandBuffer']
