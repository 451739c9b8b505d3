"""The command line: `jaxsearch COMMAND --config NAME --config.key=value`.

A mistake that the user can mend, in a flag, a file or a value, ends in one line and exit status 2; `--traceback` shows where
it arose. So does a run that cannot go on, with exit status 1. The commands import JAX, `--help` does not.
"""

import sys

from jaxsearch import __version__, flags
from jaxsearch.commands import COMMANDS, saved_config
from jaxsearch.config_check import suggestion
from jaxsearch.training import RunStopped

USAGE = """usage: jaxsearch COMMAND [--config NAME] [--config.FIELD=VALUE ...] [FLAGS]

Trains language models that learn when and how to search.

commands:
{commands}

Without --config a command runs on the embedded world. More: jaxsearch COMMAND --help, and configs/base.py for all fields.
"""


def main(argv: list[str] | None = None) -> int:
  """Runs a command and returns the exit status."""
  given = sys.argv[1:] if argv is None else argv
  name, *arguments = [argument for argument in given if argument != '--traceback'] or ['--help']
  try:
    if name in ('-h', '--help', 'help'):
      print(USAGE.format(commands='\n'.join(f'  {command:<14} {parser.description.splitlines()[0]}'
                                            for command, parser in COMMANDS.items())))
    elif name == '--version':
      print(__version__)
    elif name not in COMMANDS:
      raise flags.UsageError(f'no command {name!r}{suggestion(name, COMMANDS) or "; there are " + ", ".join(COMMANDS)}')
    elif {'-h', '--help'} & set(arguments):
      COMMANDS[name].print_help()
    else:
      own, rest = COMMANDS[name].parse_known_args(arguments)
      config, words, own.changed = flags.parse(name, rest, own.default_config, saved=saved_config(own))
      if words and not own.takes_words:
        raise flags.UsageError(f'{name} does not know what to do with {" ".join(map(repr, words))}')
      own.words = ' '.join(words).strip()
      own.run(config, own)
  except (flags.UsageError, OSError, ValueError, ImportError, RunStopped) as error:
    if '--traceback' in given:
      raise
    print(f'jaxsearch: {error}', file=sys.stderr)
    return 1 if isinstance(error, RunStopped) else 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
