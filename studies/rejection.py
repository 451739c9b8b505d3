"""The row of configs/claims/systems.py that no run of `jaxsearch train` makes: rejection-sampled fine-tuning.

    python -m studies.rejection    # adds its rows to docs/claims/runs/systems_trained.jsonl

Starts from Search-R1's initial policy and samples five chains for each of as many questions, all at once; the
right ones are imitated for three epochs. So its curve has two points, before and after.
"""

import functools
import pathlib

import jax
import numpy as np

from configs import sft as sft_config
from configs.claims import systems
from jaxsearch import setup
from jaxsearch.evaluation import answers, sweep, sweep_report
from jaxsearch.sampler.driver import rollout
from jaxsearch.training import rejection, sft
from studies import common, trained

CHAINS, EPOCHS, PER_STEP, RATE = 5, 3, 16, 1e-4
SIZES = {'full': {'steps': 0, 'held_out': 0}, 'tiny': {'steps': 1, 'held_out': 4}}


def measure(config, seed: int, out: pathlib.Path) -> dict:
  """Samples, imitates and evaluates; returns the row of a run, as studies/trained.py has it."""
  every = setup.load_questions(config, config.data.questions)
  order = np.random.default_rng(seed).permutation(len(every))[:config.steps * config.questions_per_step]
  bed = common.open_bed(config, [every[place] for place in order])
  asked = [question for question in bed.questions for _ in range(CHAINS)]
  trees, spent = rollout(bed.agent, asked, jax.random.key(seed))
  chosen = rejection.select([trees[start:start + CHAINS] for start in range(0, len(trees), CHAINS)])
  rejection.write(out / 'right.jsonl', chosen)
  right = sum(map(len, chosen))
  learning = sft_config.get_config()
  with learning.unlocked():
    learning.model, learning.seed, learning.out, learning.progress = config.model, seed, str(out), False
    learning.sft.update(demonstrations=str(out / 'right.jsonl'), per_step=PER_STEP)
    learning.steps = learning.checkpoint_every = max(1, EPOCHS * right // PER_STEP)
    learning.optim.update(learning_rate=RATE, lr_warmup_updates=2)
    learning.train.update(row_length=config.train.row_length, micro_rows=config.train.micro_rows)
  sft.train(learning)
  rows = []
  for checkpoint, step in (('', 0), (str(out), config.steps)):
    agent = common.open_bed(config, (), checkpoint, **config.eval.grow).agent
    rows += answers.held_out(agent, config, step)
  tokens = [0, int(sum(spent[name] for name in sweep_report.SPENT))]
  return trained.row_from(rows, tokens) | {'demonstrations': right}


def study(given, path) -> str:
  """Adds the rows that are missing."""
  parts = {}
  for run in (run for run in sweep.plan(systems.get_config()) if run.variant == 'Search-R1'):
    with run.config.unlocked():
      run.config.steps = given.steps or run.config.steps
      run.config.eval.number = given.held_out or run.config.eval.number
    out = run.out.parent.parent / f'rejection-sft-{given.size}' / str(run.seed)
    parts[f'rejection-sft/{run.seed}'] = functools.partial(measure, run.config, run.seed, out)
  rows = common.measured(path.with_name('systems_trained.jsonl'), parts)
  return common.table([{'run': name, 'right chains': row['demonstrations'], 'tokens': row['tokens'][-1],
                        'EM before': row['em'][0], 'EM after': row['em'][-1]} for name, row in rows.items()])


if __name__ == '__main__':
  common.main('rejection', study, SIZES)
