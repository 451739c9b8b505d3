"""Log-probabilities of tokens under a softmax over the vocabulary, in chunks of positions, forward and
backward.

On a mesh (`parallel.mesh.ambient`) the vocabulary table is split over a group of neighbours along `fsdp`,
and along `tensor`. The group exchanges hidden states, maxima and sums, not the table: each device computes
its part of the logits for all positions of the group. The size of a group minimises traffic: from one
device (large micro-batches: each gathers the table) up to all of `fsdp`. The table's gradient is added up in
float32 over all chunks where its part is held, and exchanged once.

Letters: R rows, M positions of a row, D width, V vocabulary; on one device n positions, in chunks of c, g
devices in a group, N = g * c positions of a group's chunk, v entries of the vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxsearch.parallel import mesh as meshes

ROWS, WHOLE = PartitionSpec(('data', 'groups', 'fsdp')), PartitionSpec()
# Of float32 operands: three bfloat16 passes on TPUs, TF32 on GPUs. A TPU would take one pass, too coarse for
# the long sums of the table's gradient; all bits would make that product 15 times slower on an H100.
PRECISION = jax.lax.Precision.HIGH


class Split(NamedTuple):
  """The layout of positions and vocabulary on a mesh, its axis `fsdp` cut in groups that share the latter."""
  mesh: AbstractMesh  # with the axes data, groups, fsdp, tensor
  shares: tuple[str, ...]  # the axes over which the vocabulary is split, those over `tensor` in larger parts
  table: PartitionSpec  # of the table [V,D] among the parameters, see `parallel.mesh.AXIS_TO_MESH`


def best_split(rows: int, positions: int, width: int, vocabulary: int) -> Split | None:
  """Returns the split on the ambient mesh.

  None on one device, in a program that is split by hand, or where dimensions do not divide.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
    return None
  fsdp, parts = mesh.shape['fsdp'], meshes.batch_size(mesh)
  if rows % parts or width % fsdp:
    return None
  by_tensor = vocabulary % mesh.shape['tensor'] == 0
  part = vocabulary // (mesh.shape['tensor'] if by_tensor else 1)
  sizes = [g for g in range(1, fsdp + 1) if fsdp % g == 0 and part % g == 0]
  # What a device receives: the states of its group, and (as long as there are several groups) its part of the
  # table.
  group = min(sizes, key=lambda g: g * rows // parts * positions + part // g)
  shares = ('tensor', 'fsdp') if by_tensor else ('fsdp',)
  table = PartitionSpec('tensor' if by_tensor else None, ('groups', 'fsdp'))
  sizes = mesh.shape['data'], fsdp // group, group, mesh.shape['tensor']
  grouped = AbstractMesh(sizes, ('data', 'groups', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 4)
  return Split(grouped, shares, table)


@functools.partial(jax.jit, static_argnames=('chunk', 'with_entropy'))
def target_logprobs(params: dict, hidden, targets, *, temperature=1.0, chunk: int = 1024,
                    with_entropy: bool = False):
  """Computes log-probabilities of `targets` under softmax(logits / temperature).

  Args:
    hidden: [..., D] the states that predict; targets: [...] int, leading shapes alike.
    chunk: positions of a device whose logits [chunk, V] are held at a time.
  Returns:
    ([...] float32 log-probabilities, [...] float32 entropies or zeros if not `with_entropy`).
  """
  rows, table = (*targets.shape, 1)[0], params.get('unembedding', params['embedding'])
  states, ids = hidden.reshape(rows, -1, hidden.shape[-1]), targets.reshape(rows, -1)
  split = best_split(*states.shape, table.shape[0])
  results = token_logprobs(chunk, with_entropy, split, states, ids, table, jnp.float32(temperature))
  return tuple(x.reshape(targets.shape) for x in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def token_logprobs(chunk: int, with_entropy: bool, split: Split | None, states, ids, table, temperature):
  """Computes what `target_logprobs` returns, of `ids` under softmax(states @ table.T / temperature).

  The products are those of the dtype of `states`, all else is float32. The gradient of a float32 `table` is
  float32. Nothing is differentiated with respect to the temperature.

  Args:
    states: [R,M,D]; ids: [R,M] int; table: [V,D]; temperature: [] float32; split: `best_split` of the shapes.
  """
  return _forward(chunk, with_entropy, split, states, ids, table, temperature)[0]


def _on_devices(split: Split | None, function, inputs: tuple, outputs: tuple, *arrays):
  """Runs a function of local arrays on every device; `inputs` and `outputs` are their layouts."""
  if split is None:
    return function(*arrays)
  with jax.sharding.use_abstract_mesh(split.mesh):
    return jax.shard_map(function, mesh=split.mesh, in_specs=inputs, out_specs=outputs,
                         check_vma=False)(*arrays)


def _forward(chunk, with_entropy, split, states, ids, table, temperature):
  """Returns ((log-probabilities, entropies), what `_backward` needs)."""
  def local(states, ids, table, temperature):
    own = _share(table.astype(states.dtype), split)
    first = _first(own, split)

    def project(_, part):
      x, wanted = part
      scores = _scores(_gather(x, split), own, temperature)
      peak = jnp.max(scores, axis=-1)
      mass = jnp.exp(scores - peak[:, None])
      place = jnp.clip(wanted - first, 0, len(own) - 1)
      score = jnp.take_along_axis(scores, place[:, None], axis=1)[:, 0]
      score = jnp.where(place == wanted - first, score, 0)
      weighted = jnp.sum(mass * scores, axis=-1) if with_entropy else jnp.zeros_like(peak)
      return None, (peak, jnp.sum(mass, axis=-1), score, weighted)

    parts = _chunks(states, chunk), _gather(_chunks(ids, chunk), split, 1)
    _, (peak, mass, score, weighted) = jax.lax.scan(project, None, parts)
    if split is not None:
      highest = jax.lax.pmax(peak, split.shares)
      peak, scale = highest, jnp.exp(peak - highest)
      mass, score, weighted = jax.lax.psum((mass * scale, score, weighted * scale), split.shares)
    normaliser = peak + jnp.log(mass)
    entropies = normaliser - weighted / mass if with_entropy else jnp.zeros_like(mass)
    restore = lambda x: _take_own(x, split).reshape(-1)[:ids.size].reshape(ids.shape)
    return (restore(score - normaliser), restore(entropies)), own, restore(normaliser)

  shared = split and PartitionSpec(split.shares)
  results, own, normaliser = _on_devices(
    split, local, (ROWS, ROWS, split and split.table, WHOLE), ((ROWS, ROWS), shared, ROWS),
    states, ids, table, temperature)
  return results, (states, (ids, normaliser, results[1]), own, jnp.zeros(0, table.dtype), temperature)


def _backward(chunk, with_entropy, split, saved, cotangents):
  """Computes the gradients of states and table; what nobody asks for, the compiler leaves out."""
  states, vectors, own, like, temperature = saved

  def local(states, vectors, own, like, temperature):
    columns = _first(own, split) + jnp.arange(len(own))

    def project(total, part):
      x, vectors = part
      wanted, normaliser, entropy, by_logprob, by_entropy = (y[:, None] for y in vectors)
      x = _gather(x, split)
      logprobs = _scores(x, own, temperature) - normaliser
      probabilities = jnp.exp(logprobs)
      by_scores = jnp.where(columns == wanted, by_logprob, 0) - by_logprob * probabilities
      if with_entropy:  # dH/ds = -p (log p + H)
        by_scores -= by_entropy * probabilities * (logprobs + entropy)
      by_scores /= temperature
      # float32 operands too: rounded gradients of logits would show in long sums
      total += jnp.einsum('nv,nd->vd', by_scores, x.astype(jnp.float32), precision=PRECISION)
      by_x = jnp.einsum('nv,vd->nd', by_scores.astype(x.dtype), own.astype(x.dtype), precision=PRECISION,
                        preferred_element_type=jnp.float32)
      return total, _scatter(by_x, split).astype(x.dtype)

    vectors = jax.tree.map(lambda y: _chunks(y, chunk), vectors)
    parts = _chunks(states, chunk), _gather(vectors, split, 1)
    total, by_states = jax.lax.scan(project, jnp.zeros(own.shape), parts)
    D = states.shape[-1]
    by_states = by_states.reshape(-1, D)[:states.size // D].reshape(states.shape)
    return by_states, _return(total, split).astype(like.dtype)

  shared = split and PartitionSpec(split.shares)
  by_states, by_table = _on_devices(
    split, local, (ROWS, ROWS, shared, WHOLE, WHOLE), (ROWS, split and split.table),
    states, (*vectors, *cotangents), own, like, temperature)
  return by_states, None, by_table, None


token_logprobs.defvjp(_forward, _backward)


def _scores(states, table, temperature):
  """Returns [N,v] float32 logits, divided by the temperature."""
  scores = jnp.einsum('nd,vd->nv', states, table, precision=PRECISION, preferred_element_type=jnp.float32)
  return scores / temperature


def _chunks(x, chunk: int):
  """Cuts [R,M,...] into [count, c, ...], padded with zeros; chunks of one size, at most `chunk`."""
  x = x.reshape(-1, *x.shape[2:])
  count = -(-len(x) // chunk)
  size = -(-len(x) // count)
  x = jnp.pad(x, ((0, count * size - len(x)), *((0, 0),) * (x.ndim - 1)))
  return x.reshape(count, size, *x.shape[1:])


def _gather(tree, split: Split | None, axis: int = 0):
  """Gathers chunks of all devices of the group, one after the other along `axis`."""
  if split is None:
    return tree
  return jax.tree.map(lambda x: jax.lax.all_gather(x, 'fsdp', axis=axis, tiled=True), tree)


def _take_own(x, split: Split | None):
  """Takes a device's own [count, c] of [count, N]."""
  if split is None:
    return x
  size = x.shape[1] // split.mesh.shape['fsdp']
  return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index('fsdp') * size, size, axis=1)


def _scatter(x, split: Split | None):
  """Adds up [N,D] parts of sums over the vocabulary into [c,D] sums of a device's own positions."""
  if split is None:
    return x
  x = jax.lax.psum_scatter(x, 'fsdp', scatter_dimension=0, tiled=True)
  return jax.lax.psum(x, split.shares[:-1])


def _first(own, split: Split | None):
  """Returns the first entry of the vocabulary that a device has."""
  return 0 if split is None else jax.lax.axis_index(split.shares) * len(own)


def _share(table, split: Split | None):
  """Turns the layout of the parameters into [v,D], whole entries of the vocabulary."""
  if split is None:
    return table
  table = jax.lax.all_to_all(table, 'fsdp', split_axis=0, concat_axis=1, tiled=True)
  return jax.lax.all_gather(table, 'groups', axis=1, tiled=True)


def _return(gradient, split: Split | None):
  """Sums [v,D] over all positions, into the layout of the parameters."""
  if split is None:
    return gradient
  gradient = jax.lax.psum_scatter(gradient, 'groups', scatter_dimension=1, tiled=True)
  return jax.lax.all_to_all(jax.lax.psum(gradient, 'data'), 'fsdp', split_axis=1, concat_axis=0, tiled=True)
