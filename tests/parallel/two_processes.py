"""Two training steps on a mesh of four devices. test_mesh.py calls `figures` and starts this file once a process.

usage: two_processes.py PORT PROCESS PROCESSES [compile | wait | fail | restore=FOLDER]
"""

import collections
import socket
import sys
import threading

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from configs import base
from jaxsearch import cli
from jaxsearch.models.architecture import DecoderConfig, initial_params, parameter_axes, parameter_shapes
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.training import checkpoint, sft, state as states

NUMBERS = DecoderConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2,
                        head_dim=8, tie_embeddings=True)


def figures(devices=None) -> list[float]:
  """Losses of two steps, the share of padding, and the sum of absolute parameters as each process's sampler gets them."""
  mesh = meshes.make_mesh(1, 4, 1, devices=devices)
  rng = np.random.default_rng(0)
  forest = [sft.demonstration(rng.integers(1, 32, length), rng.integers(0, 2, length).astype(bool))
            for length in (12, 10) * 6]  # the second process pads more
  placed = meshes.shardings(parameter_axes(NUMBERS), parameter_shapes(NUMBERS), mesh)
  params = states.place_params(jax.tree.map(np.asarray, initial_params(NUMBERS, jax.random.key(0))), placed)
  config = base.get_config().unlock()
  config.train.update(row_length=24, micro_rows=4)
  config.optim.update(learning_rate=1e-2, lr_warmup_updates=0)
  state, learn = sft.open_imitation(config, NUMBERS, params, mesh)
  losses = []
  for _ in range(2):
    state, row = learn(state, forest)
    losses.append(row['loss'])
  own = transfer.local(state.params)
  for name, x in own['layers'].items():
    assert set(x.sharding.mesh.devices.flat) <= set(jax.local_devices())
    if jax.process_count() > 1 and x.ndim > 2:
      assert all(shard.data.size == x.size // jax.local_device_count() for shard in x.addressable_shards), name
  total = sum(float(np.abs(np.asarray(x, np.float64)).sum()) for x in jax.tree.leaves(jax.device_get(own)))
  return [*losses, row['padded_share'], total]


def main(port: str, process: str, processes: str, what: str = '') -> None:
  port, process, processes = int(port), int(process), int(processes)
  jax.config.update('jax_num_cpu_devices', 4 // processes)
  meshes.start_distributed(True, f'localhost:{port}', processes, process)
  with socket.socket() as stranger:
    assert stranger.connect_ex(('127.0.0.2', port)), 'the coordinator listens beyond the address that it was given'
  if what == 'compile':
    return count_compilations()
  if what == 'wait':
    return wait_in_vain()
  if what == 'fail':  # the second
    sys.exit(cli.main(['nonsense']) if process else transfer.gather_objects(0))
  if what.startswith('restore='):
    return restore(what.removeprefix('restore='))
  check_gathering(process, processes)
  print('figures', *figures())


def count_compilations() -> None:
  """Prints how many programs are not in the compilation cache: of all processes, and of this one alone."""
  events = collections.Counter()
  jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split('/')[-1]]))
  mesh = meshes.make_mesh()
  for devices in (mesh, meshes.local_mesh(mesh)):
    placed = transfer.place(np.ones(8), transfer.split_over_batch(devices, 0))
    jax.jit(lambda x: x - x.sum())(placed).block_until_ready()
  print('compiled', events['compile_requests_use_cache'] - events['cache_hits'])


def wait_in_vain() -> None:
  """Prints what the first process says of the second, which sends nothing."""
  transfer.PATIENCE, waits = 1, (lambda: transfer.gather_objects(0), lambda: transfer.pass_on([], [(1, 0)]))
  found = []
  for wait in () if jax.process_index() else waits:
    try:
      wait()
    except TimeoutError as error:
      found.append(str(error).split(';')[0])
  print(*found, sep=', ')


def restore(folder: str) -> None:
  """Prints the step that is resumed from, as checkpoints are saved on a CPU and as on accelerators.

  The second process cannot read the newest checkpoint, and lists one that is not there.
  """
  mesh, found = meshes.make_mesh(1, 4, 1), []
  params = {'w': transfer.place(np.ones(8), transfer.split_over_batch(mesh, 0))}
  state = states.create_state(params, optax.sgd(0.1), mesh)
  if jax.process_index():
    listed, read = checkpoint.all_steps, ocp.StandardCheckpointHandler.restore

    def torn(self, directory, *arguments, **others):
      if directory.parent.name == '2' and directory.name == 'rest':
        raise FileNotFoundError('gone')
      return read(self, directory, *arguments, **others)

    checkpoint.all_steps, ocp.StandardCheckpointHandler.restore = (lambda manager: [3, *listed(manager)]), torn
  for backend in ('cpu', 'gpu'):
    jax.default_backend = lambda name=backend: name
    with checkpoint.open_checkpoints(f'{folder}/{backend}', keep=3) as manager:
      for step in (1, 2):
        own = states.create_state({'w': step * params['w']}, optax.sgd(0.1), mesh)
        checkpoint.save(manager, step, own, {'step': step})
      checkpoint.wait(manager)
      step, restored = checkpoint.newest(manager, lambda step: (step, checkpoint.restore(manager, step, state)))
      found += [step, float(restored.params['w'].sum())]
  print('resumed', *found)


def check_gathering(process: int, processes: int) -> None:
  """Gathers on two threads at once, which begin in the opposite order in every process."""
  names, done = ['growing', 'training'], []

  def gather():
    name = threading.current_thread().name
    for number in range(20):
      assert transfer.gather_objects([name, process, number]) == [[name, other, number] for other in range(processes)]
    done.append(name)

  threads = [threading.Thread(target=gather, name=name) for name in names[::(-1) ** process]]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(done) == names


if __name__ == '__main__':
  main(*sys.argv[1:])
