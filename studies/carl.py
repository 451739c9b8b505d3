"""CARL with frozen weights: whose credit is near the truth, and what makes a critic that gives it.

    python -m recipes beds tiers --config.out=runs/beds
    python -m studies.carl

One rollout of each held-out question of the bed `tiers`, whose policy's own contexts lose what was found
in 40 % of the cases. The true V of a boundary state is the share of 16 continuations from it that are right;
the true A of a segment is V(s') - V(s), of the last one R - V(s). Estimates are compared with these: by
segments with lambda, by tokens (GAE, the mean over a segment), by trajectories (GRPO, four more rollouts).
From squared errors the variance of the truth, p(1-p)/15 a state, is subtracted. Critics learn from rollouts
on the other questions, by `jaxsearch critic-warmup`. The unit is the country, with its six questions.
"""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
from scipy import stats

from jaxsearch import setup
from jaxsearch.advantages import gae, group_relative, smdp_td
from jaxsearch.evaluation import agents, calibration, verdicts
from jaxsearch.methods import carl
from jaxsearch.rewards.match import answer_found
from jaxsearch.training import critic_warmup, row_files
from jaxsearch.trees.tree import Role
from recipes.world import countries
from studies import common, gradients

SIZES = {'full': {'number': 360, 'copies': 16, 'group': 5, 'updates': 100, 'trajectories': 480, 'learn': 360},
         'tiny': {'number': 6, 'copies': 2, 'group': 2, 'updates': 1, 'trajectories': 16, 'learn': 20}}
LAMBDAS = (0.0, 0.5, 0.95, 1.0)
TOKEN_LAMBDAS = (0.95, 1.0)
CRITICS = {  # name -> changes of the warm-up; the first is the paper's
  'curated, shared': {},
  'random, shared': {'critic_warmup.curated': False},
  'curated, frozen': {'critic_warmup.backbone_rate': 0.0},
  'random, frozen': {'critic_warmup.backbone_rate': 0.0, 'critic_warmup.curated': False},
  'every token, frozen': {'critic_warmup.backbone_rate': 0.0, 'train.aggregate': 'token-mean'},
  'rewards shuffled, frozen': {'critic_warmup.backbone_rate': 0.0},
}
MAIN, RANDOM, FROZEN, RANDOM_FROZEN, TOKENS, SHUFFLED = CRITICS
NONE, DRAWS = 'no warm-up', 500
_smdp_td = jax.jit(smdp_td, static_argnames='lam')
LARGE = 0.25  # the smallest true |A| whose sign counts
MARGIN = 0.02  # of squared errors; of AUC 0.05


def grow(question, tree, *, rollout, copies, settings):
  """Grows a rollout, and `copies` continuations from each of its boundaries, of which it keeps outcomes."""
  yield from rollout(question, tree)
  answer, stop, spans = tree.answer, tree.stop, segments(tree)
  for number, span in enumerate(spans):
    state, outcomes = span.parent, []
    before = {node: list(node.children) for node in (state, state.parent)}
    for _ in range(copies):
      tree.answer = None
      yield from carl.proceed(tree, state, settings.max_segments - number, settings.max_tokens,
                              settings.context_tokens)
      outcomes.append(int(question.score(tree.answer)))
      for node, children in before.items():
        node.children = list(children)
    span.data['outcomes'] = outcomes
  tree.answer, tree.stop = answer, stop


def segments(tree):
  """Returns the segments of a rollout, in order; the states before them are their parents."""
  return [node for node in tree.nodes(Role.POLICY) if node.tokens]


def warm_up(given, name, folder) -> None:
  """Warms a critic up in its folder. Curated critics share one set of rollouts, random ones another."""
  config = countries.bed_config(given.bed)
  config.update_from_flattened_dict(CRITICS[name])
  config.out, config.data.questions = str(folder / name), f'{given.bed}/learn.jsonl'
  config.train.update(row_length=384, micro_rows=8)
  config.critic_warmup.update(min_updates=given.updates, max_updates=given.updates, check_every=given.updates,
                              held_out=0.05, questions=given.learn, trajectories=given.trajectories, trees=20)
  # The second search is the bed's own, with random passages in half of the calls.
  del config.critic_warmup.second_search
  config.critic_warmup.second_search = {'noise': 0.5}
  twin = MAIN if config.critic_warmup.curated or name == RANDOM else RANDOM
  if name != MAIN:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for file in ('closed_book.jsonl', *(['chosen.jsonl', 'rollouts.jsonl'] if name != RANDOM else [])):
      if (folder / name / file).exists():
        continue
      rows = row_files.read(folder / twin / file)
      if not rows and file != 'chosen.jsonl':
        raise FileNotFoundError(f'{folder / twin / file}: gone; take the row of {twin!r} out too')
      if name == SHUFFLED and file == 'rollouts.jsonl':
        rewards = np.random.default_rng(0).permutation([row['reward'] for row in rows]).tolist()
        rows = [row | {'reward': reward} for row, reward in zip(rows, rewards)]
      row_files.write(folder / name / file, rows)
  critic_warmup.warm_up(config.lock(), lambda *_: {'auc': 1.0}, lambda *_: None)


def by_token(trees, lam) -> list[list[float]]:
  """Returns the mean advantage of a segment's tokens by GAE over tokens, for each tree."""
  chains = [[span.values for span in segments(tree)] for tree in trees]
  lengths = [sum(map(len, chain)) for chain in chains]
  values, mask, rewards = (np.zeros((len(trees), max(lengths)), np.float32) for _ in range(3))
  for row, (chain, length) in enumerate(zip(chains, lengths)):
    values[row, :length], mask[row, :length] = np.concatenate(chain), 1
    rewards[row, length - 1] = trees[row].reward
  advantages = np.asarray(gae(rewards, values, mask, gamma=1.0, lam=lam)[0])
  return [[float(part.mean()) for part in np.split(of[:length], np.cumsum([*map(len, chain)])[:-1])]
          for of, length, chain in zip(advantages, lengths, chains)]


def study(given, out) -> str:
  """Measures what is missing and returns the tables."""
  config = countries.bed_config(given.bed)
  questions = countries.questions('held_out')[:given.number]
  bed = functools.cache(lambda: common.open_bed(config, questions))  # rows that are there need none
  plain = setup.bind_grow(config)
  folder = pathlib.Path(given.critics, given.size)

  @functools.cache
  def rollouts():  # those that `truth` continues from: what a tree draws depends on its number alone
    trees = [tree for tree, in common.grow(bed(), 0, own=plain)]
    for tree in trees:
      tree.reward = carl.reward(tree)
    return trees

  def truth():
    own = functools.partial(grow, rollout=plain, copies=given.copies, settings=config.grow)
    trees = [tree for tree, in common.grow(bed(), 0, own=own)]
    lost = [not answer_found(tree.question.golden_answers, span.data['context']) for tree in trees
            for span in segments(tree) if span.data['segment'] == 'assimilate'] or [0]
    return {'outcomes': [[''.join(map(str, span.data['outcomes'])) for span in segments(tree)]
                         for tree in trees],
            'lost': float(np.mean(lost)),
            'rewards': [carl.reward(tree) for tree in trees]}

  def others():
    groups = common.grow(bed(), 1, copies=given.group - 1, own=plain)
    return {'rewards': [[carl.reward(tree) for tree in group] for group in groups]}

  def critic(name):
    warm_up(given, name, folder)
    agents.open_critic(config, str(folder / name))(rollouts())
    row = {'rewards': [tree.reward for tree in rollouts()],
           'values': [[round(float(span.values[0]), 4) for span in segments(tree)] for tree in rollouts()]}
    if name == TOKENS:
      row |= {f'by token {lam:g}': [np.round(of, 4).tolist() for of in by_token(rollouts(), lam)]
              for lam in TOKEN_LAMBDAS}
    return row

  parts = {'truth': truth, 'others': others}
  parts |= {name: functools.partial(critic, name) for name in CRITICS}
  look = functools.partial(countries.look, pathlib.Path(given.bed), questions)
  parts |= {'best strategy': functools.partial(look, 0.0), 'random documents': functools.partial(look, 1.0)}
  rows = common.measured(out, parts)
  assert all(rows[name]['rewards'] == rows['truth']['rewards'] for name in CRITICS)
  return report(questions, rows)


@dataclasses.dataclass(frozen=True)
class States:
  """Boundary states of all rollouts, concatenated. Letters: N states, each before a segment, Q rollouts."""
  of: np.ndarray       # [N] their rollout
  last: np.ndarray     # [N] whether the answer follows
  first: np.ndarray    # [N] whether it is s_0
  draws: np.ndarray    # [N,copies] whether continuations are right
  rewards: np.ndarray  # [Q]
  country: np.ndarray  # [Q] number
  known: np.ndarray    # [Q] whether the policy knows the country

  def truth(self, draws):
    """Returns V [N] estimated from `draws`, its variance, the segments' true A, and its variance."""
    values, noise = draws.mean(axis=1), draws.var(axis=1, ddof=1) / draws.shape[1]  # p(1-p)/15
    return values, noise, self.credit(values), noise + np.where(self.last, 0, np.append(noise[1:], 0))

  def credit(self, values, lam=0.0, rewards=None):
    """Returns the advantages [N] of segments by values [N]; of rewards other than its own, [Q]."""
    place = np.arange(len(self.of)) - np.flatnonzero(self.first)[self.of]
    table = np.zeros((self.of[-1] + 1, place.max() + 1), np.float32)
    table[self.of, place] = values
    rewards = self.rewards if rewards is None else rewards
    return np.asarray(_smdp_td(table, rewards, np.bincount(self.of), lam=lam))[self.of, place].astype(float)

  def mean(self, by_state):
    """Estimates a mean over countries of means over questions of means over states."""
    by_question = np.bincount(self.of, by_state) / np.bincount(self.of)
    return verdicts.estimate(np.bincount(self.country, by_question) / np.bincount(self.country))

  @functools.cached_property
  def drawn(self):
    """State indices: those of the sample, then of bootstrap resamples of countries."""
    weights = gradients.resamples(self.country.max() + 1, np.random.default_rng(0))[:DRAWS].astype(int)
    return [np.repeat(np.arange(len(self.of)), weight[self.country[self.of]]) for weight in weights]

  def figure(self, of_places):
    """Estimates a figure, a function of state indices, with its bootstrap."""
    return gradients.estimate(np.array([of_places(places) for places in self.drawn]))


def states_of(questions, rows) -> States:
  chains = rows['truth']['outcomes']
  of = np.repeat(np.arange(len(chains)), list(map(len, chains)))
  edge = np.diff(of, prepend=-1, append=len(chains)) > 0
  return States(
    of, edge[1:], edge[:-1], np.array([list(map(int, state)) for chain in chains for state in chain], float),
    np.array(rows['truth']['rewards']),
    np.unique([question.id.split('.')[0] for question in questions], return_inverse=True)[1],
    np.array([question.metadata['tier'] == 2 for question in questions]))


def estimates_of(states, rows, critics) -> tuple[dict, dict]:
  """Returns name -> estimates [N], and name -> squared errors [N] less the variance of the truth."""
  _, _, truth, noise = states.truth(states.draws)
  shuffled = np.random.default_rng(0).permutation(states.rewards)

  def relative(rewards, **settings):
    groups = np.column_stack([rewards, rows['others']['rewards']])
    ids = np.repeat(np.arange(len(groups)), groups.shape[1])
    of_all = np.asarray(group_relative(groups.ravel(), ids, len(groups), **settings))
    return of_all.reshape(groups.shape)[states.of, 0]

  found = {f'λ = {lam:g}': states.credit(critics[MAIN], lam) for lam in LAMBDAS}
  found |= {f'λ = {lam}, {name}': states.credit(critics[name], lam)
            for name in (RANDOM, FROZEN, RANDOM_FROZEN, NONE) for lam in (0, 1)}
  found |= {f'tokens, λ = {lam:g}': np.concatenate(rows[TOKENS][f'by token {lam:g}'])
            for lam in TOKEN_LAMBDAS}
  found |= {'GRPO': relative(states.rewards, normalize_std=False), 'GRPO, over σ': relative(states.rewards),
            'no credit': np.zeros(len(truth)),
            'λ = 0, shuffled': states.credit(critics[SHUFFLED], 0, shuffled),
            'GRPO, shuffled': relative(shuffled, normalize_std=False)}
  errors = {name: (estimate - truth)**2 - noise for name, estimate in found.items()}
  half = states.draws.shape[1] // 2  # half of the continuations are the critic, the others the truth
  _, _, truth, noise = states.truth(states.draws[:, half:])
  found['Monte Carlo'] = states.credit(states.draws[:, :half].mean(axis=1))
  return found, errors | {'Monte Carlo': (found['Monte Carlo'] - truth)**2 - noise}


def report(questions, rows) -> str:
  states = states_of(questions, rows)
  values, noise, truth, _ = states.truth(states.draws)
  critics = {name: np.concatenate(rows[name]['values']) for name in CRITICS}
  critics[NONE] = np.full(len(values), 0.5)
  found, errors = estimates_of(states, rows, critics)
  of_critic = {name: (critic - values)**2 - noise for name, critic in critics.items()}
  large, rewards = np.where(np.abs(truth) >= LARGE, truth, 0), states.rewards[states.of]
  at_start = lambda figure: lambda n: figure(n[states.first[n]])
  sign = lambda name: lambda n: calibration.sign_accuracy(found[name][n], large[n])
  rank = lambda name: lambda n: stats.spearmanr(found[name][n], truth[n]).statistic
  auc = lambda name: at_start(lambda n: calibration.auc(critics[name][n], states.known[states.of[n]]))
  ece = lambda name: at_start(lambda n: calibration.ece(critics[name][n], values[n]))
  explains = lambda name: lambda n: calibration.explained_variance(critics[name][n], rewards[n])
  first = [{'estimate': name, 'squared error': common.interval(states.mean(errors[name]), 1, 3)} | {
    column: common.interval(states.figure(of(name)), scale, digits) if estimate.any() else ''
    for column, of, scale, digits in (('signs right in %', sign, 100, 0), ('rank correlation', rank, 1, 2))}
    for name, estimate in found.items()]
  second = [{'critic': name} | {column: common.interval(states.figure(of(name)), 1, 2) for column, of in (
    ('AUC', auc), ('ECE', ece), ('explained variance', explains))} | {
    'squared error of V': common.interval(states.mean(of_critic[name]), 1, 3)} for name in critics]
  gap = lambda a, b: states.mean(errors[a] - errors[b])
  differ = lambda figure, a, b: states.figure(lambda n: figure(a)(n) - figure(b)(n))
  contrasts = {
    'squared error, λ = 1 - λ = 0': (gap('λ = 1', 'λ = 0'), MARGIN),
    'AUC, curated - random': (differ(auc, MAIN, RANDOM), 0.05)} | {name: (of, None) for name, of in {
      'squared error, no credit - λ = 0': gap('no credit', 'λ = 0'),
      'squared error, tokens (λ = 1) - λ = 0, frozen': gap('tokens, λ = 1', f'λ = 0, {FROZEN}'),
      'squared error, GRPO - λ = 0': gap('GRPO', 'λ = 0'),
      'squared error, λ = 0.5 - λ = 0': gap('λ = 0.5', 'λ = 0'),
      'squared error, 8 continuations - critic, λ = 0': gap('Monte Carlo', 'λ = 0'),
      # With R at its mean, what is left of λ = 1 is the error of the baseline.
      'squared error, λ = 1 less the noise of R - λ = 0': states.mean(of_critic[MAIN] - errors['λ = 0']),
      'rank correlation, λ = 0 - λ = 1': differ(rank, 'λ = 0', 'λ = 1'),
      'AUC, curated - random, frozen': differ(auc, FROZEN, RANDOM_FROZEN),
      'AUC, shared - frozen': differ(auc, MAIN, FROZEN),
      'ECE, random - curated': differ(ece, RANDOM, MAIN),
      'explained variance, curated - random': differ(explains, MAIN, RANDOM)}.items()}
  em = lambda name, figure: f'{100 * rows[name][figure]:.1f} %'
  about = (f'{len(questions)} rollouts, {len(values)} segments, {states.draws.shape[1]} continuations a '
           f'state; {100 * states.rewards.mean():.1f} % right, {100 * rows["truth"]["lost"]:.1f} % of the '
           f'contexts lose the answer. Best strategy: {em("best strategy", "best")}; calls on unknown '
           f'countries: {em("best strategy", "called")}, among random documents '
           f'{em("random documents", "called")}. Var(p)/Var(R), the ceiling of explained variance: '
           f'{(values.var() - noise.mean()) / rewards.var():.2f}.')
  return '\n\n'.join([about, common.verdicts_of(contrasts, 'difference', 1, 3), common.table(first),
                      common.table(second)])


if __name__ == '__main__':
  common.main('carl', study, SIZES, bed='runs/beds/tiers', critics='runs/studies/carl')
