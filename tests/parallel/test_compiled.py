"""The collectives of compiled programs: a real one on simulated devices, and lines as the compilers of GPU
and TPU write them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxsearch.parallel import mesh as meshes
from jaxsearch.parallel.compiled import Collective, collectives, traffic


def test_a_loop_over_layers_gathers_each_of_them_and_reduces_its_gradient():
  mesh = meshes.make_mesh(1, 8, 1)
  struct = lambda shape, spec: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))

  def loss(weights, x):
    with meshes.ambient(mesh):
      x, _ = jax.lax.scan(lambda x, w: (meshes.keep_batch_split(jnp.tanh(x @ w)), None), x, weights)
    return jnp.sum(x)

  weights = struct((5, 64, 64), P(None, 'fsdp'))
  program = jax.jit(jax.grad(loss), out_shardings=weights.sharding).lower(weights, struct((32, 64), P('fsdp'))).compile()
  found = collectives(program.as_text())
  whole = 64 * 64 * 4
  assert [one for one in found if one.kind == 'all-gather'] == [Collective('all-gather', whole, 5, False)] * 2
  reduced, = (one for one in found if one.kind in ('all-reduce', 'reduce-scatter'))
  assert (reduced.bytes, reduced.times) == (whole, 5)
  assert traffic(found) == 5 * whole * (2 + (2 if reduced.kind == 'all-reduce' else 1))


GPU = '''HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%chunk (state: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %state = (s32[], bf16[64,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %table = bf16[64,8]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %start = (bf16[64,8]{0,1}, bf16[64,128]{0,1}) all-gather-start(%table), replica_groups=[1,16]<=[16], dimensions={1}
  %done = bf16[64,128]{0,1} all-gather-done(%start)
  %sums = ((f32[64,8]{1,0}, /*index=1*/f32[16]{0}), (f32[4,8]{1,0}, f32[1]{0})) reduce-scatter-start(%a, /*index=1*/%b)
  %a = f32[64,8]{1,0} convert(%table)
  %b = f32[16]{0} constant({...})
}

%positive (state: (s32[], bf16[64,8])) -> pred[] {
  ROOT %true = pred[] constant(true)
}

%micro_batch (state: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %p = (s32[], bf16[64,8]) parameter(0)
  %f = f32[32]{0} constant({...})
  %own = f32[32]{0} all-reduce(%f), replica_groups={{0},{1}}, to_apply=%add
  %same = f32[32]{0} all-reduce(%f), replica_groups=[2,1]<=[2], to_apply=%add
  %total = f32[32]{0} all-reduce-start(%f), to_apply=%add
  ROOT %w = (s32[], bf16[64,8]) while(%p), condition=%positive, body=%chunk, backend_config={"known_trip_count":{"n":"7"}}
}

ENTRY %main (p0: bf16[64,8]) -> bf16[64,8] {
  %p0 = bf16[64,8]{1,0} parameter(0)
  %t = (s32[], bf16[64,8]) tuple(%zero, %p0)
  %w2 = (s32[], bf16[64,8]) while(%t), condition=%positive, body=%micro_batch
}
'''


def test_asynchronous_collectives_count_once_loops_multiply_and_one_device_sends_nothing():
  assert sorted(collectives(GPU), key=lambda one: one.kind) == [
    Collective('all-gather', 64 * 128 * 2, 7, True),
    Collective('all-reduce', 32 * 4, 1, True),  # in a loop whose length is data
    Collective('reduce-scatter', 64 * 8 * 4 + 16 * 4, 7, True)]


TPU = '''HloModule m

%layer (p: (f32[64], s32[])) -> (f32[64], s32[]) {
  %p = (f32[64]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %f = f32[64]{0:T(128)} get-tuple-element(%p), index=0
  ROOT %sum = (f32[64]{0:T(128)}, s32[]) all-reduce(%f), to_apply=%add
}

%six (state: (f32[64], s32[])) -> pred[] {
  %state = (f32[64]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=1
  %bound = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[]{:T(128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  ROOT %result = pred[]{:T(512)} compare(%a, %b), direction=LT
}

%seven (state: (f32[64], s32[])) -> pred[] {
  %state = (f32[64]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=1
  %bound = s32[]{:T(128)} constant(7)
  ROOT %less.2 = pred[]{:T(512)} fusion(%i, %bound), kind=kLoop, calls=%less
}

%data (state: (f32[64], s32[])) -> pred[] {
  %state = (f32[64]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=1
  ROOT %less.3 = pred[]{:T(512)} compare(%i, %i), direction=LT
}

ENTRY %main (p: (f32[64], s32[])) -> (f32[64], s32[]) {
  %p = (f32[64]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %a = (f32[64]{0:T(128)}, s32[]{:T(128)}) while(%p), condition=%six, body=%layer
  %b = (f32[64]{0:T(128)}, s32[]{:T(128)}) while(%a), condition=%seven, body=%layer
  ROOT %c = (f32[64]{0:T(128)}, s32[]{:T(128)}) while(%b), condition=%data, body=%layer
}
'''


def test_loops_that_count_to_a_constant_get_their_length():
  """As the compiler of TPUs writes them; a loop whose bound is data has none."""
  found = [(one.times, one.in_turn) for one in collectives(TPU)]
  assert found == [(6, False), (7, False), (1, True)]
