"""Search-R2's mechanism in training: do the reviews get better where the policy learns to review?

    jaxsearch sweep --config configs/claims/search_r2.py
    python -m studies.trimming

The actor that the grid starts from drafts an answer to each of 200 held-out questions (there are 188), once, and
regenerates every draft five times from before each of its steps. Checkpoints of the rows below review these drafts, so
A_prec and S_trim (appendix D) differ by the reviewer alone. Intervals are over seeds and drafts together.
"""

import functools

import numpy as np

from configs import search_r2 as method_config
from configs.claims import search_r2 as grid
from jaxsearch.evaluation import sweep, verdicts
from jaxsearch.methods import actions, refiner
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.trees.tree import Role
from studies import common, search_r2
from studies.search_r2 import HOPS

SIZES = {'full': {'number': 200, 'copies': 5}, 'tiny': {'number': 3, 'copies': 2}}
JOINT, APART, FROZEN = 'Search-R2', '+ process reward', 'frozen refiner'
ROWS = (JOINT, APART, FROZEN)
MARGIN = 0.01  # of EM: what a term adds to the gain


def draft(question, tree, *, copies, max_tokens=64):
  """Grows a draft and its regenerations; notes what was written and what each step's regenerations earn."""
  write = functools.partial(act, tree, max_tokens=max_tokens)
  leaf = yield from write(start(tree, question, 'world', False), turns=HOPS)
  steps = refiner.steps_of(leaf)
  values = yield from search_r2.values_of(question, steps, copies, write)
  tree.root.data['notes'] = {'texts': [step.text for step in steps], 'values': values,
                             'right': int(question.score(actions.read(leaf).answer))}


def review(question, tree, *, texts):
  """Writes a question's draft again and reviews it; notes whether it is accepted, and where it is cut."""
  node = start(tree, question, 'world', False)
  *searches, last = texts[question.id]
  for text in searches:
    action = actions.read(node.append(text, Role.POLICY))
    yield from actions.search([action], tree)
    node = action.node.append(action.observation, Role.OBSERVATION)
  leaf = node.append(last, Role.POLICY)
  flawed, cuts = yield from refiner.review(
    tree, leaf, threshold=0.0, refiner='policy', random_share=0.0, template='world')
  tree.root.data['notes'] = [int(flawed == 0), np.round(cuts, 4).tolist()]


def study(given, out) -> str:
  """Measures what is missing and returns the tables."""
  config = method_config.get_config().unlock()
  config.model, config.grow.max_turns, config.sampler.length = given.actor, HOPS + 1, 1024  # with reviews
  asked = common.paths('world:test', [HOPS])[:given.number]
  notes = lambda checkpoint, own: [tree.root.data['notes'] for tree, in common.grow(
    common.open_bed(config, asked, checkpoint), 0, own=own)]
  own = functools.partial(draft, copies=given.copies)
  drafts = common.measured(out, {'drafts': lambda: {'drafts': notes('', own)}})['drafts']['drafts']
  reread = functools.partial(review, texts={q.id: note['texts'] for q, note in zip(asked, drafts)})
  reviews = lambda checkpoint: {'reviews': notes(checkpoint, reread)}
  parts = {'at the start': functools.partial(reviews, '')}
  for run in (run for run in sweep.plan(grid.get_config()) if run.variant in ROWS):
    saved = [path for path in (run.out / 'checkpoints').glob('*') if path.name.isdecimal()]
    for path in sorted(saved, key=lambda path: int(path.name)):
      parts[f'{run}, step {path.name}'] = functools.partial(reviews, str(path))
  rows = common.measured(out, parts, others=True)
  del rows['drafts']
  return report(drafts, rows)


def report(drafts, rows) -> str:
  rewards = np.array([note['right'] for note in drafts], float)
  exists = search_r2.padded([[1] * len(note['values']) for note in drafts])
  gains = (search_r2.padded([note['values'] for note in drafts]) - rewards[:, None]) * exists
  cells = {}  # (row, step) -> term -> seed -> [drafts]
  for part, row in rows.items():
    accept, cuts = zip(*row['reviews'])
    of = search_r2.influences(np.array(accept, float), search_r2.padded(cuts), gains, rewards)
    variant, seed, step = part.split(', ') if ',' in part else (part, '', 'step 0')
    terms = cells.setdefault((variant, step), {})
    for name, values in (('accepts', np.array(accept)), ('a_prec', of['a_prec']), ('s_trim', of['s_trim'])):
      terms.setdefault(name, {})[seed] = values
  first = [{'reviewer': f'{variant}, {step}', 'seeds': len(terms['a_prec'])} | {
    name: common.interval(verdicts.estimate(np.stack(list(of.values()))), 100) for name, of in terms.items()}
    for (variant, step), terms in cells.items()]
  last = max((step for _, step in cells), key=lambda step: int(step.split()[-1]))
  if missing := {(JOINT, last), (APART, last)} - cells.keys():
    raise FileNotFoundError(f'{sorted(missing)}: no such run of configs/claims/search_r2.py')

  def gap(name, other):  # paired by seed, since rows come in the order of measurement
    ours, others = (cells[variant, last][name] for variant in (JOINT, other))
    return verdicts.estimate([ours[seed] - others[seed] for seed in sorted(ours.keys() & others.keys())])

  contrasts = {'**S_trim, joint - not joint**': (gap('s_trim', APART), MARGIN),
               'A_prec, joint - not joint': (gap('a_prec', APART), None)}
  return '\n\n'.join([common.table(first), common.verdicts_of(contrasts, 'points of EM', 100)])


if __name__ == '__main__':
  common.main('trimming', study, SIZES, actor=grid.ACTOR)
