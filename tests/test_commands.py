"""Commands on a run of a tiny random policy, in this process: what they take from it, what they refuse, how
eval resumes."""

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import pytest
import transformers

from jaxsearch import cli, registry
from jaxsearch.models.architecture import initial_params
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.training import checkpoint, row_files
from jaxsearch.training.state import TrainState
from jaxsearch.trees.tree import Stop
from jaxsearch.world import files as world
from tests.processes import small_files
from tests.tools.serving import server
from tests.training import child

DEAD = ['--config.search.backend=http', '--config.search.url=http://127.0.0.1:9',
        '--config.search.timeout=0.2']


@pytest.fixture(scope='module', autouse=True)
def toy():
  """A method that always searches, and ends with a stop; it takes a failed search for one that found
  nothing."""
  sys.modules['jaxsearch.methods.toy'] = method = child.toy_method()
  inner = method.grow

  def grow(question, tree, *, max_tokens):
    growth, reply = inner(question, tree, max_tokens=max_tokens), None
    with contextlib.suppress(StopIteration):
      while True:
        reply = yield growth.send([] if isinstance(reply, ToolFailure) else reply)
    tree.stop = Stop.ANSWERED

  method.grow = grow
  yield
  del sys.modules['jaxsearch.methods.toy']


@pytest.fixture(scope='module')
def folder(toy, tmp_path_factory):
  """`run`, a run with a checkpoint of random parameters that began with a model of ours, and files to answer
  and to search."""
  folder = tmp_path_factory.mktemp('inputs')
  child.make_inputs(folder)
  config = child.get_config(folder, str(folder / 'run'))
  config.critic.enabled, config.eval.questions, config.model = False, config.data.questions, 'a-model'
  zero = jnp.zeros((), jnp.int32)
  state = TrainState(initial_params(child.NUMBERS, jax.random.key(1)), (zero,), zero, zero, zero)
  with checkpoint.open_checkpoints(folder / 'run', keep=1) as manager:
    checkpoint.save(manager, 1, state, {'step': 1, 'decoder': dataclasses.asdict(child.NUMBERS),
                                        'config': config.to_dict()})
  registry.POLICIES['a-model'] = folder / 'model'
  yield folder
  del registry.POLICIES['a-model']


def files(folder):
  """What a checkpoint does not say."""
  return f'--questions={folder}/questions.jsonl', f'--config.data.corpus={folder}/corpus.jsonl'


@pytest.fixture
def command(capsys):
  """command(*arguments) -> (exit status, stdout, stderr)."""
  def run(*arguments):
    try:
      status = cli.main([str(one) for one in arguments])
    except SystemExit as stop:
      status = stop.code
    return status, *capsys.readouterr()

  return run


def result(path):
  return json.loads(path.read_text())


def test_a_checkpoint_says_all_but_places(folder, command, tmp_path):
  status, printed, errors = command('eval', '--checkpoint', folder / 'run', *files(folder), '--out',
                                    tmp_path / 'r.json')
  assert status == 0, errors
  found, figures = result(tmp_path / 'r.json'), json.loads(printed.splitlines()[-1])
  assert found['manifest']['config']['method'] == 'toy' and found['manifest']['policy']['step'] == 1
  assert {'em', 'f1', 'searches', 'answer_recall', 'n'} <= figures.keys()
  assert figures['searches'] == 1.0 and figures['n'] == figures['searches_asked'] == len(child.WORDS)
  # nothing differs, fails, or is ignored
  assert errors == 'jaxsearch: stops: 12 answered\n' and figures['stop_answered'] == 12


def test_a_given_config_is_corrected_and_says_so(folder, command, tmp_path):
  own = ['--checkpoint', folder / 'run', *files(folder), '--temperature=1']
  assert command('eval', *own, '--out', tmp_path / 'own.json')[0] == 0
  status, _, errors = command('eval', '--config=quickstart', *own, '--config.sampler.slots=4', '--out',
                              tmp_path / 'given.json')
  assert status == 0
  for line in ("method: the config has 'search_r1', the checkpoint 'toy'; that of the checkpoint is used",
               'sampler.length: the config has 448, the checkpoint 128',
               'grow.max_turns: the config has 3, the checkpoint none'):
    assert f'jaxsearch: {line}' in errors
  assert 'search.topk' not in errors
  own, given = result(tmp_path / 'own.json'), result(tmp_path / 'given.json')
  assert given['predictions'] == own['predictions']
  assert given['manifest']['config']['data']['hops'] == [1, 2]  # the rest is that of the given config


def test_a_field_of_the_command_line_wins_with_a_line(folder, command, tmp_path):
  for config in ([], ['--config=quickstart', '--config.sampler.slots=4']):
    status, _, errors = command('eval', *config, '--checkpoint', folder / 'run', *files(folder),
                                '--limit=2', '--config.grow.max_tokens=3', '--out', tmp_path / 'r.json')
    assert status == 0 and 'grow.max_tokens=3 as you set it; the policy was trained with 5' in errors
    assert 'grow.max_tokens: ' not in errors and errors.count('grow.max_tokens') == 1
    assert result(tmp_path / 'r.json')['manifest']['config']['grow'] == {'max_tokens': 3}
  # toy has no turns
  assert command('eval', '--checkpoint', folder / 'run', '--config.grow.max_turns=3')[0] == 2


def test_an_exported_folder_is_as_its_run(folder, command, tmp_path):
  assert command('export', '--checkpoint', folder / 'run', '--out', tmp_path / 'hf')[0] == 0
  about = result(tmp_path / 'hf' / 'jaxsearch.json')
  assert about['step'] == 1 and about['config']['method'] == 'toy' and about['config']['tokenizer'] == ''
  assert transformers.AutoConfig.from_pretrained(tmp_path / 'hf').hidden_size == child.NUMBERS.hidden_size
  assert transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf').encode('red')
  for name, source in (('run.json', folder / 'run'), ('hf.json', tmp_path / 'hf')):
    assert command('eval', '--checkpoint', source, *files(folder), '--out', tmp_path / name)[0] == 0
  assert result(tmp_path / 'run.json')['predictions'] == result(tmp_path / 'hf.json')['predictions']


@pytest.mark.parametrize('planted', [
  {'backend': 'web', 'url': 'URL'},
  {'backend': 'simulated', 'writer': 'chat', 'url': 'URL', 'writer_model': 'm'},
])
def test_a_downloaded_checkpoint_gets_no_keys_and_writes_no_file(planted, folder, command, tmp_path,
                                                                 monkeypatch):
  for key in ('SERPER_API_KEY', 'OPENAI_API_KEY', 'JAXSEARCH_SEARCH_TOKEN'):
    monkeypatch.setenv(key, 'secret')
  assert command('export', '--checkpoint', folder / 'run', '--out', tmp_path / 'hf')[0] == 0
  file, cache = tmp_path / 'hf/jaxsearch.json', tmp_path / 'planted'
  with server((200, {})) as (url, seen):
    about, planted = result(file), {name: value.replace('URL', url) for name, value in planted.items()}
    about['config']['search'] |= planted | {'cache': str(cache)}
    about['config'] |= {'model': 'package:theirs', 'judge': {'kind': 'chat', 'url': url}}
    file.write_text(json.dumps(about))
    status, printed, errors = command('ask', 'Which red?', '--checkpoint', tmp_path / 'hf')
  assert status == 0 and 'found' in printed and not seen and not cache.exists()
  (line,) = errors.splitlines()
  assert line.startswith('jaxsearch: not taken from the checkpoint: ') and url in line and str(cache) in line
  for name in ('model', 'data.corpus', 'judge.url', *(f'search.{name}' for name in planted)):
    assert f'{name}=' in line


def test_what_a_run_began_with_is_named_by_the_user(folder, command, tmp_path):
  shutil.copytree(folder / 'run', tmp_path / 'run')
  host = next((tmp_path / 'run').rglob('host')) / 'metadata'
  about = result(host)
  about['config']['model'] = str(folder / 'model')
  host.write_text(json.dumps(about))
  ask = ['ask', 'Which red?', '--checkpoint', tmp_path / 'run', f'--corpus={folder}/corpus.jsonl']
  status, _, errors = command(*ask)
  assert status == 2
  assert f"{tmp_path}/run began with model='{folder}/model', and a checkpoint does not say" in errors
  assert command(*ask, f'--config.model={folder}/model')[0] == 0
  # as `train` saves it
  host.write_text(json.dumps(about | {'tokenizer': Tokenizer.load(folder / 'model').to_json()}))
  assert command(*ask)[0] == 0


def test_an_export_to_a_full_disk_is_one_line(folder, command, tmp_path):
  file = tmp_path / 'out/model.safetensors'
  export = ['export', '--checkpoint', folder / 'run', '--dtype=bfloat16', '--out', tmp_path / 'out']
  with small_files():
    status, _, errors = command(*export)
  assert status == 2 and errors.count('\n') == 1 and str(file) in errors and 'File too large' in errors
  assert not file.exists() and command(*export)[0] == 0 and file.exists()


# Stopping and resuming.


@pytest.fixture(scope='module')
def whole(folder, tmp_path_factory):
  """The result of an evaluation that nothing stopped."""
  out = tmp_path_factory.mktemp('whole') / 'r.json'
  assert cli.main(evaluate(folder, out)) == 0
  assert [file.name for file in out.parent.iterdir()] == ['r.json']
  return result(out)


def evaluate(folder, out, *more):
  return ['eval', f'--checkpoint={folder}/run', *files(folder), '--temperature=1', f'--out={out}', *more]


@pytest.fixture
def after(monkeypatch):
  """after(n, act): calls act(path, rows) in place of the n-th append; the list of the numbers appended."""
  append, written = row_files.append, []

  def arrange(n, act):
    def own(path, rows):
      if len(written) == n:
        act(path, rows)
      append(path, rows)
      written.extend(row['number'] for row in rows)

    monkeypatch.setattr(row_files, 'append', own)
    return written

  return arrange


def test_a_stopped_evaluation_resumes_to_the_same_result(folder, whole, command, after, tmp_path):
  out, part = tmp_path / 'r.json', tmp_path / 'r.json.part.jsonl'
  after(5, lambda *_: signal.raise_signal(signal.SIGINT))
  stopped, _, errors = command(*evaluate(folder, out))
  assert stopped == 130 and '5 of 12 answers are saved; rerun the same command to resume' in errors
  assert not out.exists()
  assert len(part.read_text().splitlines()) == 6
  part.write_text(part.read_text() + '{"number": 3, "rec')  # as kill -9 leaves it
  written = after(None, None)
  resumed, _, errors = command(*evaluate(folder, out))
  assert resumed == 0 and f'resuming: {part} has 5 answers' in errors
  assert sorted(written) == list(range(12))
  assert result(out) == whole and not part.exists()


def test_what_was_sampled_from_a_run_is_of_its_step(folder, command, monkeypatch, tmp_path):
  monkeypatch.setattr('jaxsearch.training.rejection.record', lambda *_, **__: 1 / 0)
  assert command('sample', '--checkpoint', folder / 'run', *files(folder), '--n=2', '--out',
                 tmp_path / 'd.jsonl')[0] == 70
  identity = json.loads((tmp_path / 'd.jsonl.part.jsonl').read_text().splitlines()[0])['identity']
  assert identity['weights']['step'] == 1 and identity['weights']['modified'] is not None


def test_what_training_alone_reads_may_differ_where_an_evaluation_resumes(folder, whole, command, after, tmp_path):
  out = tmp_path / 'r.json'
  after(3, lambda *_: signal.raise_signal(signal.SIGINT))
  assert command(*evaluate(folder, out, '--config.loss.kl_coef=0.5', '--config.credit.normalize_std=False'))[0] == 130
  after(None, None)
  status, _, errors = command(*evaluate(folder, out))
  assert status == 0 and 'has 3 answers' in errors
  assert result(out)['predictions'] == whole['predictions']


def test_another_evaluation_starts_again_and_says_why(folder, whole, command, after, tmp_path):
  out = tmp_path / 'r.json'
  after(3, lambda *_: signal.raise_signal(signal.SIGINT))
  assert command(*evaluate(folder, out, '--config.seed=1'))[0] == 130
  written = after(None, None)
  del written[:]
  status, _, errors = command(*evaluate(folder, out))
  assert status == 0 and 'is of another evaluation (config.seed was 1, now 0); starting again' in errors
  assert len((tmp_path / 'r.json.part.jsonl.old').read_text().splitlines()) == 4
  assert len(written) == 12 and result(out) == whole


# What is printed.


def test_failures_are_said_at_once_and_counted(folder, command, tmp_path):
  status, printed, errors = command(*evaluate(folder, tmp_path / 'r.json', *DEAD))
  figures, lines = json.loads(printed.splitlines()[-1]), errors.splitlines()
  assert status == 0
  assert figures['searches_failed'] == figures['searches_asked'] == figures['tool_calls_failed'] == 12
  assert figures['last_failure'] and sum(count for name, count in figures.items()
                                         if name.startswith('tool_calls_failed_')) == 12
  said = [line for line in lines if 'searches failed' in line]
  assert said[0] == lines[0] and re.match(r'jaxsearch: (\d+) of \1 searches failed; the last: ', said[0])
  assert len(said) == 2 and said[1].startswith('jaxsearch: 12 of 12 searches failed; the last: ')
  assert result(tmp_path / 'r.json')['searches_failed'] == 12


def test_ask_shows_a_failed_search(folder, command):
  status, printed, _ = command('ask', 'Which red?', '--checkpoint', folder / 'run', *DEAD)
  assert status == 0 and 'failed  SearchError' in printed


def test_what_has_no_effect_is_listed(folder, command, tmp_path):
  status, printed, errors = command(
    'eval', '--checkpoint', folder / 'run', *files(folder), '--limit=2', '--config.eval.number=7',
    '--config.steps=3', '--config.data.hops=(1,)',
    '--config.model=elsewhere', '--config.sampler.slots=2', '--out', tmp_path / 'r.json')
  expected = [f'--config.{field} has no effect on an evaluation'
              for field in ('data.hops', 'eval.number', 'model', 'steps')]
  assert status == 0 and [line for line in errors.splitlines() if 'ignored' in line] == [
    f'jaxsearch: ignored: {line}' for line in expected]
  assert result(tmp_path / 'r.json')['manifest']['ignored'] == expected
  assert json.loads(printed.splitlines()[-1])['n'] == 2


# Out of memory.

def ran_out(*_, **__):
  raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.')


@pytest.mark.parametrize('arguments', [
  ['eval', '--questions=world:test', '--limit=1'],
  ['train', '--config.train.row_length=1000000000', '--config.train.micro_rows=8', '--config.out=OUT']])
def test_a_cache_that_does_not_fit_is_one_line(arguments, command, tmp_path):
  for file in world.POLICY.glob('*.*'):
    (tmp_path / file.name).symlink_to(file)
  (tmp_path / 'config.json').unlink()
  own, length = json.loads((world.POLICY / 'config.json').read_text()), 2**28  # nobody has such a cache
  (tmp_path / 'config.json').write_text(json.dumps(own | {'max_position_embeddings': length}))
  status, _, errors = command(*(one.replace('OUT', f'{tmp_path}/run') for one in arguments),
                              f'--config.model={tmp_path}', f'--config.sampler.length={length}')
  assert status == 1 and errors.count('\n') == 1
  where = 'opening the sampler', 'sampling'  # devices may allocate later than asked to
  assert any(f'jaxsearch: out of memory while {doing} (' in errors for doing in where)
  assert 'lower sampler.slots or sampler.length' in errors
  assert ('rerun the same command with less to resume' in errors) == ('config.out' in arguments[-1])


@pytest.mark.parametrize('name', ['checkpoint', 'config.model'])
def test_paths_longer_than_a_model_has_positions_are_refused(name, command, tmp_path):
  for file in world.POLICY.glob('*.*'):
    (tmp_path / file.name).symlink_to(file)
  (tmp_path / 'config.json').unlink()
  own = json.loads((world.POLICY / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(own | {'max_position_embeddings': 256}))
  status, _, errors = command('eval', '--questions=world:test', '--limit=1', f'--{name}={tmp_path}')
  assert status == 2 and errors.count('\n') == 1
  assert f"is more than the 256 positions of {name.removeprefix('config.')}='{tmp_path}'" in errors


def test_an_evaluation_out_of_memory_says_what_to_lower(folder, command, after, tmp_path):
  after(5, ran_out)
  out = tmp_path / 'r.json'
  status, _, errors = command(*evaluate(folder, out))
  assert status == 1 and errors.count('\n') == 2
  assert 'while sampling (17179869184 bytes asked for): lower sampler.slots' in errors
  assert '5 of 12 answers are saved; rerun the same command to resume' in errors
