"""Runs the command line, `jaxsearch COMMAND --config NAME --config.key=value`.

A mistake that the user can mend, in a flag, a file or a value, ends in one line and exit status 2; a run that
cannot go on, and one that is out of memory, in one line and 1, or 75 if its disk or network failed; one whose
servers do not answer in one and 3; Ctrl-C in one and 130. Any other error ends in a traceback and 70.
`--traceback` shows where an error arose. The commands import JAX, `--help` does not.
"""

import os
import pathlib
import sys
import traceback

from jaxsearch import __version__, flags
from jaxsearch.commands import COMMANDS, GROUPS, replaced_fields, saved_config
from jaxsearch.config_check import suggestion
from jaxsearch.files import DISK, NETWORK
from jaxsearch.parallel import memory
from jaxsearch.training import RunStopped

USAGE = """usage: jaxsearch COMMAND [--config NAME] [--config.FIELD=VALUE ...] [FLAGS]

Trains language models that learn when and how to search.

{commands}Without --config a command runs on the embedded world. More: jaxsearch COMMAND --help, and
configs/base.py for the fields.
"""

ACCELERATORS = ('nvidia*', 'nvhost*', 'dxg', 'kfd', 'accel*', 'vfio/[0-9]*')  # of GPUs and TPUs in /dev


def main(argv: list[str] | None = None) -> int:
  """Runs a command and returns the exit status."""
  arguments = (sys.argv[1:] if argv is None else argv) or ['--help']
  if sys.platform == 'linux' and not any(any(pathlib.Path('/dev').glob(name)) for name in ACCELERATORS):
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # JAX would look for the devices of the compilers of `plan`
  if not {'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'} & os.environ.keys():
    os.environ['XLA_CLIENT_MEM_FRACTION'] = str(memory.POOL)  # of a GPU; JAX would take less than plans allow
  try:
    run([argument for argument in arguments if argument != '--traceback'])
    sys.stdout.flush()
    return 0
  except (Exception, KeyboardInterrupt) as error:
    if isinstance(error, BrokenPipeError) and {'-h', '--help', 'help'} & set(arguments):  # `| head`
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      return 0
    status, line = explain(error)
    if '--traceback' in arguments or not line:
      traceback.print_exc()
    else:
      print(f'jaxsearch: {line}', file=sys.stderr)
    if meshes := sys.modules.get('jaxsearch.parallel.mesh'):
      meshes.end_alone(status)
    return status


def run(given: list[str]) -> None:
  """Runs the command that is the first argument with the others."""
  name, *arguments = given or ['--help']
  if name in ('-h', '--help', 'help'):
    print(USAGE.format(commands=''.join(map(summary, GROUPS))))
  elif name == '--version':
    print(__version__)
  elif name not in COMMANDS:
    raise flags.UsageError(
      f'no command {name!r}{suggestion(name, COMMANDS) or "; there are " + ", ".join(COMMANDS)}')
  elif {'-h', '--help'} & set(arguments):
    COMMANDS[name].print_help()
  else:
    own, rest = COMMANDS[name].parse_known_args(arguments)
    config, words, own.changed = flags.parse(name, rest, own.default_config, own.known,
                                             saved=saved_config(own), replaced=replaced_fields(own))
    if words and not own.takes_words:
      raise flags.UsageError(f'{name} does not know what to do with {" ".join(map(repr, words))}')
    if config.get('xla_deterministic'):  # read with the first program; what is tuned lies with the programs
      import jax
      given = os.environ.get('XLA_FLAGS', '')
      os.environ['XLA_FLAGS'] = f'{given} --xla_gpu_exclude_nondeterministic_ops=true'
      jax.config.update('jax_compilation_cache_dir', jax.config.jax_compilation_cache_dir or '.jax_cache')
    own.parts, own.words = words, ' '.join(words).strip()
    own.run(config, own)


def summary(group: str) -> str:
  """Returns the lines of a group of commands."""
  lines = [f'  {name:<14} {COMMANDS[name].description.splitlines()[0]}\n' for name in GROUPS[group]]
  return f'{group.removesuffix(".")}:\n{"".join(lines)}\n'


def explain(error: BaseException) -> tuple[int, str]:
  """Returns the exit status and a line for the person; (70, '') for an error of the program itself."""
  if isinstance(error, KeyboardInterrupt):
    return 130, 'interrupted'
  if memory.ran_out(error):
    error = error if isinstance(error, memory.OutOfMemory) else memory.explained(error)
  from jaxsearch.tools.http_client import RequestError
  servers = isinstance(error, RequestError)
  if not isinstance(error, (OSError, ValueError, ImportError, RunStopped, RequestError, memory.OutOfMemory)):
    return 70, ''
  text = str(error)
  if isinstance(error, OSError) and error.filename is not None:
    text = f'{error.filename}: {error.strerror}'
  printable = ''.join(letter if letter.isprintable() else ' ' for letter in text)  # nothing steers a terminal
  status = error.status if isinstance(error, RunStopped) else 1 if isinstance(error, MemoryError) else 2
  if (type(error) is ConnectionError or isinstance(error, TimeoutError)
      or (isinstance(error, OSError) and error.errno in NETWORK | DISK)):
    status = 75
  return 3 if servers else status, ' '.join(printable.split())


if __name__ == '__main__':
  sys.exit(main())
