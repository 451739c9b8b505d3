"""The commands of the recipes: `python -m recipes COMMAND --help`."""

import sys

from jaxsearch import cli
from jaxsearch.commands import GROUPS
from jaxsearch.commands.command import COMMANDS, check_files, check_place, command, flag, print_figures
from jaxsearch.flags import UsageError, place

COMMANDS.clear()
GROUPS.clear()


@command('world_policy',
         flag('--out', 'folder for the files of the world; none if not given', place(folder=True)),
         flag('--policy', 'train the policy into config.out', bool),
         examples=('--out world', '--policy --config.out=runs/world_policy'))
def world(config, flags) -> None:
  """Make the files of the embedded world again, or its warm-started policies."""
  if not (flags.out or flags.policy):
    raise UsageError('say what to make: --out FOLDER for the files of the world, --policy for its policy')
  if flags.policy:
    check_place('config.out', config.out, folder=True)
  if flags.out:
    from recipes.world import build
    build.build(flags.out)
    print(f'world: {flags.out}')
  if flags.policy:
    from recipes.world import policies
    print(f'policy: {policies.make(config)}')


@command('world_beds', takes_words=True, examples=(
  '--config.out=runs/beds', 'growing both --config.out=runs/beds'))
def beds(config, flags) -> None:
  """Make the policies that the studies of claims begin with: all of them, or those that are named.

  They are actor, reviewer, tiers, seeker, both, growing, reader, and exchanged, which are questions.
  """
  check_place('config.out', config.out, folder=True)
  from recipes.world import beds as of_world
  print(f'policies: {of_world.make(config, flags.words.split())}')


@command('folded', flag('--out', 'JSONL file to write', place(), required=True),
         flag('--number', 'chains to write at most; 2000 if not given', int, '>= 1', default=2000), examples=(
           '--config folded --out runs/folded/chains.jsonl',
           '--config folded --out chains.jsonl --number 500'))
def folded(config, flags) -> None:
  """Write gold chains of the embedded world with summaries in them, as demonstrations for sft."""
  from recipes.world import folded
  print_figures(folded.write(config, flags.out, flags.number) | {'out': flags.out})


@command('smollm2_wiki', flag('--out', 'folder to write', place(folder=True), required=True),
         flag('--number', 'chains to write at most; 2000 if not given', int, '>= 1', default=2000), examples=(
           '--config smollm2_wiki --config.folder=DATA --out runs/smollm2_wiki/made',
           '--config smollm2_wiki --out made --number 500'))
def chains(config, flags) -> None:
  """Write chains of searches as demonstrations for sft, from questions and passages, without a model."""
  check_files(config, ('data', 'model', 'tokenizer', 'search'))
  from recipes import wiki_chains
  print_figures(wiki_chains.write(config, flags.out, flags.number) | {'out': flags.out})


GROUPS['Recipes'] = list(COMMANDS)
if __name__ == '__main__':
  sys.exit(cli.main())
