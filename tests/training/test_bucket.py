"""A run in a bucket of a server that speaks the protocol of Google Cloud Storage: gcp-storage-emulator."""

import http
import sys

import pytest

from jaxsearch import cli
from jaxsearch.training import bucket, row_files
from tests.processes import free_port
from tests.training import child, test_run
from tests.training.test_run import assert_same, finish, finish_all, wait_for

start = test_run.start  # a fixture


def with_generations(patch):
  """Teaches the server what tensorstore relies on: objects have a generation, and are read and replaced on conditions."""
  from gcp_storage_emulator.handlers import objects

  def wrap(name, refused):
    function = getattr(objects, name)

    def handle(request, response, storage):
      try:
        name = request.params.get('object_id') or request.query['name'][0]
        generation = storage.get_file_obj(request.params['bucket_name'], name)['generation']
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
  pytest.importorskip('gcsfs')
  create_server = pytest.importorskip('gcp_storage_emulator.server').create_server
  port = free_port()
  address = f'http://localhost:{port}'
  with pytest.MonkeyPatch.context() as patch:
    with_generations(patch)
    for name, value in {'STORAGE_EMULATOR_HOST': address, 'TENSORSTORE_GCS_HTTP_URL': address,
                        'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'any', 'GOOGLE_CLOUD_PROJECT': 'any'}.items():
      patch.setenv(name, value)
    server = create_server('localhost', port, in_memory=True, default_bucket='bucket')
    server.start()
    yield bucket.place('gs://bucket')
    server.stop()


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_run_in_a_bucket_is_killed_and_resumes_on_another_machine_to_the_bit(cloud, start, tmp_path, monkeypatch):
  whole, run = tmp_path / 'whole', cloud / 'killed'
  finish_all([start('train', whole)])
  machines = [tmp_path / name for name in ('first', 'second')]
  for machine in machines:
    machine.mkdir()
  rows = lambda: next(machines[0].glob('jaxsearch/*/metrics.jsonl'), tmp_path / 'none')
  process = start('train', run, XDG_CACHE_HOME=str(machines[0]))
  wait_for(lambda: len(row_files.read(rows())) == 3, process)
  process.kill()
  finish(process)
  finish_all([start('train', run, XDG_CACHE_HOME=str(machines[1]))])
  assert_same(whole, run, ['rollouts.jsonl.gz'])
  assert b'</html>' in (run / 'report.html').read_bytes()
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', child.toy_method())
  assert cli.main(['export', f'--checkpoint={run}', f'--out={tmp_path / "policy"}']) == 0
