"""Declares commands, and holds what they share: flags, checks, output."""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence

from jaxsearch import registry, tools
from jaxsearch.config_check import check_files
from jaxsearch.files import write_whole
from jaxsearch.flags import Parser, UsageError, check_place, number, policy, say

COMMANDS: dict[str, Parser] = {}


def command(default_config: str, *flags: tuple[str, dict], examples: Sequence[str],
            takes_words: bool = False) -> Callable:
  """Registers `run(config, flags)` as the command of its name; `flags.words` are the words that are no flags.

  `examples` are shown below its `--help`, as they follow 'jaxsearch COMMAND'.
  """
  def register(run: Callable) -> Callable:
    name, words = run.__name__.replace('_', '-'), ' WORDS' if takes_words else ''
    lines = [f'  jaxsearch {name} {example}' for example in examples]
    COMMANDS[name] = parser = Parser(
      prog=name, description=inspect.getdoc(run), allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      usage=f'jaxsearch {name} [--config NAME] [--config.FIELD=VALUE ...] [FLAGS]{words}',
      epilog=f'--config is a shipped config or a Python file; {default_config} if not given. '
             '--config.FIELD=VALUE sets a field\nof it; configs/base.py explains the fields. '
             '--traceback shows where an error arose.\n\n' + '\n'.join(['examples:', *lines]))
    for flag, options in flags:
      parser.add_argument(flag, **options)
    parser.set_defaults(run=run, default_config=default_config, takes_words=takes_words,
                        known=[name.removeprefix('--') for name, _ in flags])
    return run
  return register


def flag(name: str, help: str, type: Callable = str, rule: str = '', **options) -> tuple[str, dict]:
  """Declares a flag; one that is not given is '', False for a bool, None for a number, a place or an address.

  Args:
    type: str, bool, int, float, or one of flags.py such as `place()`.
    rule: of a number, as in configs/checks.py.
  """
  kind = functools.partial(number, type, rule) if rule else type
  options |= {'action': 'store_true'} if type is bool else {'type': kind, 'metavar': 'VALUE'}
  return name, dict(help=help, default={str: '', bool: False}.get(type)) | options


CHECKPOINT = flag('--checkpoint', 'run folder, checkpoint in it, adapter or Hugging Face folder, or shipped: '
                  f'{", ".join(registry.POLICIES)}; config.model if not given', policy, default='')
CORPUS = flag('--corpus', 'passages: Search-R1 JSONL file, or world; config.data.corpus if not given')
QUESTIONS = flag('--questions', 'FlashRAG JSONL file, or world:SPLIT; those of the config if not given')
GREEDY = flag('--temperature', 'of sampling; greedy if not given', float, '>= 0', default=0.0)
LIMIT = flag('--limit', 'take only this many questions, the first; all if not given', int, '>= 1')


def saved_config(flags) -> dict | None:
  """Returns the config of the run that `--checkpoint` names, or was exported from; None if there is none."""
  if not getattr(flags, 'checkpoint', ''):
    return None
  from jaxsearch.training.saved_policies import read_saved
  saved = read_saved(flags.checkpoint)
  return saved and saved['config']


def replaced_fields(flags) -> list[str]:
  """Returns the config fields that given flags replace, and those that the command does not read."""
  places = {'corpus': ['data.corpus'], 'questions': ['data.questions', 'eval.questions']}
  return [field for name, replaced in places.items() if getattr(flags, name, True) for field in replaced]


def check_out(config) -> None:
  """Raises UsageError unless a run can be written to config.out; of a bucket only the URL is looked at."""
  from jaxsearch.training import bucket
  scheme = config.out.partition('://')[0]
  if not bucket.is_remote(config.out):
    check_place('config.out', config.out, folder=True)
  elif scheme not in bucket.PACKAGES:
    raise UsageError(f'config.out={config.out}: checkpoints go to a folder or a bucket, gs://; other storage '
                     'must be mounted as a file system')
  elif importlib.util.find_spec(package := bucket.PACKAGES[scheme]) is None:
    raise UsageError(f'config.out={config.out} needs the package {package!r}: '
                     f"pip install 'jaxsearch[{scheme}]'")


def check_inputs(config, flags, policy: bool = True) -> None:
  """Raises ValueError for files that answering needs and that are not there, and for a --corpus of no use.

  `policy` tells whether there is one to load, from --checkpoint or from the config.
  """
  corpus = getattr(flags, 'corpus', '')
  if corpus and not searched_corpus(config, flags):
    raise UsageError(f'--corpus means nothing with config.search.backend={config.search.backend!r}, which '
                     'searches elsewhere: leave it out, or set --config.search.backend=bm25')
  models = ('model', 'tokenizer') if policy and not flags.checkpoint else ()
  check_files(config, ('data.corpus', 'search', 'classifier', 'sampler', *models), corpus)


def searched_corpus(config, flags) -> str:
  """Returns the name of the corpus that is searched; '' if the back end searches elsewhere."""
  reads = tools.find_backend(config.search.backend).corpus(config.search)
  return (getattr(flags, 'corpus', '') or config.data.corpus) if reads else ''


def open_agent(config, flags, questions: Sequence, **changes) -> tuple:
  """Returns (agent, random key, what identifies its weights); `changes` are arguments of `grow`."""
  import jax

  from jaxsearch.evaluation import agents
  from jaxsearch.evaluation.manifest import weights
  from jaxsearch.setup import check_room
  policy = agents.load_policy(config, flags.checkpoint)
  check_room(config, policy.tokenizer, questions, say, **dict(config.eval.grow) | changes)
  corpus = getattr(flags, 'corpus', '')
  agent = agents.open_agent(config, corpus=corpus, policy=policy, **changes)
  about = weights(flags.checkpoint or config.model, policy.step)
  return agent, jax.random.key(config.seed), about


def write_result(path: str, result: str | dict) -> None:
  """Writes a text, or a dict as JSON, if there is a path."""
  if path:
    text = result if isinstance(result, str) else json.dumps(result, indent=1, ensure_ascii=False) + '\n'
    write_whole(path, text)


def refuse(flags, names: Sequence[str], where: str) -> None:
  """Raises UsageError for flags that are set where they have no effect."""
  for name in names:
    value = getattr(flags, name.replace('-', '_'))
    if value not in ('', None) and value is not False:  # 0 is set
      raise UsageError(f'--{name} means nothing {where}')


def print_figures(figures: dict) -> None:
  """Prints figures as one line of JSON with four decimals; null for what is not a number."""
  four = lambda value: round(float(value), 4)
  print(json.dumps(json.loads(json.dumps(figures), parse_float=four, parse_constant=lambda _: None)))


LINE_SECONDS = 60.0  # between lines about the progress where there is no terminal


@contextlib.contextmanager
def progress_of(total: int, what: str = 'questions'):
  """Shows a progress bar, or a line now and then without a terminal; yields the callback of a rollout.

  Says once when most searches fail.
  """
  from rich import progress

  from jaxsearch.sampler.requests import failing
  columns = (progress.MofNCompleteColumn(), progress.BarColumn(), progress.TimeElapsedColumn(),
             progress.TimeRemainingColumn())
  with progress.Progress(what, *columns, disable=not sys.stderr.isatty(), speed_estimate_period=600) as bar:
    bar.add_task('', total=total)
    task, warned, shown = bar.tasks[0], '', time.monotonic()

    def report(done: int, _: int = 0, metrics: dict | None = None) -> None:
      nonlocal warned, shown
      bar.update(task.id, completed=done)
      if bar.disable and done > 0 and time.monotonic() - shown >= LINE_SECONDS:
        shown, seconds = time.monotonic(), task.time_remaining
        say(f'{done} of {total} {what}' + ('' if seconds is None else f', {seconds / 60:.0f} minutes left'))
      if not warned and metrics and (warned := failing(metrics)):
        say(warned)

    yield report
