"""Search-R2 with frozen weights: what cutting a draft at its flaw gains over drawing it again.

    python -m recipes beds actor reviewer --config.out=runs/beds
    python -m studies.search_r2

Paths of three hops, four spans a chain. Every draft is reviewed by the actor itself, which knows the form of
a review alone, and by a reviewer that was taught the flaws; and it is regenerated five times from before each
of its steps. From these the gain of any discriminator with any cut is an average (propositions 4.1 and 4.2).
Up to four revisions in a row are grown besides, by every row of STRATEGIES. R is the EM. A token counts once,
where it is decoded or prefilled: the cache keeps prefixes. Of a review the prompt and all replies count.
"""

import functools

import numpy as np

from configs import search_r2 as method_config
from jaxsearch import setup
from jaxsearch.advantages import refinement_gain
from jaxsearch.evaluation import verdicts
from jaxsearch.methods import actions, refiner
from jaxsearch.methods.search_r1 import act, start
from jaxsearch.rewards.match import normalize_answer
from jaxsearch.trees.tree import Role
from jaxsearch.world import chains
from studies import common

HOPS, REVISIONS = 3, 4
FIRST = 212  # those before were looked at in the first run, whose reviewer missed the gate
SIZES = {'full': {'number': 400, 'copies': 5}, 'tiny': {'number': 3, 'copies': 2}}
REVIEWERS = {'own': 'policy', 'taught': 'frozen'}
STRATEGIES = {  # name -> (which drafts are rejected, where they are cut)
  'own review, own cut': ('own', 'trim'), 'taught review, its cut': ('taught', 'trim'),
  'taught, random cut': ('taught', 'random'), 'taught, from scratch': ('taught', 'scratch'),
  'taught, oracle cut': ('taught', 'oracle'), 'oracle, oracle cut': ('oracle', 'oracle'),
}
CUT, RANDOM, SCRATCH = list(STRATEGIES)[1:4]
MARGIN = 0.03  # of EM
LOCATED = 0.5  # the gate: how often the taught reviewer cuts a wrong draft at its first flaw


def first_flaw(tree, leaf) -> int:
  """Returns the first step that leaves the gold chain, from 1; 0 where the chain ends with a right answer."""
  steps = refiner.steps_of(leaf)
  gold = [normalize_answer(step['query']) for step in tree.question.metadata['steps']]
  if tree.question.score(actions.read(steps[-1]).answer):
    return 0
  for place, node in enumerate(steps):
    query = actions.read(node).query
    if place >= len(gold) or query is None or normalize_answer(query) != gold[place]:
      return place + 1
  return len(steps)


def grow(question, tree, *, copies, max_tokens=64):
  """Grows a draft, its reviews, its regenerations and its revisions; notes what is found in data['notes']."""
  spans = HOPS + 1
  write = functools.partial(act, tree, max_tokens=max_tokens)
  right, read = lambda leaf: question.score(actions.read(leaf).answer), {}

  def regenerate(steps, kept):
    """Returns (last span, tokens) of a chain from before step `kept` + 1."""
    behind = steps[kept].parent
    end = yield from write(behind, turns=spans - kept - 1)
    return end, end.length - behind.length

  def review(leaf, reviewer):
    """Returns (flawed step or 0, the trimmer's probabilities, tokens); a chain is read once by each."""
    if reviewer == 'oracle':
      return first_flaw(tree, leaf), None, 0
    if (leaf, reviewer) not in read:
      flawed, cuts = yield from refiner.review(
        tree, leaf, threshold=0.0, refiner=REVIEWERS[reviewer], random_share=0.0, template='world')
      asked = [node for node in leaf.children if node.role is Role.PROMPT][-1]
      replies = (tree.tokenizer.encode(f' {step}') for step in range(len(cuts) + 1))
      read[leaf, reviewer] = flawed, cuts, len(asked.tokens) + sum(map(len, replies))
    flawed, cuts, tokens = read[leaf, reviewer]
    return flawed and int(tree.rng.choice(len(cuts), p=cuts)) + 1, cuts, tokens

  draft = yield from write(start(tree, question, 'world', False), turns=spans - 1)
  steps, tokens = refiner.steps_of(draft), draft.length
  notes = {'right': right(draft), 'tokens': tokens, 'flaw': first_flaw(tree, draft), 'trails': {}}
  for name in REVIEWERS:
    flawed, cuts, _ = yield from review(draft, name)
    notes[name] = [int(flawed == 0), np.round(cuts, 4).tolist()]
  notes['values'] = yield from values_of(question, steps, copies, write)
  for name, (reviewer, cut) in STRATEGIES.items():
    leaf, spent, trail = draft, tokens, [[notes['right'], tokens]]
    for _ in range(REVISIONS):
      flawed, _, extra = yield from review(leaf, reviewer)
      spent, steps = spent + extra, refiner.steps_of(leaf)
      if flawed:
        at = {'trim': flawed, 'scratch': 1, 'oracle': first_flaw(tree, leaf) or len(steps),
              'random': int(tree.rng.integers(1, len(steps) + 1))}[cut]
        leaf, new = yield from regenerate(steps, at - 1)
        spent += new
      trail.append([right(leaf), spent])
      if not flawed:
        break
    trail += trail[-1:] * (REVISIONS + 1 - len(trail))
    notes['trails'][name] = trail
  tree.root.data['notes'] = notes


def values_of(question, steps, copies, write):
  """Regenerates a draft `copies` times from before each of its steps; returns how often that ends right."""
  values = []
  for kept, step in enumerate(steps):
    ends = []
    for _ in range(copies):
      ends.append((yield from write(step.parent, turns=HOPS - kept)))
    values.append(round(float(np.mean([question.score(actions.read(end).answer) for end in ends])), 4))
  return values


def gold(question, tree, *, max_tokens=64):
  """Grows the gold chain, of which the policy writes the answer alone: the ceiling."""
  node, spans = start(tree, question, 'world', False), chains.full_chain(question)
  for _, text in spans[:-1:2]:
    action = actions.read(node.append(text, Role.POLICY))
    yield from actions.search([action], tree)
    node = action.node.append(action.observation, Role.OBSERVATION)
  yield from act(tree, node, turns=0, max_tokens=max_tokens)


def padded(lists) -> np.ndarray:
  return np.array([[*each, *[0.0] * (HOPS + 1 - len(each))] for each in lists], float)


def influences(accept, cuts, gains, rewards) -> dict[str, np.ndarray]:
  """Returns each draft's contribution [N] to the terms of appendix D, which are their means.

  Args:
    accept [N], cuts [N,K], gains [N,K], rewards [N]: of drafts, see `refinement_gain`.
  """
  trimmed = rewards + (cuts * gains).sum(axis=1)
  centred, v_inter = lambda x: x - x.mean(axis=0), 1 - accept.mean()
  mean_cuts, mean_gains = cuts.mean(axis=0), gains.mean(axis=0)
  bar = mean_cuts @ mean_gains + centred(cuts) @ mean_gains + centred(gains) @ mean_cuts
  of = {'a_prec': centred(accept) * centred(rewards - trimmed), 'v_inter': 1 - accept,
        's_trim': (centred(cuts) * centred(gains)).sum(axis=1), 'v_inter g_bar': v_inter * bar,
        'sum': (1 - accept) * (trimmed - rewards)}
  for name, value in refinement_gain(accept, cuts, gains, rewards, trimmed).items():
    assert abs(float(value) - of[name].mean()) < 1e-4
  return of


def terms(accept, cuts, gains, rewards) -> dict[str, verdicts.Estimate]:
  """Returns the terms of appendix D, with intervals over questions; arguments as of `influences`."""
  return {name: verdicts.estimate(values)
          for name, values in influences(accept, cuts, gains, rewards).items()}


def study(given, out) -> str:
  """Measures what is missing and returns the tables."""
  config = method_config.get_config().unlock()
  config.model, config.grow.max_turns, config.sampler.length = given.actor, HOPS + 1, 1024  # with reviews
  config.refiner.update(model=given.reviewer, slots=32)
  questions = common.paths('world:rl', [HOPS])[FIRST:][:given.number]
  bed = functools.cache(lambda: common.open_bed(config, questions))  # rows that are there need none

  def drafts():
    own = functools.partial(grow, copies=given.copies)
    return {'drafts': [tree.root.data['notes'] for tree, in common.grow(bed(), 0, own=own)]}

  def control(own, noise):
    config.search.noise = noise
    trees = common.grow(bed(), 100, own=own, tools=setup.open_tools(config))
    return {'em': float(np.mean([tree.question.score(tree.answer) for tree, in trees]))}

  plain = setup.bind_grow(config, max_revisions=0)
  parts = {'drafts 0': drafts, 'gold chains': functools.partial(control, gold, 0.0),
           'random documents': functools.partial(control, plain, 1.0)}
  return report(common.measured(out, parts))


def report(rows) -> str:
  notes = rows['drafts 0']['drafts']
  column = lambda name: np.array([note[name] for note in notes], float)
  rewards, flaw = column('right'), column('flaw').astype(int)
  exists = padded([[1] * len(note['values']) for note in notes])
  gains = (padded([note['values'] for note in notes]) - rewards[:, None]) * exists
  trails = {name: np.array([note['trails'][name] for note in notes], float) for name in STRATEGIES}
  em = {name: of[:, :, 0].T for name, of in trails.items()}
  tokens = {name: of[:, :, 1].mean(axis=0) for name, of in trails.items()}
  accept = {name: np.array([note[name][0] for note in notes], float) for name in REVIEWERS}
  trim = {name: padded([note[name][1] for note in notes]) for name in REVIEWERS}
  places = np.eye(HOPS + 1)
  cuts = {'trim': trim['taught'], 'random': exists / exists.sum(axis=1, keepdims=True),
          'scratch': np.tile(places[0], (len(notes), 1)),
          'oracle': places[np.where(flaw > 0, flaw, exists.sum(axis=1).astype(int)) - 1]}

  again = lambda name: common.at_budget(tokens[SCRATCH], em[SCRATCH], tokens[name][1])
  of_rows = [{'EM in %': name} | {f'N={n}': f'{100 * of.mean():.1f}' for n, of in enumerate(em[name])} | {
    'tokens at N=1': f'{tokens[name][1]:.0f}',
    'over drawing again, equal tokens': common.interval(verdicts.estimate(em[name][1] - again(name)), 100)}
    for name in STRATEGIES]

  shown = lambda of: {term: common.interval(estimate, 100) for term, estimate in of.items()}
  of_terms, shuffled = [], np.random.default_rng(0).permutation(len(notes))
  for name, (reviewer, cut) in STRATEGIES.items():
    if reviewer != 'oracle':
      here = terms(accept[reviewer], trim['own'] if reviewer == 'own' else cuts[cut], gains, rewards)
      measured = common.interval(verdicts.estimate(em[name][1] - em[name][0]), 100)
      of_terms.append({'points of EM': name} | shown(here) | {'measured': measured})
  control = terms(accept['taught'], cuts['trim'], gains[shuffled], rewards[shuffled])
  of_terms.append({'points of EM': 'taught, rewards shuffled'} | shown(control) | {'measured': ''})

  on = lambda reviewer, where: (1 - accept[reviewer]) * (where * gains).sum(axis=1)
  gap = lambda a, b: verdicts.estimate(a - b)
  draft, once, more = em[CUT][0], em[CUT][1], tokens[CUT][1] / tokens[CUT][0]
  contrasts = {
    'revising once over the draft': (gap(once, draft), None),
    'cut over drawing again, equal tokens': (gap(once, again(CUT)), MARGIN),
    'right traces for the tokens, over more drafts': (gap(once, more * draft), None),
    'its cut over a random cut, same drafts': (
      gap(on('taught', cuts['trim']), on('taught', cuts['random'])), MARGIN),
    'four revisions over one': (gap(em[CUT][4], once), MARGIN),
    'sum of the terms over the measured gain': (gap(on('taught', cuts['trim']), once - draft), MARGIN),
    'random cut over the draft (s_trim 0)': (gap(em[RANDOM][1], em[RANDOM][0]), MARGIN),
    'oracle cut over drawing again, same drafts': (
      gap(on('taught', cuts['oracle']), on('taught', cuts['scratch'])), None),
    'form alone: its cut over a random cut': (gap(on('own', trim['own']), on('own', cuts['random'])), None),
  }
  astray, of = np.mean((0 < flaw) & (flaw <= HOPS)), lambda name: f'{100 * rows[name]["em"]:.1f} %'
  share = lambda of, where: f'{100 * of[where].mean():.0f}'
  at_flaw = {name: (of * cuts['oracle']).sum(axis=1)
             for name, of in (trim | {'random': cuts['random']}).items()}
  of_reviewers = [{'%': name, 'rejects right drafts': share(1 - accept[name], flaw == 0),
                   'rejects wrong ones': share(1 - accept[name], flaw > 0),
                   'cuts wrong ones at the first flaw': share(at_flaw[name], flaw > 0),
                   'a random cut does': share(at_flaw['random'], flaw > 0)} for name in REVIEWERS]
  missed = at_flaw['taught'][flaw > 0].mean() < LOCATED
  about = (f'{len(notes)} questions, a draft each: {100 * rewards.mean():.1f} % right, {100 * astray:.1f} % '
           f'astray at a search. Gold chains: {of("gold chains")}; random documents: '
           f'{of("random documents")}.')
  return '\n\n'.join([about, common.table(of_reviewers), common.table(of_rows), common.table(of_terms),
                      common.verdicts_of(contrasts, 'points of EM', 100,
                                         why='undecided: the reviewer misses its gate' * bool(missed))])


if __name__ == '__main__':
  common.main('search_r2', study, SIZES, actor='runs/beds/actor', reviewer='runs/beds/reviewer')
