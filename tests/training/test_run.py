"""A run that is killed ends where an uninterrupted one does, to the bit; several processes train as one.

All with real processes and real signals. Other instants of kills: set JAXSEARCH_KILL_SEED.
"""

import contextlib
import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import checks
from jaxsearch import registry
from jaxsearch.methods import find_method, known_methods
from jaxsearch.models.encoder import TextEncoder
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.tools import index_build
from jaxsearch.training import row_files
from jaxsearch.world import files as world
from tests.processes import free_port
from tests.sampler import rollout_servers
from tests.training import child

ROOT = pathlib.Path(__file__).parents[2]
SEED = int(os.environ.get('JAXSEARCH_KILL_SEED', '0'))
TIMES = ('seconds', 'tokens_per_second', 'compilations', 'resident_mib', 'goodput',
         'tokens_per_second_rollout', 'tokens_per_second_update')  # what may differ between runs
# What it took to grow the trees of a step.
COSTS = ('segments', 'steps', 'idle_share', 'tokens_prefilled', 'tokens_reused', 'pages_evicted')


@pytest.fixture(scope='module')
def start(tmp_path_factory):
  """start(command, out, *changes, **variables of the environment) -> the process; they share compiled programs."""
  inputs = tmp_path_factory.mktemp('inputs')
  child.make_inputs(inputs)
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(inputs / 'cache')
  path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path, 'JAX_COMPILATION_CACHE_DIR': cache,
                              'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}

  def start(command, out, *changes, devices=1, **variables):
    return subprocess.Popen([sys.executable, child.__file__, command, str(inputs), str(out), *changes],
                            env=environment | {'CHILD_DEVICES': str(devices)} | variables,
                            stderr=subprocess.PIPE, text=True)

  return start


def wait_for(condition, process):
  """Polls until `condition()`; the process must not end before."""
  deadline = time.monotonic() + 300
  while not condition():
    assert process.poll() is None, process.stderr.read()[-3000:]
    assert time.monotonic() < deadline, 'the run does not get there'
    time.sleep(0.002)


def finish(process, seconds=300):
  _, errors = process.communicate(timeout=seconds)
  return process.returncode, errors


def saved_arrays(out, step):
  """Every array of a checkpoint by its path, read without jaxsearch, whichever devices it was saved from."""
  found, reader = {}, ocp.PyTreeCheckpointer()
  for item in ('params', 'rest'):
    path = out / 'checkpoints' / str(step) / item
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).item_metadata.tree)
    arrays = ocp.tree.to_flat_dict(reader.restore(path, restore_args=wanted), sep='/')
    found |= {f'{item} {name}': value for name, value in arrays.items()}
  return found


def comparable(row):
  return {name: value for name, value in row.items() if not name.startswith('seconds_') and name not in TIMES + COSTS}


def assert_same(whole, other, files=()):
  """Two runs have the same checkpoints, the same rows but for times, and the same files."""
  steps = [sorted(int(path.name) for path in (run / 'checkpoints').iterdir()) for run in (whole, other)]
  assert steps[0] == steps[1]
  expected, found = (saved_arrays(run, steps[0][-1]) for run in (whole, other))
  assert expected.keys() == found.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  lines = [(run / 'metrics.jsonl').read_bytes().splitlines() for run in (whole, other)]
  rows, others = ([comparable(json.loads(line)) for line in own] for own in lines)
  assert rows == others and len({row['loss'] for row in rows}) == steps[0][-1]  # the steps are not all alike
  for name in files:
    assert (whole / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.timeout(600)
def test_kills_and_a_signal_change_nothing(start, tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  reference = start('train', whole, 'steps=8')

  process = start('train', broken, 'steps=8')
  wait_for(lambda: list(broken.glob('checkpoints/4*tmp*')), process)  # in the middle of a save
  process.kill()
  finish(process)
  rows = lambda: len(row_files.read(broken / 'metrics.jsonl'))
  assert not (broken / 'checkpoints' / '4').exists() and rows() == 4

  process = start('train', broken, 'steps=8')
  wait_for(lambda: rows() in (3, 5), process)  # those after step 2 are made again
  process.send_signal(signal.SIGTERM)
  code, errors = finish(process)
  assert code == 128 + signal.SIGTERM, errors[-3000:]
  stopped = max(int(path.name) for path in broken.glob('checkpoints/*'))
  assert [line for line in errors.splitlines() if 'compiled ' not in line] == [
    'jaxsearch: resuming at step 3', f'jaxsearch: stopped after step {stopped}; rerun the same command to resume']
  assert stopped == rows() >= 3  # saved where it stopped, on a step that no interval asks for or on the last

  finish_all([start('train', broken, 'steps=8'), reference])
  assert_same(whole, broken, ['rollouts.jsonl.gz'])
  assert [row['step'] for row in row_files.read(broken / 'metrics.jsonl')] == [1, 2, 3, 4, 5, 6, 7, 8]
  assert sorted(path.name for path in whole.glob('checkpoints/*')) == ['6', '8']  # keep_checkpoints=2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(('command', 'changes', 'files'), [
  ('train', ['steps=10', 'eval.every=3'], ['evaluations.jsonl', 'rollouts.jsonl.gz']),
  ('train', ['steps=10', 'eval.every=3', 'train.async_steps=1'], ['evaluations.jsonl', 'rollouts.jsonl.gz']),
  ('critic-warmup', ['critic_warmup.min_updates=8', 'critic_warmup.check_every=2'],
   ['closed_book.jsonl', 'tiers.jsonl', 'rollouts.jsonl', 'calibration.png']),
])
def test_kills_at_random_instants_change_nothing(start, tmp_path, command, changes, files):
  whole, broken, rng = tmp_path / 'whole', tmp_path / 'broken', np.random.default_rng(SEED)
  finish_all([start(command, tmp_path / 'first', *changes)])  # fills the compilation cache
  began = time.monotonic()
  finish_all([start(command, whole, *changes)])
  seconds = time.monotonic() - began
  for _ in range(12):
    process = start(command, broken, *changes)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(rng.uniform(0.3, 1) * seconds)  # before that it imports
    process.kill()
    finish(process)
    print(sorted(path.name for path in broken.glob('checkpoints/*')), flush=True)
  finish_all([start(command, broken, *changes)])
  assert_same(whole, broken, files)


def start_processes(start, number, command, out, *changes, machines=None):
  """A run in several processes of one device each; `machines` are variables of the environment of each."""
  address = f'"localhost:{free_port()}"'
  changes = [*changes, 'distributed.enabled=true', f'distributed.coordinator={address}',
             f'distributed.num_processes={number}']
  return [start(command, out, *changes, f'distributed.process_id={process}', **variables)
          for process, variables in enumerate(machines or [{}] * number)]


def finish_all(processes):
  for process in processes:
    code, errors = finish(process, 3600)
    assert code == 0, errors[-3000:]


def run_as_one_and_two(start, command, folder, *changes):
  """The same run on two devices of one process, in FOLDER/one, and on those of two, in FOLDER/two."""
  finish_all([start(command, folder / 'one', *changes, devices=2),
              *start_processes(start, 2, command, folder / 'two', *changes)])


def assert_alike(folder, other, step):
  """Two runs have the same trees, figures and parameters, as far as rounding allows."""
  rows, others = (row_files.read(run / 'metrics.jsonl') for run in (folder, other))
  assert len(rows) == len(others) == step
  exact = ('reward', 'em', 'trees', 'searches', 'drawn_per_tree', 'tokens_generated', 'tokens_on_paths',
           'reward_retained')
  for row, found in zip(rows, others, strict=True):
    assert row.keys() == found.keys()
    for name in row.keys() & {*exact}:
      assert row[name] == pytest.approx(found[name], rel=1e-12), name
    for name in row.keys() & {'loss', 'logprob', 'entropy', 'grad_norm', 'critic_loss'}:
      assert row[name] == pytest.approx(found[name], rel=1e-3, abs=1e-6), name
  assert_parameters_alike(folder, other, step)


def assert_parameters_alike(folder, other, step):
  expected, found = saved_arrays(folder, step), saved_arrays(other, step)
  assert expected.keys() == found.keys()
  for name in (name for name in expected if name.startswith('params')):
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('ahead', [0, 1])
def test_two_processes_train_as_one(start, tmp_path, ahead):
  """Tokens, what generators draw, and parameters; five questions a step do not split evenly."""
  changes = ['steps=2', 'mesh.fsdp=2', 'eval.every=2', f'train.async_steps={ahead}', 'train.refill=3']
  run_as_one_and_two(start, 'train', tmp_path, *changes)
  assert [row['n'] for row in row_files.read(tmp_path / 'two/evaluations.jsonl')] == [6] * 4
  assert_alike(tmp_path / 'one', tmp_path / 'two', 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('command', ['train', 'critic-warmup'])
def test_two_processes_sample_on_the_same_servers(start, tmp_path, command):
  """Both ask both; each server is told of new weights once, by one of them. Trees are those of one process."""
  tokenizer = Tokenizer.load(world.folder())
  writes = lambda text, seed: f' The {child.WORDS[seed % 12]} of the {child.WORDS[seed % 7]}.'
  servers = [rollout_servers.Vllm(tokenizer, writes) for _ in range(3)]
  with contextlib.ExitStack() as stack:
    alone, *urls = (stack.enter_context(rollout_servers.serving(server)) for server in servers)
    changes = ['mesh.fsdp=2', 'sampler.engine="vllm"', *['steps=2', 'eval.every=2'] * (command == 'train')]
    finish_all([start(command, tmp_path / 'one', *changes, f'sampler.urls="{alone}"', devices=2),
                *start_processes(start, 2, command, tmp_path / 'two', *changes, f'sampler.urls="{",".join(urls)}"')])
  told = [[body['new_version'] for path, body in server.seen if path == '/update_weight_version'] for server in servers]
  assert told[1] == told[2] and len(set(told[1])) == len(told[1]) == len(told[0]) > 0
  asked = [sum(path == '/inference/v1/generate' for path, _ in server.seen) for server in servers]
  assert asked[1] > asked[0] / 3 and asked[2] > asked[0] / 3
  if command == 'train':
    assert_alike(tmp_path / 'one', tmp_path / 'two', 2)
    assert all(row['requests_failed'] == row['servers_reloaded'] == 0 for row in row_files.read(tmp_path / 'two/metrics.jsonl'))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dense_index_is_searched_on_the_devices_that_train(start, tmp_path):
  """By the rollouts one step ahead, in two processes of two devices each."""
  transformers = pytest.importorskip('transformers')
  folder, corpus = tmp_path / 'e5', tmp_path / 'corpus.jsonl'
  transformers.BertModel(transformers.BertConfig(
    vocab_size=2000, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=64)).save_pretrained(folder)
  shutil.copy(registry.find('tokenizers', 'world') / 'tokenizer.json', folder)
  corpus.write_text(''.join(json.dumps({'id': word, 'contents': f'"{word}"\nThe {word}.'}) + '\n'
                            for word in child.WORDS))
  index_build.build(corpus, tmp_path / 'index', 'dense', encoder=TextEncoder(folder, 'e5'))
  changes = ['steps=2', 'mesh.fsdp=4', 'train.micro_rows=4', 'train.async_steps=1',
             'search.backend="index"', f'search.index="{tmp_path / "index"}"']
  two = start_processes(start, 2, 'train', tmp_path / 'two', *changes, machines=[{'CHILD_DEVICES': '2'}] * 2)
  finish_all([start('train', tmp_path / 'one', *changes, devices=4), *two])
  assert_alike(tmp_path / 'one', tmp_path / 'two', 2)


METHODS = (  # of IGPO's gains apart, a thousandth here, the deviation is hardly above rounding
  ('cusearch', 'credit.strategy="auto"', 'sizes.adaptive=true'), ('search_r1_ppo',), ('carl',), ('slate',),
  ('search_r2',), ('r_search_ppo', 'seed=1'), ('r_search',), ('search_r1_grpo',), ('step_search',), ('research',), ('r1',),
  ('zerosearch',), ('cusearch', 'credit.drop_alike=true'), ('igpo', 'credit.joint=true'), ('gigpo',), ('tree_grpo',), ('trace',),
  *(('cusearch', f'credit.strategy="{strategy}"') for strategy in checks.FIELDS['credit.strategy']),
)


def test_every_method_that_trains_is_compared():
  trained = {name for name in known_methods() if hasattr(find_method(name), 'credit')}
  assert {importlib.import_module(f'configs.{name}').get_config().method for name, *_ in METHODS} == trained


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize('first', range(0, len(METHODS), 4))
def test_four_processes_train_every_method_as_one(start, tmp_path, first):
  methods = METHODS[first:first + 4]
  changes = [*map(json.dumps, methods), 'mesh.fsdp=4']
  finish_all([start('configs', tmp_path / 'one', *changes, devices=4),
              *start_processes(start, 4, 'configs', tmp_path / 'four', *changes)])
  for number, method in enumerate(methods):
    print(*method)
    assert_alike(tmp_path / 'one' / str(number), tmp_path / 'four' / str(number), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_warm_a_critic_up_as_one(start, tmp_path):
  run_as_one_and_two(start, 'critic-warmup', tmp_path, 'mesh.fsdp=2')
  for name in ('closed_book', 'tiers', 'rollouts', 'answers_0', 'answers_4'):
    one, two = (row_files.read(tmp_path / f'{folder}/{name}.jsonl') for folder in ('one', 'two'))
    for node in (node for row in (*one, *two) for node in row.get('nodes', ())):
      del node['sampler_logprobs']  # their last bits depend on what shares the device
    assert one == two, name
  rows, others = (row_files.read(tmp_path / name / 'metrics.jsonl') for name in ('one', 'two'))
  assert len(rows) == len(others) == 4
  for row, other in zip(rows, others):
    gate = [name for name in row if name.startswith('gate_') and row[name] is not None]
    for name in ('loss', 'grad_norm', *gate):
      assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
  assert_parameters_alike(tmp_path / 'one', tmp_path / 'two', 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_for_one_process_stops_all_after_the_same_step(start, tmp_path):
  out = tmp_path / 'run'
  processes = start_processes(start, 2, 'train', out, 'steps=500', 'checkpoint_every=500', 'mesh.fsdp=2')
  wait_for(lambda: row_files.read(out / 'metrics.jsonl'), processes[0])
  processes[1].send_signal(signal.SIGTERM)
  found = [finish(process) for process in processes]
  stopped = len(row_files.read(out / 'metrics.jsonl'))
  assert [code for code, _ in found] == [143, 143], found[1][1][-3000:]
  assert f'jaxsearch: stopped after step {stopped}; rerun the same command to resume' in found[0][1].splitlines()
  assert [path.name for path in (out / 'checkpoints').iterdir()] == [str(stopped)]
  changes = [f'steps={stopped + 1}', 'mesh.fsdp=2']
  finish_all([start('train', out, *changes, devices=2)])  # in one process
  assert [row['step'] for row in row_files.read(out / 'metrics.jsonl')] == list(range(1, stopped + 2))
