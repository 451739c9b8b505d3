"""Runs in a bucket of a server that speaks the protocol of Google Cloud Storage: gcp-storage-emulator, with the extra gs."""

import http
import importlib.util
import sys

import numpy as np
import pytest

from jaxsearch import cli
from jaxsearch.training import remote, row_files
from tests.training import child, test_run
from tests.training.test_run import finish, finish_all, saved_arrays, start_processes, wait_for

inputs, start = test_run.inputs, test_run.start  # fixtures


def with_generations(patch):
  """Teaches the server what tensorstore relies on: an object says its generation, and is read and replaced on conditions."""
  from gcp_storage_emulator.handlers import objects

  def wrap(name, refused):
    function = getattr(objects, name)

    def handle(request, response, storage):
      try:
        found = storage.get_file_obj(request.params['bucket_name'], request.params.get('object_id') or request.query['name'][0])
        generation = found['generation']
      except (objects.NotFound, KeyError):  # KeyError: the name stands in the body, and there is no condition
        generation = '0'
      asked = request.query.get('ifGenerationMatch', [generation])[0]
      if asked != generation or request.query.get('ifGenerationNotMatch') == [generation]:
        response.status = refused if asked == generation else http.HTTPStatus.PRECONDITION_FAILED
        return
      if generation != '0':
        response['x-goog-generation'] = generation
      function(request, response, storage)

    patch.setattr(objects, name, handle)

  wrap('download', http.HTTPStatus.NOT_MODIFIED)
  for name in ('_media_upload', '_multipart_upload', '_create_resumable_upload'):
    wrap(name, http.HTTPStatus.PRECONDITION_FAILED)


@pytest.fixture(scope='module')
def cloud():
  """gs://bucket, for this process and those that it starts."""
  if missing := [name for name in ('gcsfs', 'gcp_storage_emulator') if importlib.util.find_spec(name) is None]:
    pytest.skip(f'needs {" and ".join(missing)}')
  with pytest.MonkeyPatch.context() as patch:
    server = google(patch, 9171)
    yield remote.place('gs://bucket')
    server.stop()


def google(patch, port):
  from gcp_storage_emulator.server import create_server
  address = f'http://localhost:{port}'
  with_generations(patch)
  for name, value in {'STORAGE_EMULATOR_HOST': address, 'TENSORSTORE_GCS_HTTP_URL': address,
                      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'any', 'GOOGLE_CLOUD_PROJECT': 'any'}.items():
    patch.setenv(name, value)
  server = create_server('localhost', port, in_memory=True, default_bucket='bucket')
  server.start()
  return server


def read_rows(run, folder):
  (folder / 'rows').write_bytes((run / 'metrics.jsonl').read_bytes())
  return row_files.read(folder / 'rows')


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_run_in_a_bucket_is_killed_and_resumes_on_another_machine_to_the_bit(cloud, start, tmp_path, monkeypatch):
  whole, run = tmp_path / 'whole', cloud / 'killed'
  finish_all([start('train', whole)])
  machines = [tmp_path / name for name in ('first', 'second')]
  for machine in machines:
    machine.mkdir()
  process = start('train', run, XDG_CACHE_HOME=str(machines[0]))
  wait_for(lambda: len(row_files.read(next(machines[0].glob('jaxsearch/*/metrics.jsonl'), tmp_path / 'none'))) == 3, process)
  process.kill()
  finish(process)
  finish_all([start('train', run, XDG_CACHE_HOME=str(machines[1]))])
  rows, others = row_files.read(whole / 'metrics.jsonl'), read_rows(run, tmp_path)
  assert list(map(test_run.comparable, others)) == list(map(test_run.comparable, rows))
  expected, found = saved_arrays(whole, 6), saved_arrays(run, 6)
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  assert b'</html>' in (run / 'report.html').read_bytes() and (run / 'rollouts.jsonl.gz').exists()
  assert sorted(path.name for path in (run / 'checkpoints').iterdir()) == ['4', '6']  # keep_checkpoints=2
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  assert cli.main(['export', f'--checkpoint={run}', f'--out={tmp_path / "policy"}']) == 0


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_two_machines_that_share_a_bucket_alone_train_stop_and_resume_as_one(cloud, start, tmp_path):
  changes = ['mesh.fsdp=2', 'steps=4', 'checkpoint_every=4']
  finish_all(start_processes(start, 2, 'train', tmp_path / 'whole', *changes))
  machines = [{'XDG_CACHE_HOME': str(tmp_path / str(number))} for number in range(4)]
  for machine in machines:
    (tmp_path / machine['XDG_CACHE_HOME']).mkdir()
  run = cloud / 'two'
  processes = start_processes(start, 2, 'train', run, *changes, machines=machines[:2])
  wait_for(lambda: list(tmp_path.glob('0/jaxsearch/*/metrics.jsonl')), processes[0])
  processes[1].terminate()
  assert [finish(process)[0] for process in processes] == [143, 143]
  finish_all(start_processes(start, 2, 'train', run, *changes, machines=machines[2:]))
  assert [row['step'] for row in read_rows(run, tmp_path)] == [1, 2, 3, 4]
  expected, found = saved_arrays(tmp_path / 'whole', 4), saved_arrays(run, 4)
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
