import errno
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from jaxsearch import cli
from jaxsearch.flags import parse
from jaxsearch.parallel import memory


def test_help_ends_quietly_where_nobody_reads_it():
  process = subprocess.Popen([sys.executable, '-m', 'jaxsearch.cli', '--help'], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
  process.stdout.close()
  assert (process.stderr.read(), process.wait()) == (b'', 0)


@pytest.mark.skipif(sys.platform != 'linux'
                    or any(any(pathlib.Path('/dev').glob(name)) for name in cli.ACCELERATORS),
                    reason='there is an accelerator')
def test_without_an_accelerator_jax_is_not_to_look_for_one():
  """The compilers that `plan` needs are plugins of JAX, which would try their devices and say at length that
  there are none."""
  code = "import os; from jaxsearch.cli import main; main(['--version']); print(os.environ['JAX_PLATFORMS'])"
  for given, expected in ((None, 'cpu'), ('tpu,cpu', 'tpu,cpu')):
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
    environment |= {} if given is None else {'JAX_PLATFORMS': given}
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                          env=environment)
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(('given', 'expected'), [
  ({}, memory.POOL), ({'XLA_CLIENT_MEM_FRACTION': '0.5'}, 0.5),
  ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.6'}, 0.6)])
def test_the_pool_of_a_gpu_is_the_share_that_plans_allow(given, expected):
  code = ("from jaxsearch.cli import main; main(['--version']); from jaxlib import xla_client; "
          "print(xla_client.generate_pjrt_gpu_plugin_options()['memory_fraction'])")
  environment = {name: value for name, value in os.environ.items() if 'MEM_FRACTION' not in name} | given
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                        env=environment)
  assert float(done.stdout.splitlines()[-1]) == expected


def test_gpus_are_asked_for_programs_that_repeat_to_the_bit_and_what_is_tuned_is_kept(tmp_path):
  code = """
import os, jax
from jaxsearch import cli
def run(config, own):
  jax.jit(lambda x: x + 1)(1)  # a flag that XLA does not know ends the process
  print(os.environ['XLA_FLAGS'].split()[-1], jax.config.jax_compilation_cache_dir)
  print(jax.config.jax_persistent_cache_enable_xla_caches)
cli.COMMANDS['train'].set_defaults(run=run)
cli.main(['train', '--config.xla_deterministic=True'])"""
  for cache in ({}, {'JAX_COMPILATION_CACHE_DIR': str(tmp_path)}):
    environment = {name: value
                   for name, value in os.environ.items() if not name.startswith('JAX_COMPILATION')}
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                          cwd=tmp_path,
                          env=environment | cache)
    assert done.stdout.splitlines() == [
      f'--xla_gpu_exclude_nondeterministic_ops=true {cache.get("JAX_COMPILATION_CACHE_DIR", ".jax_cache")}',
      'xla_gpu_per_fusion_autotune_cache_dir']


@pytest.mark.parametrize(('command', 'more'), [
  ('train', []), ('critic-warmup', []), ('sft', ['--config.sft.demonstrations=world:rl'])])
def test_processes_join_before_anything_touches_a_device(command, more, tmp_path):
  code = f"""
import sys
from jax._src import xla_bridge
from jaxsearch import cli
from jaxsearch.parallel import mesh
mesh.start_distributed = lambda **_: sys.exit(2 if xla_bridge.backends_are_initialized() else 7)
cli.main(['{command}', '--config.out={tmp_path / "run"}', *{more}])"""
  assert subprocess.run([sys.executable, '-c', code]).returncode == 7


def test_every_command_has_help_with_its_flags(capsys):
  assert cli.main(['--help']) == 0
  assert set(re.findall(r'[\w-]+', capsys.readouterr().out)) >= set(cli.COMMANDS)
  for command in cli.COMMANDS:
    assert cli.main([command, '--help']) == 0
    printed = capsys.readouterr().out
    assert f'jaxsearch {command}' in printed
    for flag in cli.COMMANDS[command]._actions:
      if flag.option_strings and flag.dest not in ('help', 'config'):
        assert f'\n  {flag.option_strings[0]}' in printed and len(flag.help.split()) > 2
        assert flag.required or flag.nargs == 0 or 'if not given' in flag.help, (command, flag.dest)
  assert cli.main(['eval', '--checkpoint=x', '-h']) == 0
  printed = capsys.readouterr().out
  for flag in ('checkpoint', 'questions', 'corpus', 'out', 'temperature', 'limit', 'as-tool', 'reader-url'):
    assert f'\n  --{flag} ' in printed


def test_traceback_shows_where_a_mistake_arose(monkeypatch, capsys):
  """An error of the program itself needs no flag, and is none of the statuses that launch/run.sh ends with."""
  assert cli.main(['train', '--config.steps=0', '--traceback']) == 2
  assert re.search(r'Traceback .*ValueError: .*steps=0', capsys.readouterr().err, re.DOTALL)
  monkeypatch.setattr(cli.flags, 'parse', lambda *_, **__: 1 / 0)
  assert cli.main(['train']) == 70
  assert re.search('Traceback .*ZeroDivisionError', capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(('error', 'status'), [
  (OSError(errno.EIO, 'Input/output error', 'a.safetensors'), 75), (OSError(errno.ESTALE, 'Stale', 'a'), 75),
  (ConnectionError('multi-host start-up'), 75), (TimeoutError(errno.ETIMEDOUT, 'Timed out'), 75), (TimeoutError('slow'), 75),
  (FileNotFoundError(errno.ENOENT, 'No such file', 'a'), 2), (PermissionError(errno.EACCES, 'Denied', 'a'), 2),
  (ConnectionRefusedError(errno.ECONNREFUSED, 'Refused'), 2), (OSError('odd'), 2)])
def test_faults_of_networks_and_their_disks_are_tried_again_and_mistakes_are_not(error, status):
  assert cli.explain(error)[0] == status


def test_every_help_shows_two_examples_that_can_be_parsed(capsys):
  for name, command in cli.COMMANDS.items():
    cli.main([name, '--help'])
    examples = re.findall(rf'^  jaxsearch {name} (.*)$', capsys.readouterr().out, re.MULTILINE)
    assert len(examples) == 2, name
    for example in examples:
      own, rest = command.parse_known_args(shlex.split(example))
      config, words, _ = parse(name, rest, own.default_config)
      assert config and bool(words) == own.takes_words


def test_an_interrupt_ends_in_one_line_and_status_130(monkeypatch, capsys):
  def interrupt(*_, **__):
    raise KeyboardInterrupt
  monkeypatch.setattr(cli.flags, 'parse', interrupt)
  assert cli.main(['train']) == 130
  assert capsys.readouterr().err == 'jaxsearch: interrupted\n'
  assert cli.main(['train', '--traceback']) == 130 and 'Traceback' in capsys.readouterr().err
