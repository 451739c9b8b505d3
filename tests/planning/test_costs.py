"""Counts of arithmetic and traffic against counts by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxsearch.models.kernels import decode_attention
from jaxsearch.parallel import mesh as meshes
from jaxsearch.planning import costs

DOT = 2 * 8 * 8 * 8  # FLOPs of the product of two 8 x 8 matrices


def count(f, *shapes):
  """FLOPs outside and inside of loops whose length is data."""
  once, each = costs.count(jax.jit(f).trace(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr.jaxpr)
  assert not (once[1:].any() or each[1:].any())
  return once[0], each[0]


def test_flops_of_products_loops_and_branches():
  square = (8, 8)
  assert count(lambda x, y: jnp.einsum('bij,bjk->bik', x, y), (3, 8, 5), (3, 5, 7)) == (2 * 3 * 8 * 5 * 7, 0)
  assert count(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=6)[0], square) == (6 * DOT, 0)
  assert count(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), square) == (2 * DOT, 0)
  loop = lambda x, n: jax.lax.fori_loop(0, n, lambda _, c: jax.lax.fori_loop(0, 4, lambda _, c: c @ c, c), x) @ x
  jaxpr = jax.jit(loop).trace(jax.ShapeDtypeStruct(square, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)).jaxpr.jaxpr
  assert [flops for flops, *_ in costs.count(jaxpr)] == [DOT, 4 * DOT]


def test_kernels_count_as_they_estimate():
  """Of 2 x 4 KiB of operand and result the kernel says it moves 5,000 bytes; without an estimate its body counts."""
  def kernel(x, out):
    out[...] = x[...] @ x[...]

  def run(estimate):
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((128, 8), jnp.float32), grid=(16,), cost_estimate=estimate,
                          in_specs=[pl.BlockSpec((8, 8), lambda i: (i, 0))], out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)))
    program = lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0]
    return costs.count(jax.jit(program).trace(jax.ShapeDtypeStruct((128, 8), jnp.float32)).jaxpr.jaxpr)[0].tolist()

  assert run(pl.CostEstimate(flops=77, bytes_accessed=5000, transcendentals=0)) == [3 * 77, 3 * (5000 - 2 * 4096), 0]
  assert run(None) == [3 * 16 * DOT, 0, 0]


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_a_decode_step_moves_what_its_kernel_says(platform):
  """The cache in the text, as operand and as result, is taken off; what follows the lengths is full rows."""
  S, K, G, h, T, R = 64, 2, 4, 64, 2048, 129
  struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
  attend = jax.jit(functools.partial(decode_attention.decode_attention, platform=platform))
  new, slots = struct(S, K, h), struct(S, dtype=jnp.int32)
  traced = attend.trace(struct(S, K * G, h), new, new, struct(R, K, T, 2 * h), slots, slots)
  (flops, beyond, reads), each = costs.count(traced.jaxpr.jaxpr)
  cache = decode_attention.cache_traffic([T] * S, K, h, 2, platform)
  assert flops == 4 * S * K * G * T * h and not each.any()
  assert cache < reads < 1.03 * cache
  assert cache - 2 * R * K * T * 2 * h * 2 == pytest.approx(beyond, abs=2 * 4 * S)  # but for rows and lengths


def test_a_backward_pass_counts_what_it_recomputes():
  """Forward 2, backward 2 for each of them; rematerialised the first product once more (the last is not needed)."""
  loss = lambda x, a, b: jnp.sum(jnp.tanh(x @ a) @ b)
  square = (8, 8)
  plain, _ = count(jax.grad(loss, argnums=(0, 1, 2)), *[square] * 3)
  remat, _ = count(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)), *[square] * 3)
  assert (plain, remat) == (6 * DOT, 7 * DOT)


def test_a_program_split_by_hand_counts_in_every_part():
  mesh = meshes.make_mesh(4, 2, 1)
  split = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P('data'), out_specs=P('data'), axis_names={'data'},
                        check_vma=False)
  assert count(split, (16, 8)) == (4 * 2 * 4 * 8 * 4, 0)


PROGRAM = """HloModule m, entry_computation_layout={()->()}

%slice_fusion (p0: f32[6,100], p1: s32[]) -> f32[100] {
  %p0 = f32[6,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
  ROOT %flat = f32[100]{0} bitcast(%cut)
}

%put_fusion (p0: f32[6,100], p1: f32[1,100], p2: s32[]) -> f32[6,100] {
  %p0 = f32[6,100]{1,0} parameter(0)
  %p1 = f32[1,100]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[6,100]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%layer (state: (f32[6,100], s32[])) -> (f32[6,100], s32[]) {
  %state = (f32[6,100]{1,0}, s32[]) parameter(0)
  %stack = f32[6,100]{1,0} get-tuple-element(%state), index=0
  %i = s32[] get-tuple-element(%state), index=1
  %row = f32[100]{0} fusion(%stack, %i), kind=kLoop, calls=%slice_fusion
  %near = f32[100]{0:T(128)S(1)} negate(%row)
  %again = f32[1,100]{1,0} reshape(%near)
  %new = f32[6,100]{1,0} fusion(%stack, %again, %i), kind=kLoop, calls=%put_fusion
  ROOT %out = (f32[6,100]{1,0}, s32[]) tuple(%new, %i)
}

%micro (state: (f32[6,100], s32[])) -> (f32[6,100], s32[]) {
  %state = (f32[6,100]{1,0}, s32[]) parameter(0)
  ROOT %layers = (f32[6,100]{1,0}, s32[]) while(%state), condition=%cond, body=%layer, LENGTH
}

%cond (state: (f32[6,100], s32[])) -> pred[] {
  %state = (f32[6,100]{1,0}, s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[6,100], n: s32[]) -> (f32[6,100], bf16[50]) {
  %x = f32[6,100]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %start = (f32[6,100]{1,0}, s32[]) tuple(%x, %n)
  %loop = (f32[6,100]{1,0}, s32[]) while(%start), condition=%cond, body=%micro
  %end = f32[6,100]{1,0} get-tuple-element(%loop), index=0
  %half = bf16[50]{0} custom-call(%end), custom_call_target="f"
  ROOT %result = (f32[6,100]{1,0}, bf16[50]{0}) tuple(%end, %half)
}
""".replace('LENGTH', 'backend_config={"known_trip_count":{"n":"6"}}')


def test_traffic_reads_what_it_slices_and_writes_what_it_puts():
  """A layer: row 4 + 400 read and 400 written; read by the negation, kept on the chip; 400 written by the reshape, which reads
  nothing from memory; put: 400 + 4 read, 400 written. Outside: 2400 read, 100 written."""
  outside, inside = costs.cut(PROGRAM)
  layer = (4 + 400 + 400) + 400 + 400 + (400 + 4 + 400)
  assert costs.traffic(inside) == 6 * layer
  assert costs.traffic(outside) == 2400 + 100
  assert costs.traffic(PROGRAM) == 6 * layer + 2500  # a loop of unknown length counts once


def test_what_kernels_hand_on_stays_in_a_cache_that_is_large_enough():
  """Of 400 bytes: the row and what the reshape makes of it. The put still writes its row to the state, and outside half the 2,400
  bytes are still read."""
  outside, inside = costs.cut(PROGRAM)
  assert costs.traffic(inside, cached=399) == costs.traffic(inside)
  assert costs.traffic(inside, cached=400) == 6 * ((4 + 400) + (4 + 400))
  assert costs.traffic(outside, cached=100) == 2400


def test_of_a_conditional_the_dearest_branch_runs_or_the_cheapest():
  text = jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ x) @ x, lambda x: x, x)).lower(
    jnp.zeros((256, 256))).compile().as_text()
  square = 256 * 256 * 4
  assert costs.traffic(text) - costs.traffic(text, dearest=False) >= 3 * square


def test_a_real_program_is_cut_where_its_loop_is_data():
  def program(x, n):
    return jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x @ x), x) * 2

  text = jax.jit(program).lower(jnp.zeros((256, 256)), jnp.int32(3)).compile().as_text()
  outside, inside = costs.cut(text)
  square = 256 * 256 * 4
  assert 3 * square <= costs.traffic(inside) <= 8 * square  # two products' operands, a result, a sine
  assert costs.traffic(text) == pytest.approx(costs.traffic(inside) + costs.traffic(outside), rel=0.01)
  plain = jax.jit(lambda x: x * 2).lower(jnp.zeros(8)).compile().as_text()
  assert costs.cut(plain) == (plain, None)
