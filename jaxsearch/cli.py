"""The command line: `jaxsearch COMMAND --config NAME --config.key=value`.

A mistake that the user can mend, in a flag, a file or a value, ends in one line and exit status 2; a run that cannot go on, and
one that is out of memory, in one line and 1, Ctrl-C in one line and 130. `--traceback` shows where it arose. The commands import
JAX, `--help` does not.
"""

import os
import pathlib
import sys

from jaxsearch import __version__, flags
from jaxsearch.commands import COMMANDS, GROUPS, replaced_fields, saved_config
from jaxsearch.config_check import suggestion
from jaxsearch.parallel import memory
from jaxsearch.training import RunStopped

USAGE = """usage: jaxsearch COMMAND [--config NAME] [--config.FIELD=VALUE ...] [FLAGS]

Trains language models that learn when and how to search.

{commands}Without --config a command runs on the embedded world. More: jaxsearch COMMAND --help, and configs/base.py for the
fields.
"""

ACCELERATORS = ('nvidia*', 'nvhost*', 'dxg', 'kfd', 'accel*', 'vfio/[0-9]*')  # in /dev, where there is a GPU or a TPU


def main(argv: list[str] | None = None) -> int:
  """Runs a command and returns the exit status."""
  given = sys.argv[1:] if argv is None else argv
  if sys.platform == 'linux' and not any(any(pathlib.Path('/dev').glob(name)) for name in ACCELERATORS):
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # JAX would look for the devices of the compilers that `plan` needs
  name, *arguments = [argument for argument in given if argument != '--traceback'] or ['--help']
  try:
    if name in ('-h', '--help', 'help'):
      print(USAGE.format(commands=''.join(
        f'{group.removesuffix(".")}:\n{"".join(map(summary, names))}\n' for group, names in GROUPS.items())))
    elif name == '--version':
      print(__version__)
    elif name not in COMMANDS:
      raise flags.UsageError(f'no command {name!r}{suggestion(name, COMMANDS) or "; there are " + ", ".join(COMMANDS)}')
    elif {'-h', '--help'} & set(arguments):
      COMMANDS[name].print_help()
    else:
      own, rest = COMMANDS[name].parse_known_args(arguments)
      config, words, own.changed = flags.parse(name, rest, own.default_config, own.known, saved=saved_config(own),
                                               replaced=replaced_fields(own))
      if words and not own.takes_words:
        raise flags.UsageError(f'{name} does not know what to do with {" ".join(map(repr, words))}')
      own.parts, own.words = words, ' '.join(words).strip()
      own.run(config, own)
  except (flags.UsageError, OSError, ValueError, ImportError, RunStopped) as error:
    if '--traceback' in given:
      raise
    print(f'jaxsearch: {one_line(error)}', file=sys.stderr)
    return 1 if isinstance(error, RunStopped) else 2
  except Exception as error:
    if '--traceback' in given or not memory.ran_out(error):
      raise
    named = error if isinstance(error, memory.OutOfMemory) else memory.explained(error)
    print(f'jaxsearch: {one_line(named)}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    if '--traceback' in given:
      raise
    print('jaxsearch: interrupted', file=sys.stderr)
    return 130
  return 0


def summary(name: str) -> str:
  """What a command does, in a line."""
  return f'  {name:<14} {COMMANDS[name].description.splitlines()[0]}\n'


def one_line(error: Exception) -> str:
  """What an error says, without characters that would steer a terminal; of the system's the file and the reason alone."""
  plain = isinstance(error, OSError) and error.filename is not None
  text = f'{error.filename}: {error.strerror}' if plain else str(error)
  return ' '.join(''.join(letter if letter.isprintable() else ' ' for letter in text).split())


if __name__ == '__main__':
  sys.exit(main())
