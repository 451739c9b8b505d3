"""The compiled programs of the sampler: prefill, copies of pages, decode a segment.

Each takes the whole pool as a donated argument and returns it, so that it is updated in place. On
accelerators a kernel decodes in the pages and reads what each path has. Elsewhere decoding attends to a
front, contiguous copies of the paths (device.py). Sizes that vary come in buckets (the width of a table, the
shape of `tokens`, `steps`), everything else is data. Nothing here talks to the host: a segment ends where the
host must decide.

With a `mesh` whose axis `data` is longer than 1 every program runs in lanes: slots, chunks and pages are
split over them, the parameters are the same in each, and the number of a page counts within its lane.

Letters: S slots (paths decoded together), P chunks of a prefill, n tokens of a chunk, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.models.attention import append, attend_to_front, attend_to_pages, read_front, read_pages
from jaxsearch.models.decoder import forward_cached, logits
from jaxsearch.models.kernels import paged_attention
from jaxsearch.models.sampling_weights import Transposed
from jaxsearch.models.vocabulary import target_logprobs

BLOCK = 128  # vocabulary entries summed at once when sampling
LANES = 'data'
POOL = PartitionSpec(None, LANES)  # [K,N,page,h], or as `paged_attention.pool_shapes` has it
SLOT = PartitionSpec(LANES)
SAME = PartitionSpec()


class Slots(NamedTuple):
  """Describes slots to a segment, each [S], or one slot, each a scalar; by default an idle one."""
  tokens: jax.Array = 0  # int32, the last token of the path; its keys and values are not in the cache yet
  lengths: jax.Array = 0  # int32, tokens before it, all cached
  remaining: jax.Array = 0  # int32, tokens it may still generate
  episodes: jax.Array = 0  # int32, number of the episode
  requests: jax.Array = 0  # int32, number of the request within its episode
  temperature: jax.Array = 0.0  # float32, 0 is greedy
  states: jax.Array = 0  # int32, of the automaton of its stop strings; negative once one of them has ended


def idle_slots(count: int) -> Slots:
  """Returns idle slots [count] on the host."""
  return Slots(*(np.full(count, value, np.float32 if isinstance(value, float) else np.int32)
                 for value in Slots()))


def has_lanes(mesh: Mesh | None) -> bool:
  """Tells whether programs run in several lanes."""
  return mesh is not None and mesh.shape[LANES] > 1


def in_lanes(mesh: Mesh | None, program, given: tuple, results, *arguments):
  """Runs `program` in every lane; arguments and results are split as the specs `given` and `results` say."""
  if not has_lanes(mesh):
    return program(*arguments)
  return jax.shard_map(program, mesh=mesh, axis_names={LANES}, check_vma=False, in_specs=given,
                       out_specs=results)(*arguments)


@functools.cache
def allocator(config: DecoderConfig, shapes: tuple, sharding):
  """Compiles a program that returns zeros, a list over layers of arrays of these shapes.

  A program, so that it may run where transfers are forbidden.
  """
  layer = lambda: tuple(jnp.zeros(shape, config.dtype) for shape in shapes)
  return jax.jit(lambda: [layer() for _ in range(config.num_layers)], out_shardings=sharding)


@functools.partial(jax.jit, static_argnames=('config', 'mesh', 'kernel'), donate_argnames='pool')
def prefill(config: DecoderConfig, params, pool, tokens, starts, table, targets=None, temperature=None, *,
            mesh: Mesh | None = None, kernel: str | None = None):
  """Caches the tokens [P,n] of chunks behind the first `starts` [P] tokens in the pages of table [P,pages].

  Returns:
    (pool, log-probabilities [P,n] of `targets` [P,n] under softmax(logits / temperature), each predicted by
    the token at its place; None without targets)
  """
  def program(params, temperature, pool, tokens, starts, table, targets):
    attend = functools.partial(attend_to_pages, table=table)
    if kernel:
      attend = functools.partial(paged_attention.attend, table=table, platform=kernel, mesh=mesh)
    hidden, pool = forward_cached(config, params, tokens, starts, pool, attend)
    if targets is None:
      return pool, None
    return pool, target_logprobs(params, hidden, targets, temperature=temperature)[0]

  return in_lanes(mesh, program, (SAME, SAME, POOL, SLOT, SLOT, SLOT, SLOT), (POOL, SLOT),
                  params, temperature, pool, tokens, starts, table, targets)


@functools.partial(jax.jit, static_argnames='mesh', donate_argnames='pool')
def copy(pool, sources, targets, *, mesh: Mesh | None = None):
  """Copies pages; sources, targets: [S] numbers."""
  def program(pool, sources, targets):
    return [tuple(part.at[:, targets].set(part[:, sources]) for part in layer) for layer in pool]

  return in_lanes(mesh, program, (POOL, SLOT, SLOT), POOL, pool, sources, targets)


@functools.partial(jax.jit, static_argnames='mesh', donate_argnames='front')
def fill(front, pool, seats, tables, count, *, mesh: Mesh | None = None):
  """Copies the pages of tables[i] [window/page] to seats[i] of the front, for i < count; `count` is [1]."""
  def program(front, pool, seats, tables, count):
    def one_seat(i, front):
      def put(part, row):
        return jax.lax.dynamic_update_slice(part, row.astype(part.dtype), (seats[i], 0, 0, 0))

      return [tuple(map(put, seated, read_pages(layer, tables[i][None], seated[0].shape[2])))
              for seated, layer in zip(front, pool, strict=True)]

    return jax.lax.fori_loop(0, count[0], one_seat, front)

  return in_lanes(mesh, program, (SLOT, POOL, SLOT, SLOT, SLOT), SLOT, front, pool, seats, tables, count)


@functools.partial(jax.jit, static_argnames='steps')
def draws(key, episodes, requests, lengths, *, steps: int):
  """Returns [S,steps] uniform numbers in [0, 1), one for each token that a slot may draw in a segment.

  The token at depth d of a path gets the number of fold_in(fold_in(fold_in(key, episode), request), d),
  whichever slot draws it, when, and beside whom.
  """
  def draw(episode, request, depth):
    return jax.random.uniform(functools.reduce(jax.random.fold_in, (episode, request, depth), key))

  depths = lengths[:, None] + 1 + jnp.arange(steps)
  return jax.vmap(jax.vmap(draw, (None, None, 0)))(episodes, requests, depths)


@functools.partial(jax.jit, static_argnames=('config', 'mesh', 'kernel'), donate_argnames=('pool', 'front'))
def decode(config: DecoderConfig, params, pool, front, slots: Slots, table, following, uniforms, enough,
           limit, *, mesh: Mesh | None = None, kernel: str | None = None):
  """Samples up to n tokens in every slot that has any remaining.

  New entries are written to the front at every step and to the pool once at the end; by a kernel, to the pool
  at every step. Lanes step together: on some platforms no device may loop more often than another. With a
  kernel a segment has n steps whatever happens: a loop of known length, for which no GPU waits for its
  host, nor the host for it. A slot that has stopped writes behind its tokens.

  Args:
    front: list over layers of (keys [S,K,h,window], values [S,K,window,h]); holds `slots.lengths` entries of
      each path. The window is at least max(slots.lengths) + n + 1. None with a kernel.
    table: [S,pages] int32, the pages of each slot; with a front those of the window.
    kernel: the platform whose kernel attends, see kernels/paged_attention.py.
    following: [states,V] int16, the state of the automaton that follows each, by the token.
    uniforms: [S,n], from `draws`: one for each token.
    enough, limit: int32 scalars; without a kernel the segment ends once `enough` slots have finished, or all,
      or after `limit` steps.
  Returns:
    (pool, front, tokens [S,n] int32, logprobs [S,n] float32, counts [S] int32 of tokens generated, states [S]
    int32)
  """
  def program(params, following, enough, limit, pool, front, slots, table, uniforms):
    S, n = uniforms.shape
    started = slots.remaining > 0
    if mesh is None and kernel is None:  # one CPU
      matrix = params.get('rounded', params.get('unembedding', params['embedding']))
      params = params | {'unembedding': Transposed(matrix)}
    attend = attend_to_front if kernel is None else functools.partial(
      paged_attention.attend, table=table, platform=kernel, mesh=mesh)

    def unfinished(step, active):
      counts = jnp.stack([jnp.sum(active), jnp.sum(started & ~active)])
      going, stopped = jax.lax.psum(counts, LANES) if has_lanes(mesh) else counts
      return (step < limit) & (going > 0) & (stopped < enough)

    def one_token(step, state):
      last, counts, active, states, held, tokens, logprobs = state
      hidden, held = forward_cached(config, params, last[:, None], slots.lengths + counts, held, attend)
      chosen, logprob = sample(logits(params, hidden[:, 0]), uniforms[:, step], slots.temperature)
      last = jnp.where(active, chosen, last)
      tokens = jax.lax.dynamic_update_slice(tokens, last[:, None], (0, step))
      logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, step))
      counts = counts + active
      states = jnp.where(active, following[states, last].astype(jnp.int32), states)
      active &= (states >= 0) & (counts < slots.remaining)
      return last, counts, active, states, held, tokens, logprobs

    def and_ask(state):
      _, step, state = state
      state = one_token(step, state)
      return unfinished(step + 1, state[2]), step + 1, state

    zeros = lambda dtype, *shape: jnp.zeros(shape, dtype)
    state = (slots.tokens, zeros(jnp.int32, S), started, slots.states, pool if kernel else front,
             zeros(jnp.int32, S, n), zeros(jnp.float32, S, n))
    if kernel:
      state = jax.lax.fori_loop(0, n, one_token, state)
    else:
      *_, state = jax.lax.while_loop(
        lambda state: state[0], and_ask, (unfinished(0, started), jnp.int32(0), state))
    _, counts, _, states, held, tokens, logprobs = state
    results = tokens, logprobs, counts, states
    if kernel:
      return held, None, *results
    pool = [append(layer, *read_front(seated, slots.lengths, n), slots.lengths, table)
            for layer, seated in zip(pool, held, strict=True)]
    return pool, held, *results

  return in_lanes(mesh, program, (SAME, SAME, SAME, SAME, POOL, *[SLOT] * 4), (POOL, *[SLOT] * 5),
                  params, following, enough, limit, pool, front, slots, table, uniforms)


def sample(scores, uniform, temperature):
  """Draws one token a slot by inverting the distribution function, from one uniform number each.

  Args:
    scores: [S,V] float32 logits.
    uniform: [S] in [0, 1).
    temperature: [S], 0 is greedy.
  Returns:
    (tokens [S] int32, logprobs [S] float32). The log-probability is that of softmax(scores / temperature); a
    greedy token has that at temperature 1.
  """
  greedy = temperature <= 0
  scores = scores / jnp.where(greedy, 1, temperature)[:, None]
  peak = jnp.max(scores, axis=-1)
  mass = jnp.exp(scores - peak[:, None])
  normaliser = peak + jnp.log(jnp.sum(mass, axis=-1))
  mass = jnp.where(greedy[:, None], scores == peak[:, None], mass)  # argmax takes longer than all the rest
  S, V = mass.shape
  blocks = jnp.pad(mass, ((0, 0), (0, -V % BLOCK))).reshape(S, -1, BLOCK)
  in_blocks = jnp.sum(blocks, axis=-1)
  below = jnp.cumsum(in_blocks, axis=-1)
  wanted = jnp.where(greedy, 0, uniform) * below[:, -1]
  block = _first_above(below, in_blocks, wanted)
  start = jnp.take_along_axis(below, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0]
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  rest = wanted - jnp.where(block > 0, start, 0)
  tokens = block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), inside, rest)
  return tokens.astype(jnp.int32), jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0] - normaliser


def _first_above(sums, masses, level):
  """Finds the first index with mass where running sums [S,N] of masses [S,N] exceed level [S], or the last.

  A running sum is added up in another order at every index, so it may grow where nothing is added, and its
  end may be below the level. No token of probability 0 is ever drawn.
  """
  above = (masses > 0) & (sums > level[:, None])
  last = masses.shape[-1] - 1 - jnp.argmax((masses > 0)[:, ::-1], axis=-1)
  return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
