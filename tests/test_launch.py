"""Every script of launch/ is sound and says what it would do; what `srun`, `scontrol` and the cloud do is
played by stand-ins."""

import glob
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import psutil
import pytest
import yaml

from jaxsearch.parallel import mesh as meshes
from jaxsearch.training import row_files, saved_policies
from tests.processes import free_port
from tests.sampler import rollout_servers
from tests.tools.serving import send, server
from tests.training import child

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / 'launch'
SCRIPTS = sorted(path.name
                 for path in (*LAUNCH.glob('*.sh'), LAUNCH / 'slurm.sbatch') if path.name != 'environment.sh')
TINY = ['--config.steps=4', '--config.questions_per_step=2', '--config.group_size=2', '--config.eval.every=0',
        '--config.checkpoint_every=1', '--config.data.number=6', '--config.sampler.slots=4',
        '--config.train.micro_rows=2',
        '--config.progress=False']
JOB = {'CONFIG': 'quickstart', 'NAME': 'night', 'IMAGE': 'registry/jaxsearch:1', 'CLUSTER': 'pod',
       'ZONE': 'here'}


def run(script: str, *arguments: str, launch: pathlib.Path = LAUNCH, **changes: str) -> subprocess.CompletedProcess:
  return subprocess.run(['bash', str(launch / script), *arguments], text=True, capture_output=True,
                        timeout=60,
                        env=os.environ | JOB | changes)


def stand_in(folder: pathlib.Path, name: str, text: str) -> None:
  folder.mkdir(exist_ok=True)
  (folder / name).write_text(f'#!/usr/bin/env bash\n{text}\n')
  (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path):
  """A folder for PATH: jaxsearch, and SLURM with two tasks on this machine; what scontrol was asked stands in
  `asked`."""
  folder = tmp_path / 'programs'
  stand_in(folder, 'sleep', f'case $1 in 5) set 1 ;; 10) set 3 ;; esac; exec {shutil.which("sleep")} "$1"')  # of run.sh
  stand_in(folder, 'jaxsearch', f'exec {sys.executable} -m jaxsearch.cli "$@"')
  stand_in(folder, 'scontrol', f'echo "$@" >> {tmp_path / "asked"}\n[ "$1" = requeue ] || echo 127.0.0.1')
  stand_in(folder, 'scancel', f'[ "$1" = --signal=TERM ] && kill -TERM "$(cat {tmp_path}/steps-$2)"')
  stand_in(folder, 'srun', f'echo $$ > {tmp_path}/steps-$SLURM_JOB_ID' + '''
shift  # --kill-on-bad-exit=0
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
highest=0
for task in "${tasks[@]}"; do
  while kill -0 "$task" 2> /dev/null; do wait "$task"; status=$?; done
  [ "$status" -le "$highest" ] || highest=$status
done
exit $highest''')
  yield folder
  for process in psutil.process_iter(['environ']):  # what a failed test leaves
    if (process.info['environ'] or {}).get('OUT', '').startswith(str(tmp_path)):
      process.kill()


@pytest.fixture
def launch(tmp_path):
  """The scripts in a checkout without a virtual environment, which would come before PATH."""
  return pathlib.Path(shutil.copytree(LAUNCH, tmp_path / 'checkout/launch'))


def task(out: pathlib.Path, number: int) -> psutil.Process:
  """The training process of a task of the job that writes to `out`."""
  wanted = {f'--config.out={out}', f'--config.distributed.process_id={number}'}
  return next(process
              for process in psutil.process_iter(['cmdline']) if wanted <= set(process.info['cmdline'] or ()))


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='needs shellcheck')
def test_shellcheck_finds_nothing():
  found = subprocess.run(['shellcheck', '-x', '-P', str(LAUNCH), *(str(LAUNCH / name) for name in SCRIPTS)],
                         text=True,
                         capture_output=True)
  assert not found.returncode, found.stdout


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_dry_run_says_what_would_be_done_and_does_nothing(script, launch, tmp_path):
  found = run(script, '--config.steps=7', '--dry-run', '--config.data.questions=a b.jsonl', launch=launch,
              OUT=str(tmp_path / 'run'), HOSTS='2')
  assert found.returncode == 0, found.stderr
  assert '--config.steps=7' in found.stdout and '--dry-run' not in found.stdout
  assert re.search(r'questions=a(\\+ b\.jsonl| b\.jsonl")', found.stdout)  # one word, of a shell or of JSON
  assert list(launch.parent.iterdir()) == [launch] and not (tmp_path / 'run').exists()


def test_a_pod_does_not_start_where_it_would_lose_its_run(programs, tmp_path):
  stand_in(programs, 'kubectl', f'cat > {tmp_path / "applied"}')
  stand_in(programs, 'envsubst', 'cat')
  job = dict(PATH=f'{programs}:{os.environ["PATH"]}')
  found = run('gke.sh', **job, OUT='runs/first')
  assert found.returncode == 2 and found.stderr.startswith('gke.sh: OUT=runs/first would be lost with its pod')
  for place in ('/data/runs/first', 'gs://bucket/first'):
    assert not (tmp_path / 'applied').exists()
    assert run('gke.sh', **job, OUT=place).returncode == 0
    (tmp_path / 'applied').unlink()


def test_the_job_becomes_one_command(tmp_path):
  found = run('run.sh', '--dry-run', '--config.steps=7', MODEL='/data/a model', QUESTIONS='q.jsonl',
              OUT='/data/run',
              RETRIEVER='--index /data/wiki18', PORT='8123', HOSTS='4', COORDINATOR='first:1234',
              PROCESS_ID='3')
  serve, train = map(shlex.split, found.stdout.splitlines()[-2:])
  assert serve[:2] == ['env', 'JAX_PLATFORMS=cpu']
  assert serve[3:] == ['serve', '--index', '/data/wiki18', '--port', '8123']
  assert train[1:] == [
    'train', '--config', 'quickstart', '--config.out=/data/run', '--config.model=/data/a model',
    '--config.data.questions=q.jsonl', '--config.search.backend=http',
    '--config.search.url=http://127.0.0.1:8123/retrieve',
    '--config.distributed.enabled=True', '--config.distributed.coordinator=first:1234',
    '--config.distributed.num_processes=4',
    '--config.distributed.process_id=3', '--config.steps=7']


def test_a_host_with_several_processes_splits_its_gpus(tmp_path):
  job = dict(OUT=str(tmp_path), PROCESSES='2', TRAIN_GPUS='0,1,2,5')
  found = run('run.sh', '--dry-run', '--config.steps=7', **job, HOSTS='3', PROCESS_ID='1', COORDINATOR='first:1234')
  for number, line in enumerate(found.stdout.splitlines()[-2:]):
    words = shlex.split(line)
    assert words[:2] == ['env', f'JAX_LOCAL_DEVICE_IDS={("0,1", "2,5")[number]}']
    assert words[-3:] == ['--config.distributed.num_processes=6', f'--config.distributed.process_id={2 + number}',
                          '--config.steps=7']
  alone = run('run.sh', '--dry-run', **job).stdout.splitlines()[-1]
  assert 'coordinator=127.0.0.1:8476' in alone and 'num_processes=2' in alone and 'process_id=1' in alone
  for wrong in (dict(PROCESSES='3'), dict(HOSTS='auto')):
    refused = run('run.sh', '--dry-run', **job | wrong)
    assert refused.returncode == 2 and 'PROCESSES' in refused.stderr


def test_a_search_server_gets_the_gpus_that_are_named_for_it(tmp_path):
  job = dict(OUT=str(tmp_path), RETRIEVER='--index /data/wiki18', RETRIEVER_GPUS='6,7')
  found = run('run.sh', '--dry-run', **job, TRAIN_GPUS='0,1,2,3,4,5')
  serve = shlex.split(found.stdout.splitlines()[-2])
  assert serve[:3] == ['env', 'JAX_PLATFORMS=cuda', 'CUDA_VISIBLE_DEVICES=6,7']
  refused = run('run.sh', '--dry-run', **job)
  assert refused.returncode == 2 and 'RETRIEVER_GPUS and ROLLOUT_GPUS need TRAIN_GPUS' in refused.stderr


@pytest.mark.parametrize('script', ['run.sh', 'slurm.sbatch'])
@pytest.mark.parametrize(('engine', 'command'), [
  ('vllm', 'VLLM_SERVER_DEV_MODE=1 python3 -m vllm.entrypoints.cli.main serve /w/Qwen --enable-scale-out '
           '--enable-prompt-tokens-details'),
  ('sglang', 'python3 -m sglang.launch_server --model-path /w/Qwen')])
def test_a_rollout_server_starts_beside_the_job(engine, command, script, tmp_path):
  job = dict(OUT=str(tmp_path), ROLLOUT=engine, MODEL='/w/Qwen', ROLLOUT_GPUS='2,3', TRAIN_GPUS='0,1',
             ROLLOUT_ARGS='--dtype=bfloat16')
  server, train = run(script, '--dry-run', **job, SLURM_GPUS_ON_NODE='4').stdout.replace('\\', '').splitlines()[-2:]
  assert server.split() == ['env', 'CUDA_VISIBLE_DEVICES=2,3', *command.split(), '--host', '127.0.0.1', '--port',
                            '8001', '--dtype=bfloat16']
  assert f'--config.sampler.engine={engine} --config.sampler.urls=http://127.0.0.1:8001' in train
  found = run('run.sh', '--dry-run', **job | {'ROLLOUT_URLS': 'http://a:1,http://b:1'}).stdout.replace('\\', '')
  assert '--config.sampler.urls=http://a:1,http://b:1' in found and command not in found
  refused = run('run.sh', '--dry-run', **job, HOSTS='auto')
  assert refused.returncode == 2 and 'TPUs: ROLLOUT needs ROLLOUT_URLS' in refused.stderr
  refused = run('run.sh', '--dry-run', OUT=str(tmp_path), ROLLOUT_URLS='http://a:1')
  assert refused.returncode == 2 and 'ROLLOUT_URLS needs ROLLOUT' in refused.stderr


@pytest.mark.parametrize(('script', 'gpus'), [('gke.sh', True), ('xpk.sh', False), ('tpu-vm.sh', False)])
def test_the_servers_of_a_job_are_passed_on(script, gpus):
  given = {'RETRIEVER': '--index=/data/wiki18', 'PORT': '8123', 'ROLLOUT': 'vllm', 'ROLLOUT_URLS': 'http://a:1',
           'RETRIEVER_GPUS': '7', 'TRAIN_GPUS': '0-6', 'PROCESSES': '7'}
  text = run(script, '--dry-run', **given, JAXSEARCH_SEARCH_TOKEN='s3cret').stdout.replace('\\', '')
  assert 's3cret' not in text
  for name, value in list(given.items())[:None if gpus else 4]:  # the others rent TPUs
    assert f'name: {name}, value: "{value}"' in text or f' {name}={value} ' in text


def test_keys_travel_in_files_and_a_tpu_vm_gets_what_is_committed(programs, launch, tmp_path):
  stand_in(programs, 'git', '[ "$1" != status ] || echo -n "$CHANGED"')
  stand_in(programs, 'gcloud', f'echo "$@" >> {tmp_path}/said; [ "$4" != scp ] || cp "$6" {tmp_path}/keys')
  stand_in(programs, 'xpk', f'''echo "$@" >> {tmp_path}/said
while [ "$1" != --env-file ]; do shift; done
cp "$2" {tmp_path}/names''')
  job = dict(launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', JAXSEARCH_SEARCH_TOKEN='s3 cret', PYTHON='my_python',
             OPENAI_API_KEY='')
  found = run('tpu-vm.sh', **job, CHANGED=' M configs/mine.py')
  assert found.returncode == 2 and 'commit' in found.stderr and not (tmp_path / 'said').exists()
  assert run('tpu-vm.sh', **job).returncode == run('xpk.sh', **job).returncode == 0
  assert (tmp_path / 'keys').read_text() == 'export JAXSEARCH_SEARCH_TOKEN=s3\\ cret\n'
  assert (tmp_path / 'keys').stat().st_mode & 0o077 == 0
  assert (tmp_path / 'names').read_text() == 'JAXSEARCH_SEARCH_TOKEN\n'
  said = (tmp_path / 'said').read_text()
  assert 'cret' not in said and ' PYTHON=my_python ' in said and '--restart-on-exit-codes 3,70,75' in said


def test_uv_fetches_a_newer_python(programs, launch):
  stand_in(programs, 'python3', 'exit 1')  # as if it were older
  found = run('quickstart.sh', '--dry-run', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', PYTHON='python3')
  assert found.returncode == 0 and 'python3 is not Python 3.11' in found.stderr
  pip, uv = found.stdout.splitlines()[:2]
  assert re.search(r'pip install .*--target \S+ uv', pip) and uv.endswith('--seed --python 3.12 .venv ')


@pytest.mark.parametrize(('gpus', 'platforms'), [('4', 'none'), ('', 'cpu')])
def test_the_cpu_of_a_login_node_is_not_that_of_a_job_with_gpus(programs, launch, gpus, platforms):
  stand_in(programs, 'srun', 'echo platforms=${JAX_PLATFORMS-none}')
  found = run('slurm.sbatch', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', JAX_PLATFORMS='cpu',
              SLURM_GPUS_ON_NODE=gpus)
  assert found.stdout.split() == [f'platforms={platforms}']


@pytest.mark.parametrize(('hosts', 'given', 'expected'), [
  ('1', '', 'checkout/.jax_cache'), ('2', '', '/shared/runs/.jax_cache'),
  ('auto', '', '/shared/runs/.jax_cache'),
  ('2', '/my/cache', '/my/cache')])
def test_hosts_share_what_they_have_compiled(programs, launch, hosts, given, expected):
  stand_in(programs, 'jaxsearch', 'echo $JAX_COMPILATION_CACHE_DIR')
  found = run('run.sh', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', OUT='/shared/runs/first', HOSTS=hosts,
              JAX_COMPILATION_CACHE_DIR=given)
  assert found.stdout.splitlines() == [str(launch.parents[1] / expected)]


def test_xla_keeps_no_cache_of_its_own_in_a_bucket(programs, launch):
  stand_in(programs, 'jaxsearch', 'echo $JAX_COMPILATION_CACHE_DIR $JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES')
  found = run('run.sh', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', OUT='gs://bucket/run', HOSTS='2',
              JAX_COMPILATION_CACHE_DIR='')
  assert found.stdout.split() == ['gs://bucket/.jax_cache', 'none']


@pytest.mark.parametrize(('hosts', 'expected'), [('1', '0,1 0,1,2,3'), ('2', '0,1')])
def test_training_has_the_gpus_that_are_left_for_it(programs, launch, hosts, expected):
  stand_in(programs, 'jaxsearch', 'echo $CUDA_VISIBLE_DEVICES $JAX_LOCAL_DEVICE_IDS')
  found = run('run.sh', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', HOSTS=hosts, TRAIN_GPUS='0,1',
              JAX_LOCAL_DEVICE_IDS='0,1,2,3', CUDA_VISIBLE_DEVICES='')
  assert found.stdout.strip() == expected


def test_training_waits_for_a_search_server_elsewhere(programs, launch):
  stand_in(programs, 'jaxsearch', 'echo trained')
  port = free_port()
  environment = JOB | {'PATH': f'{programs}:{os.environ["PATH"]}', 'SEARCH_URL': f'http://127.0.0.1:{port}/retrieve'}
  with subprocess.Popen(['bash', str(launch / 'run.sh')], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        env=os.environ | environment) as job:
    assert job.stderr.readline() == f'run.sh: waiting for http://127.0.0.1:{port}/retrieve\n'
    with server((404, {}), port=port):
      assert job.communicate(timeout=60)[0] == 'trained\n'


def test_an_installation_that_failed_is_not_taken_for_done(programs, launch):
  (launch.parent / '.venv').mkdir()
  for name, text in {'python3': '', 'pip': '', 'python': 'exit 1'}.items():
    stand_in(launch.parent / '.venv/bin', name, text)
  found = subprocess.run(['bash', '-c', 'source launch/environment.sh; install .'], cwd=launch.parent, env=os.environ)
  assert found.returncode == 1 and not list((launch.parent / '.venv').glob('installed-*'))


@pytest.mark.parametrize('rented', [
  {'HOSTS': '4'},
  {'HOSTS': '2', 'RESOURCE': 'nvidia.com/gpu', 'DEVICES': '8',
   'NODES': '{"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}', 'ROLLOUT': 'sglang', 'MODEL': '/data/Qwen',
   'ROLLOUT_GPUS': '4,5,6,7', 'TRAIN_GPUS': '0,1,2,3', 'ROLLOUT_PYTHON': '/sglang/bin/python',
   'ROLLOUT_ARGS': r'--tp-size=4 --options={"path": "a\\b"}'}])
def test_the_jobset_is_a_valid_job_for_tpus_and_gpus(rented):
  kubernetes_validate = pytest.importorskip('kubernetes_validate')
  found = yaml.safe_load(run('gke.sh', '--dry-run', '--config.grow.max_tokens=5', 'say "hello"',
                             **rented).stdout)
  assert found['kind'] == 'JobSet' and found['metadata']['name'] == 'night'
  [replicated] = found['spec']['replicatedJobs']
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'night'},
         'spec': replicated['template']['spec']}
  kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
  [container] = job['spec']['template']['spec']['containers']
  [rule], [failed] = found['spec']['failurePolicy']['rules'], job['spec']['podFailurePolicy']['rules']
  assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
  assert failed['onExitCodes'] == {'containerName': container['name'], 'operator': 'In', 'values': [1, 2]}
  assert container['envFrom'] == [{'secretRef': {'name': 'night-keys', 'optional': True}}]
  assert container['args'] == ['--config.grow.max_tokens=5', 'say "hello"']
  assert job['spec']['completions'] == int(rented['HOSTS'])
  devices = {rented.get('RESOURCE', 'google.com/tpu'): int(rented.get('DEVICES', 4))}
  assert container['resources']['limits'] == devices
  environment = {one['name']: one['value'] for one in container['env']}
  said = run('run.sh', '--dry-run', *container['args'], **environment, JOB_COMPLETION_INDEX='1').stdout.replace('\\', '')
  pod = said.splitlines()[-1]
  assert f'num_processes={rented["HOSTS"]}' in pod and 'process_id=1' in pod
  assert 'coordinator=night-hosts-0-0.night:8476' in pod
  if 'ROLLOUT' in rented:
    assert 'sampler.engine=sglang --config.sampler.urls=http://127.0.0.1:8001' in pod
    assert said.splitlines()[-2].rstrip() == (
      'env CUDA_VISIBLE_DEVICES=4,5,6,7 /sglang/bin/python -m sglang.launch_server --model-path /data/Qwen '
      '--host 127.0.0.1 --port 8001 --tp-size=4 --options={"path": "ab"}')


def test_what_is_installed_can_serve(launch):
  found = run('run.sh', '--dry-run', launch=launch, EXTRAS='tpu', PATH='/usr/bin:/bin')
  assert '-e .[tpu,serve]' in found.stdout.replace('\\', '')


def test_skypilot_and_the_notebook_have_the_scripts_names():
  task = yaml.safe_load((LAUNCH / 'skypilot.yaml').read_text())
  assert '$EXTRAS,serve]' in task['setup']
  names = {line.split('=')[0] for line in (LAUNCH / 'job.env').read_text().splitlines() if '=${' in line}
  assert set(task['envs']) - {'ARGUMENTS'} <= names
  run_on_rank_1 = subprocess.run(
    ['bash', '-euc', task['run'].replace('launch/run.sh', 'launch/run.sh --dry-run')], cwd=ROOT, text=True,
    capture_output=True,
    env=os.environ | task['envs'] | {'ARGUMENTS': '--config.steps=5', 'SKYPILOT_NUM_NODES': '2',
                                     'SKYPILOT_NODE_RANK': '1',
                                     'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2'})
  assert 'coordinator=10.0.0.1:8476' in run_on_rank_1.stdout and 'process_id=1' in run_on_rank_1.stdout
  assert run_on_rank_1.stdout.rstrip().endswith('--config.steps=5')
  notebook = json.loads((LAUNCH / 'notebook.ipynb').read_text())
  code = ''.join(''.join(cell['source']) for cell in notebook['cells'] if cell['cell_type'] == 'code')
  assert 'launch/quickstart.sh' in code and all(not cell.get('outputs') for cell in notebook['cells'])


def test_a_process_that_dies_is_started_again_and_a_mistake_is_not(programs, launch, tmp_path):
  stand_in(programs, 'jaxsearch', f'''
echo run >> {tmp_path / "runs"}
[ "$(wc -l < {tmp_path / "runs"})" -ge 3 ] || kill -KILL $$
exit ${{FINAL:-0}}''')
  path = f'{programs}:{os.environ["PATH"]}'
  found = run('run.sh', launch=launch, PATH=path, RESTARTS='3')
  assert found.returncode == 0 and 'status 137, 3 restarts left' in found.stderr
  assert '2 restarts left' in found.stderr
  found = run('run.sh', launch=launch, PATH=path, FINAL='2')
  assert found.returncode == 2 and len((tmp_path / 'runs').read_text().splitlines()) == 4


@pytest.mark.parametrize('mistaken', ['0', '1'])
def test_a_mistake_in_one_of_several_processes_ends_the_job(programs, launch, tmp_path, mistaken):
  stand_in(programs, 'jaxsearch', f'''
echo run >> {tmp_path / "runs"}
case "$*" in *process_id={mistaken}*) exit 2 ;; esac
kill -ABRT $$''')
  found = run('run.sh', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', PROCESSES='2', TRAIN_GPUS='0,1')
  assert found.returncode == 2 and (tmp_path / 'runs').read_text() == 'run\n' * 2


def test_a_signal_between_two_attempts_ends_the_job(programs, launch, tmp_path):
  stand_in(programs, 'jaxsearch', f'echo run >> {tmp_path / "runs"}; kill -KILL $$')
  path = f'{programs}:{os.environ["PATH"]}'
  with subprocess.Popen(['bash', str(launch / 'run.sh')], env=os.environ | JOB | {'PATH': path}, text=True,
                        stderr=subprocess.PIPE) as job:
    while 'restarts left' not in job.stderr.readline():
      assert job.poll() is None
    job.terminate()
  assert job.returncode == 137 and (tmp_path / 'runs').read_text() == 'run\n'


@pytest.mark.skipif(bool(glob.glob('/dev/nvidia[0-9]*')), reason='there are GPUs')
def test_processes_without_gpus_are_refused_in_a_line(launch, programs):
  found = run('run.sh', '--dry-run', launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', PROCESSES='8')
  assert found.returncode == 2 and found.stderr == 'run.sh: PROCESSES=8 do not divide 0 GPUs (TRAIN_GPUS names them)\n'


@pytest.mark.parametrize(('status', 'taken'), [(3, 3), (1, 75), ('wait', 143)])  # the last goes on without its server
def test_servers_beside_the_job_are_started_again_with_it_and_end_with_it(programs, launch, tmp_path, status, taken):
  (tmp_path / 'health').touch()
  stand_in(programs, 'jaxsearch', f'''
if [ "$1" = serve ]; then
  echo $$ >> {tmp_path / "servers"}
  sleep 1000 > /dev/null 2>&1 & echo $! >> {tmp_path / "workers"}
  exec {sys.executable} -m http.server --bind 127.0.0.1 --directory {tmp_path} "${{@: -1}}"
fi
[ "$(wc -l < {tmp_path / "servers"})" -lt 2 ] || exit 0
kill -KILL "$(cat {tmp_path / "servers"})"
trap 'exit 143' TERM
{'sleep 100 > /dev/null 2>&1 & wait' if status == 'wait' else f'sleep 1; exit {status}'}''')
  job = dict(launch=launch, PATH=f'{programs}:{os.environ["PATH"]}', RETRIEVER='--index=i')
  found = run('run.sh', **job, PORT=str(free_port()))
  assert found.returncode == 0 and f'status {taken}, 3 restarts left' in found.stderr
  started = [int(line) for line in (tmp_path / 'servers').read_text().split()]
  assert len(started) == 2
  started += [int(line) for line in (tmp_path / 'workers').read_text().split()]
  ended = lambda one: not psutil.pid_exists(one) or psutil.Process(one).status() == psutil.STATUS_ZOMBIE
  while not all(map(ended, started)):  # it was told to; the time limit of the test is that of the wait
    time.sleep(0.1)
  with server((200, {})) as (url, seen):  # a stranger's, which answers too
    found = run('run.sh', **job, PORT=url.rpartition(':')[2])
  assert found.returncode == 2 and 'is in use by another server' in found.stderr and not seen


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_processes_by_slurm_are_stopped_and_killed_and_resume_to_the_same_parameters(programs, tmp_path):
  def start(out):
    job = free_port() % 10000
    return subprocess.Popen(
      ['bash', str(LAUNCH / 'slurm.sbatch'), *TINY], text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=os.environ | JOB | {'OUT': str(out), 'PATH': f'{programs}:{os.environ["PATH"]}',
                              'SLURM_JOB_ID': str(job),
                              'SLURM_NNODES': '2', 'SLURM_JOB_NODELIST': 'a,b', 'JAX_PLATFORMS': 'cpu',
                              'PYTHONPATH': str(ROOT)})

  whole = start(tmp_path / 'whole')
  assert whole.wait(600) == 0, whole.stdout.read()[-3000:]
  stopped = start(tmp_path / 'run')
  rows = tmp_path / 'run/metrics.jsonl'
  while not rows.exists() or not row_files.read(rows):
    assert stopped.poll() is None, stopped.stdout.read()[-3000:]
    time.sleep(0.1)
  stopped.send_signal(signal.SIGTERM)
  assert stopped.wait(300) == 143, stopped.stdout.read()[-3000:]
  assert 0 < len(row_files.read(rows)) < 4
  assert 'requeue' in (tmp_path / 'asked').read_text()
  again = start(tmp_path / 'run')
  assert again.wait(600) == 0, again.stdout.read()[-3000:]

  killed = start(tmp_path / 'killed')
  rows = tmp_path / 'killed/metrics.jsonl'
  while not rows.exists() or not row_files.read(rows):
    assert killed.poll() is None, killed.stdout.read()[-3000:]
    time.sleep(0.1)
  first, second = (task(tmp_path / 'killed', number) for number in range(2))
  second.kill()
  psutil.wait_procs([first], timeout=60)
  assert not first.is_running(), 'the process that was left did not notice within a minute'
  assert killed.wait(900) == 0, killed.stdout.read()[-3000:]
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  found, again, expected = (saved_policies.load_trained(str(tmp_path / name), mesh)[1]
                            for name in ('run', 'killed', 'whole'))
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  jax.tree.map(np.testing.assert_array_equal, again, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slurm_job_with_a_server_of_rollouts_beside_it_on_each_host(programs, tmp_path):
  """Each has a port of its own here, since the two hosts are one machine."""
  child.make_inputs(tmp_path)
  stand_in(programs, 'vllm', f'PYTHONPATH={ROOT} exec {sys.executable} {rollout_servers.__file__} "$@"')
  both = programs / 'srun'
  both.write_text(both.read_text().replace('SLURM_PROCID=$task', 'SLURM_PROCID=$task ROLLOUT_PORT=$((ROLLOUT_PORT + task))'))
  port = free_port()  # and, most likely, the next one
  found = subprocess.run(
    ['bash', str(LAUNCH / 'slurm.sbatch'), *TINY, '--config.steps=2', '--config.sampler.length=256',
     '--config.train.row_length=256', '--config.grow.max_tokens=40'],
    text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=800,
    env=os.environ | JOB | {
      'CONFIG': 'search_r1_grpo', 'MODEL': str(tmp_path / 'model'), 'OUT': str(tmp_path / 'run'), 'ROLLOUT': 'vllm',
      'ROLLOUT_PYTHON': str(programs / 'vllm'), 'ROLLOUT_PORT': str(port), 'SLURM_JOB_ID': str(port), 'SLURM_NNODES': '2',
      'SLURM_JOB_NODELIST': 'a,b', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT),
      'PATH': f'{programs}:{os.environ["PATH"]}'})
  assert found.returncode == 0, found.stdout[-3000:]
  rows = row_files.read(tmp_path / 'run/metrics.jsonl')
  assert len(rows) == 2 and all(row['seconds_weights'] > 0 and row['requests_failed'] == 0 for row in rows)
  told = [re.findall(rf'the server {number} has (\S+)', found.stdout) for number in (port, port + 1)]
  assert told[0] == told[1] and [label[-2:] for label in told[0]] == ['-1', '-2']
  servers = [process for process in psutil.process_iter(['cmdline'])
             if {rollout_servers.__file__, str(tmp_path / 'model')} <= set(process.info['cmdline'] or ())]
  assert not psutil.wait_procs(servers, timeout=10)[1]  # they were told to end


def follow_docs(folder: pathlib.Path, processes: int) -> tuple[list[str], dict[str, str]]:
  """The steps of docs/pods.md before `sbatch`, with stand-ins: its command, and what SLURM sets.

  A checkout on a shared disk that has been installed in, weights, questions, and the job.
  """
  child.make_inputs(folder)
  checkout = folder / 'jaxsearch'
  shutil.copytree(LAUNCH, checkout / 'launch')
  stand_in(checkout / '.venv', 'python', '')
  stand_in(checkout / '.venv/bin', 'jaxsearch', f'PYTHONPATH={ROOT} exec {sys.executable} -m jaxsearch.cli "$@"')
  job = (checkout / 'launch/job.env').read_text()
  for name, value in {'CONFIG': 'search_r1_grpo_qwen2_5_3b', 'MODEL': folder / 'model', 'OUT': folder / 'runs/first',
                      'QUESTIONS': folder / 'questions.jsonl', 'PROCESSES': processes,
                      'TRAIN_GPUS': '0,1' if processes > 1 else ''}.items():
    job, count = re.subn(rf'^{name}=.*?(?= +#|$)', f'{name}={value}', job, flags=re.MULTILINE)
    assert count == 1
  (checkout / 'launch/job.env').write_text(job)
  smaller = {'steps': 40, 'questions_per_step': 4, 'group_size': 2, 'mesh.accelerator': False, 'progress': False,
             'grow.template': 'world', 'grow.max_turns': 1, 'grow.max_tokens': 6, 'sampler.slots': 4,
             'sampler.length': 256, 'sampler.max_observation': 32, 'train.row_length': 256, 'train.micro_rows': 4}
  slurm = {'SLURM_JOB_NODELIST': 'a,b', 'SLURM_NNODES': '2', 'SLURM_CPUS_PER_TASK': '1', 'JAX_PLATFORMS': 'cpu',
           'JAX_NUM_CPU_DEVICES': str(2 // processes), 'SLURM_SUBMIT_DIR': str(checkout)}
  return ['bash', str(checkout / 'launch/slurm.sbatch'),
          *(f'--config.{name}={value}' for name, value in smaller.items())], slurm


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize('processes', [1, 2])  # of each host, with both its devices or one each
def test_docs_pods_on_two_hosts_from_a_checkout_to_a_resumed_job(programs, tmp_path, processes):
  (programs / 'jaxsearch').unlink()  # the checkout has its own
  command, slurm = follow_docs(tmp_path, processes)
  rows = tmp_path / 'runs/first/metrics.jsonl'
  passages = [{'document': {'contents': '"red"\nThe red of the blue.'}, 'score': 1.0}]
  every = lambda handler: send(handler, json.dumps(
    {'result': [passages] * len(json.loads(handler.body or b'{"queries": []}')['queries'])}).encode())

  def submit(job, url, ends, stop=False):
    """The job's status and output; a person or the clock stops it after its first step with `stop`."""
    environment = os.environ | slurm | {'PATH': f'{programs}:{os.environ["PATH"]}', 'SLURM_JOB_ID': str(job),
                                        'SEARCH_URL': f'{url}/retrieve', 'SLURM_JOB_END_TIME': str(ends)}
    environment.pop('OUT', None)
    log, before = tmp_path / f'jaxsearch-{job}.log', len(row_files.read(rows)) if rows.exists() else 0
    with open(log, 'w') as file:
      running = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
    if stop:
      while not rows.exists() or len(row_files.read(rows)) == before:
        assert running.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
      running.send_signal(signal.SIGTERM)
    return running.wait(900), log.read_text()

  dry = subprocess.run([*command, '--dry-run'], text=True, capture_output=True, env=os.environ | slurm)
  assert dry.returncode == 0 and dry.stdout.count('jaxsearch train') == processes, dry.stderr
  asked = tmp_path / 'asked'
  with server(every) as (url, _):
    now, hour = int(time.time()), 3600
    status, said = submit(30000 + os.getpid() % 9000, url, now + 24 * hour, stop=True)
    assert status == 143 and 'requeue' not in asked.read_text(), said[-3000:]  # scancel: it stays stopped
    status, said = submit(40000 + os.getpid() % 9000, url, now, stop=True)
    assert status == 143 and 'requeue' in asked.read_text(), said[-3000:]  # its time is up: it goes on
    status, said = submit(50000 + os.getpid() % 9000, url, now + 24 * hour)
  assert status == 0, said[-3000:]
  found = row_files.read(rows)
  assert [row['step'] for row in found] == [*range(1, 41)]  # more than are done before a signal arrives
  assert (tmp_path / 'runs/first/report.html').exists()
