"""A mistake is named in one line, with an exit status that is not 0, before anything slow: the table
mistakes.toml."""

import gzip
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import time
import tomllib

import jax
import pytest

from jaxsearch import cli

TABLE = tomllib.loads((pathlib.Path(__file__).parent / 'mistakes.toml').read_text(encoding='utf-8'))
MISTAKES = [(f'{group}-{number}', *mistake) for group, mistakes in TABLE['mistakes'].items()
            for number, mistake in enumerate(mistakes)]
# What a message never says: names of exceptions and of libraries' parts, objects, and where in the code it
# arose.
INSIDES = ('Traceback', 'Error:', 'Error(', 'Exception', 'pydantic', 'orbax', 'safetensors_rust',
           ' object at 0x', '<class',
           'positional argument', 'NoneType', 'Errno')
SECONDS = 20


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The folder that the mistakes are made in."""
  made = tmp_path_factory.mktemp('mistakes')
  for name, text in TABLE['files'].items():
    (made / name).write_text(text, encoding='utf-8')
  (made / 'latin.jsonl').write_bytes('{"id": "1", "question": "Où?"}'.encode('latin-1'))
  (made / 'cut.jsonl.gz').write_bytes(gzip.compress(b'{"id": "1"}' * 99)[:-9])
  (made / 'garbage.gguf').write_bytes(b'no model' * 99)
  (made / 'empty.gguf').touch()
  (made / 'folder').mkdir()
  (made / 'no_checkpoint' / 'checkpoints').mkdir(parents=True)
  make_models(made)
  make_checkpoints(made)
  return made


def make_models(made):
  """Copies of the world's policy, each with something wrong."""
  from safetensors.numpy import load_file, save_file

  from jaxsearch.world.files import folder as shipped
  names = ('config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json',
           'special_tokens_map.json')
  config = json.loads((shipped() / 'config.json').read_text())
  tensors = load_file(shipped() / 'model.safetensors')
  norm = tensors['model.norm.weight']

  def copy(name, file='', content=b''):
    (made / name).mkdir()
    for each in names:
      os.symlink(shipped() / each, made / name / each)
    if file:
      (made / name / file).unlink(missing_ok=True)
    if content:
      (made / name / file).write_bytes(content)
    return made / name

  weights = (shipped() / 'model.safetensors').read_bytes()
  copy('hf')
  copy('hf_broken_config', 'config.json', b'{"model_type": ')
  copy('hf_latin_config', 'config.json', '{"model_type": "Où"}'.encode('latin-1'))
  copy('hf_deep_config', 'config.json', b'[' * 100_000)
  copy('hf_group', 'jaxsearch.json', b'{"config": {"grow": 3}, "step": 1}')
  copy('adapter', 'jaxsearch.json', b'{"config": {}, "step": 1}')
  (made / 'adapter/adapter.safetensors').touch()
  for name, changes in {'family': {'model_type': 'gpt2'}, 'no_key': {'hidden_size': None},
                        'text': {'hidden_size': 'wide'},
                        'negative': {'num_hidden_layers': -4}, 'layers': {'num_hidden_layers': 10**9},
                        'rope': {'rope_scaling': [3]}}.items():
    copy(f'hf_{name}', 'config.json', json.dumps(config | changes).encode())
  copy('hf_truncated', 'model.safetensors', weights[:len(weights) // 2])
  copy('hf_empty', 'model.safetensors', b'\n')
  copy('hf_no_weights', 'model.safetensors')
  copy('hf_no_tokenizer', 'tokenizer.json')
  copy('hf_tokenizer', 'tokenizer.json', b'{"model": 3}')
  copy('hf_tokenizer_config', 'tokenizer_config.json', b'[]')
  for name, last in {'missing': None, 'shape': norm[:3].copy()}.items():
    changed = {key: value for key, value in tensors.items() if value is not norm}
    save_file(changed if last is None else changed | {'model.norm.weight': last},
              copy(f'hf_{name}', 'model.safetensors') / 'model.safetensors')
  cut_gguf(made / 'cut.gguf')


def cut_gguf(path):
  """The first half of a small GGUF file."""
  import gguf
  import numpy as np
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_block_count(1)
  writer.add_tensor('token_embd.weight', np.zeros((64, 64), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  path.write_bytes(path.read_bytes()[:4000])


def make_checkpoints(made):
  """`run`, a checkpoint of the world's policy, and `critic`, one that says that it is a critic."""
  import dataclasses

  import jax.numpy as jnp

  from jaxsearch import setup
  from jaxsearch.flags import parse
  from jaxsearch.parallel.mesh import make_mesh
  from jaxsearch.training import checkpoint
  from jaxsearch.training.state import TrainState
  config = parse('train', [], 'quickstart').config
  model_config, params = setup.load_policy(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))
  zero = jnp.zeros((), jnp.int32)
  for name, parameters in {'run': params, 'critic': {'decoder': params, 'head': {
      'kernel': jnp.zeros(model_config.hidden_size), 'bias': jnp.zeros(())}}}.items():
    manager = checkpoint.open_checkpoints(made / name, 1)
    checkpoint.save(manager, 3, TrainState(parameters, {}, zero, zero, zero), {
      'step': 3, 'config': config.to_dict(), 'decoder': dataclasses.asdict(model_config),
      'critic': name == 'critic'})
    manager.close()


@pytest.fixture(scope='module')
def port():
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    listener.listen()
    yield str(listener.getsockname()[1])


@pytest.mark.parametrize(('line', 'said'), [(line, said) for _, line, *said in MISTAKES],
                         ids=[name for name, *_ in MISTAKES])
def test_a_mistake_is_named_in_one_line(line, said, folder, port, monkeypatch, capfd):
  monkeypatch.setattr('jax.devices', lambda devices=jax.devices()[:2]: devices)
  monkeypatch.chdir(folder)
  monkeypatch.delenv('SERPER_API_KEY', raising=False)
  before, start = set(os.listdir(folder)), time.monotonic()
  status = cli.main(shlex.split(line.replace('PORT', port)))
  seconds, printed = time.monotonic() - start, capfd.readouterr()
  message = printed.err
  assert status not in (0, None), message
  assert message.startswith('jaxsearch: ') and message.count('\n') == 1, message
  for text in said:
    assert (text.removeprefix('!').replace('PORT', port) in message) != text.startswith('!'), message
  assert not [inside for inside in INSIDES if inside in message
              and not any(inside in text for text in said)], message
  assert not printed.out and seconds < SECONDS
  # a run folder is made before what is in its files is read
  assert set(os.listdir(folder)) <= before | {'runs', 'run'}


def test_a_process_of_its_own_prints_the_lines_alone(folder):
  lines = ['eval --questions=questions.jsonl --checkpoint=hf_truncated --config.steps=3',
           'train --config.optim.learning_rate=nan', 'export --checkpoint=folder --out=hf_out']
  code = 'import sys\nfrom jaxsearch import cli\nsys.exit({cli.main(line.split()) for line in sys.argv[1:]} != {2})'
  done = subprocess.run([sys.executable, '-c', code, *lines], cwd=folder, capture_output=True, text=True,
                        env=os.environ | {'PYTHONPATH': str(pathlib.Path(cli.__file__).parents[1])})
  assert not done.returncode and not done.stdout
  assert [line.partition(' ')[0] for line in done.stderr.splitlines()] == ['jaxsearch:'] * len(lines), done.stderr
