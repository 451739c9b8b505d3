"""The command line: `jaxsearch COMMAND --config configs/NAME.py --config.key=value`.

Every command reads a config (ml_collections) and takes overrides of its fields. What is the user's to mend, a wrong
flag, file or value, ends in one line and exit status 2. JAX is imported by the command, not by `--help`.
"""

import difflib
import sys

COMMANDS = {
  'train': 'reinforcement learning; the same command on the same folder goes on with the run',
  'eval': 'answer a file of questions and score the answers: --checkpoint, --questions, --corpus, --out [--as-tool]',
  'judge': 'compare two results of eval by six rubrics of a language model: --a, --b, --out; config.judge is local or chat',
  'ask': 'answer one question and show every thought, query and document: jaxsearch ask "question" [--checkpoint]',
  'serve': 'serve a search over HTTP (--corpus, --port), or a policy as a search tool of other models (--as-tool)',
  'critic-warmup': 'warm up the critic of a config (CARL, PPO) on closed-book and tool-required rollouts, until it passes a gate',
  'tiers': 'tell questions that the policy answers closed-book from others: --checkpoint, --questions, --out [--mixed]',
  'sft': 'supervised training on demonstrations',
  'sample': 'sample chains and keep the right ones as demonstrations: --checkpoint, --questions, --n, --keep, --out',
  'export': 'write a checkpoint as a Hugging Face folder: --checkpoint, --out',
  'sweep': 'train a grid of variants x seeds, and compare them in a table and curves [--report-only]',
  'world': 'make the embedded world again: its files (--out DIR), and with --policy its warm-started policy',
}
USAGE = """usage: jaxsearch COMMAND [--config configs/NAME.py] [--config.key=value ...]

Trains language models that learn when and how to search.

commands:
{commands}

Without --config a command runs on the embedded world (configs/quickstart.py). Fields and their comments: configs/base.py.
"""


def main(argv: list[str] | None = None) -> int:
  """Runs a command and returns the exit status."""
  arguments = sys.argv[1:] if argv is None else argv
  if not arguments or arguments[0] in ('-h', '--help', 'help'):
    print(usage())
    return 0
  if arguments[0] == '--version':
    from jaxsearch import __version__
    print(__version__)
    return 0
  command, rest = arguments[0], arguments[1:]
  if command not in COMMANDS:
    near = difflib.get_close_matches(command, COMMANDS, 1)
    return fail(f'no command {command!r}; ' + (f'did you mean {near[0]!r}?' if near else f'there are {", ".join(COMMANDS)}'))
  if {'-h', '--help'} & set(rest):
    print(f'jaxsearch {command}: {COMMANDS[command]}\n\n{usage()}')
    return 0
  from jaxsearch import commands
  from jaxsearch.data.jsonl import DataError
  from jaxsearch.flags import UsageError
  try:
    getattr(commands, command.replace('-', '_'))(command, rest)
  except (UsageError, DataError, FileNotFoundError, ValueError, ImportError) as error:
    if '--traceback' in sys.argv:
      raise
    return fail(str(error))
  return 0


def usage() -> str:
  width = max(map(len, COMMANDS))
  return USAGE.format(commands='\n'.join(f'  {name:<{width}}  {text}' for name, text in COMMANDS.items()))


def fail(message: str) -> int:
  print(f'jaxsearch: {message}', file=sys.stderr)
  return 2


if __name__ == '__main__':
  sys.exit(main())
