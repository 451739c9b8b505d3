import subprocess
import sys

import pytest

from jaxsearch import cli


def test_help_lists_the_commands_without_importing_jax():
  code = ("import sys; from jaxsearch.cli import main; status = main(['--help']); "
          "print(status, 'jax' in sys.modules, 'numpy' in sys.modules)")
  printed = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
  assert all(command in printed for command in cli.COMMANDS)
  assert printed.splitlines()[-1] == '0 False False'


@pytest.mark.parametrize(('arguments', 'message'), [
  (['trian'], "no command 'trian'; did you mean 'train'?"),
  (['train', '--config.stepz=3'], "no field 'stepz'"),
  (['train', 'word'], "train does not know what to do with 'word'"),
  (['ask'], 'ask what?'),
  (['world'], 'say what to make'),
  (['export'], 'export needs --checkpoint'),
  (['eval', '--temperature=warm'], '--temperature=warm: not a number'),
  (['eval', '--questions=missing.jsonl'], 'missing.jsonl'),
])  # fmt: skip
def test_mistakes_end_in_one_line_and_status_2(arguments, message, capsys):
  assert cli.main(arguments) == 2
  error = capsys.readouterr().err
  assert message in error and error.count('\n') == 1 and error.startswith('jaxsearch: ')


def test_every_command_has_help(capsys):
  for command in cli.COMMANDS:
    assert cli.main([command, '--help']) == 0
    assert f'jaxsearch {command}' in capsys.readouterr().out
