"""Draws the plots of docs/credit.md: what the credit of each system looks like on one example rollout.

  python docs/plots/credit.py [FOLDER]

The rollouts are made up, with token counts and rewards that fit on a page; every credit shown is computed by
`jaxsearch.advantages`, and the figures in the page are those that this script prints.
"""

import itertools
import pathlib
import sys

import jax
import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from jaxsearch import advantages

COLOURS = {
    'prompt': '#ececec', 'think': '#d5deee', 'search': '#9cbfe6', 'observation': '#bdbdbd',
    'answer': '#a5d6a7', 'meta': '#e1bee7', 'evidence': '#ffe0a3', 'dropped': '#f6f6f6'}
GOOD, BAD = '#1f6fb2', '#c8452f'
INK = '#333333'
MARGIN = 2.0


def edges_of(spans):
  """Where each span (kind, label, tokens) begins and the last one ends, in tokens."""
  return np.concatenate([[0], np.cumsum([tokens for *_, tokens in spans])])


def strip(ax, spans, right=None):
  """Draws spans as boxes side by side, up to token `right` or the end of the spans."""
  edges = edges_of(spans)
  for (kind, label, tokens), left in zip(spans, edges):
    dropped = kind == 'dropped'
    ax.barh(0, tokens, 0.36, left, color=COLOURS[kind], edgecolor='#888888', linewidth=0.6,
            linestyle='--' if dropped else '-')
    ax.text(left + tokens / 2, 0, label, ha='center', va='center', fontsize=7,
            color='#999999' if dropped else INK)
  ax.set_xlim(-MARGIN, (right or edges[-1]) + MARGIN)
  ax.set_ylim(-0.3, 0.3)
  ax.axis('off')


def rollout(ax, spans, credit, title):
  """Credit per token above the strip of a rollout; `credit` has NaN where a token bears no loss."""
  edges = edges_of(spans)
  colours = [GOOD if value > 0 else BAD for value in credit]
  ax.bar(np.arange(edges[-1]) + 0.5, np.nan_to_num(credit), 1.0, color=colours, linewidth=0)
  for left, right in itertools.pairwise(edges):
    if np.isnan(credit[left:right]).all():
      ax.axvspan(left, right, color='#f3f3f3', zorder=0)
  ax.axhline(0, color=INK, linewidth=0.8)
  ax.set_xlim(-MARGIN, edges[-1] + MARGIN)
  ax.set_ylabel('advantage', fontsize=8)
  ax.set_title(title, fontsize=9, loc='left')
  tidy(ax)
  ax.set_xticks([])


def tidy(ax):
  ax.tick_params(labelsize=7)
  ax.spines[['top', 'right']].set_visible(False)


def rows(height, ratios):
  return plt.subplots(len(ratios), 1, figsize=(8, height), height_ratios=ratios, layout='constrained')


def per_token(spans, values):
  """Repeats a value per span over its tokens."""
  return np.concatenate([np.full(tokens, value, float) for (*_, tokens), value in zip(spans, values)])


CHAIN = [('prompt', 'prompt', 12), ('think', 'think', 9), ('search', 'search 1', 8),
         ('observation', 'documents', 20), ('think', 'think', 8), ('search', 'search 2', 8),
         ('observation', 'documents', 20), ('think', 'think', 7), ('answer', 'answer', 8)]
WRITTEN = np.array([kind not in ('prompt', 'observation') for kind, *_ in CHAIN])


def search_r1():
  rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
  relative = np.asarray(advantages.group_relative(rewards, np.zeros(5, int), 1))
  print('search_r1: rewards', rewards, 'advantages', relative.round(3))
  grpo = per_token(CHAIN, np.where(WRITTEN, relative[0], np.nan))

  mask = per_token(CHAIN, WRITTEN)
  knots = [0.35, 0.35, 0.3, 0.42, 0.62, 0.6, 0.66, 0.66, 0.9, 0.97]     # V at the borders of the spans
  borders = edges_of(CHAIN)
  values = np.interp(np.arange(borders[-1]), borders, knots)
  token_rewards = np.zeros_like(values)
  token_rewards[-1] = 1.0
  credit, _ = advantages.gae(token_rewards[None], values[None], mask[None], gamma=1.0, lam=0.95)
  ppo = np.where(mask, np.asarray(credit)[0], np.nan)
  print('search_r1: gae at the first and last token', ppo[12].round(3), ppo[-1].round(3))

  figure, (top, middle, bottom) = rows(3.8, [2.2, 3, 1])
  rollout(top, CHAIN, grpo, f'GRPO: one number for every token the policy wrote, {relative[0]:+.2f}')
  rollout(middle, CHAIN, ppo, 'PPO: GAE over the written tokens (gamma 1, lambda 0.95); line: the critic')
  middle.plot(np.arange(borders[-1]) + 0.5, values, color=INK, linewidth=1)
  strip(bottom, CHAIN)
  return figure


def cusearch():
  capacities, budget, depth = np.array([10, 22, 30, 100, 18, 12]), 96, 5
  plans = {'auto': ('auto', 0), 'phase, k=0': ('phase', 0), 'phase, k=2': ('phase', 2), 'anti': ('anti', 0)}
  figure, axes = plt.subplots(1, 5, figsize=(8.6, 2.5), layout='constrained', width_ratios=[1, 1, 1, 1, 2])
  for ax, (name, (strategy, phase)) in zip(axes, plans.items()):
    plan = advantages.depth_plan(strategy, budget, depth, phase)
    chosen = np.asarray(advantages.depth_greedy(capacities, *plan))
    print('cusearch:', name, chosen)
    ax.bar(np.arange(6), capacities, color='#e2e2e2', label='rolled out')
    ax.bar(np.arange(6), chosen, color=GOOD, label='trained on')
    ax.set_title(name, fontsize=9)
    ax.set_ylim(0, 135)
    ax.set_xticks(np.arange(6))
    ax.set_xlabel('searches', fontsize=8)
    tidy(ax)
  axes[0].set_ylabel('trajectories', fontsize=8)
  axes[0].legend(fontsize=6, frameon=False, loc='upper left')

  rewards, kept = np.array([1.0, 0.2, 0.6]), np.array([1, 0, 1])
  everyone = np.asarray(advantages.group_relative(rewards, np.zeros(3, int), 1))
  retained = np.asarray(advantages.group_relative(rewards, np.zeros(3, int), 1, mask=kept))
  print('cusearch: rewards', rewards, 'all', everyone.round(3), 'retained', retained.round(3))
  ax = axes[-1]
  ax.bar(np.arange(3) - 0.18, everyone, 0.34, color='#bbbbbb', label='among all three')
  ax.bar(np.arange(3) + 0.18, retained, 0.34, color=[GOOD if value > 0 else BAD for value in retained])
  ax.axhline(0, color=INK, linewidth=0.8)
  ax.set_xticks(np.arange(3), ['r = 1.0\n3 searches', 'r = 0.2\nleft out', 'r = 0.6\n4 searches'])
  ax.set_title('advantages in one group', fontsize=9)
  ax.legend(fontsize=6, frameon=False, loc='upper right')
  tidy(ax)
  return figure


def search_r2():
  prefix = [('prompt', 'prompt', 10), ('think', 'think', 8), ('search', 'search 1', 8),
            ('observation', 'documents', 16)]
  draft = [*prefix, ('dropped', 'search 2', 8), ('dropped', 'documents', 16), ('dropped', 'answer', 8)]
  kept = [*prefix, ('meta', 'reject, cut at 2', 14), ('search', 'search 2', 8),
          ('observation', 'documents', 16), ('answer', 'answer', 8)]
  # The outcome of five traces, and the share of their collections that the judge found useful.
  outcome, process = np.array([1, 0, 1, 0, 0]), np.array([1.0, 0.5, 0.5, 0.0, 1.0])
  rewards = np.asarray(advantages.hybrid_reward(outcome, process))
  relative = np.asarray(advantages.group_relative(rewards, np.zeros(5, int), 1))
  print('search_r2: rewards', rewards, 'advantages', relative.round(3))
  written = np.array([kind not in ('prompt', 'observation') for kind, *_ in kept])
  figure, (top, middle, bottom) = rows(3.0, [0.8, 2.0, 0.8])
  strip(top, draft, right=edges_of(kept)[-1])
  top.set_title('the draft: search 2 missed, so everything from there is thrown away', fontsize=9, loc='left')
  rollout(middle, kept, per_token(kept, np.where(written, relative[0], np.nan)),
          f'the trace that is kept: {relative[0]:+.2f} for actor and meta tokens alike')
  strip(bottom, kept)
  return figure


def r_search():
  spans = [('prompt', 'prompt', 12), ('think', 'think', 9), ('search', 'search', 9),
           ('observation', 'observation', 22), ('evidence', 'original evidence', 20), ('answer', 'answer', 9)]
  answer, evidence = np.array([1.0, 0.4, 0.0, 0.0]), np.array([1.0, 1.0, 0.8, 0.0])
  form = np.array([0.4, 0.4, 0.2, 0.4])
  relative = np.asarray(advantages.group_relative(answer + evidence + form, np.zeros(4, int), 1))
  print('r_search: rewards', (answer + evidence + form).round(2), 'advantages', relative.round(3))
  figure, axes = plt.subplot_mosaic(
      [['left', 'top'], ['left', 'bottom']], figsize=(8, 2.8), height_ratios=[3, 1], width_ratios=[1, 2],
      layout='constrained')
  below = np.zeros(4)
  for name, part, kind in (('answer F1', answer, 'answer'), ('evidence F1', evidence, 'evidence'),
                           ('format', form, 'think')):
    axes['left'].bar(np.arange(4), part, bottom=below, label=name, color=COLOURS[kind], edgecolor='#888888',
                     linewidth=0.6)
    below = below + part
  for index, value in enumerate(relative):
    axes['left'].text(index, below[index] + 0.05, f'{value:+.2f}', ha='center', fontsize=8,
                      color=GOOD if value > 0 else BAD)
  axes['left'].set_ylim(0, 3.2)
  axes['left'].set_xticks(np.arange(4), ['a', 'b', 'c', 'd'])
  axes['left'].set_title('rewards and advantages of a group', fontsize=9)
  axes['left'].legend(fontsize=7, frameon=False, loc='upper right')
  tidy(axes['left'])
  written = np.array([kind not in ('prompt', 'observation') for kind, *_ in spans])
  rollout(axes['top'], spans, per_token(spans, np.where(written, relative[1], np.nan)),
          'rollout b: answer F1 0.4, evidence F1 1.0')
  strip(axes['bottom'], spans)
  return figure


def slate():
  budget, steps = 4, 3
  think = np.array([[1, 0, 1, -1, 0], [1, 1, 0, 0, 1], [1, 1, 0, 1, 1]])
  query = np.array([[1, 0, 0, -1, 1], [1, 0, 0, -1, 0], [0, 0, 0, 0, 0]])
  answer = np.array([[0, 0, 0, 0, -1], [0, -1, 0, 0, 0], [1, 0, -1, 1, 1]])
  is_answer = np.array([[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 1, 1]])
  rewards = advantages.step_reward(
      think, query, answer, is_answer, np.arange(1, steps + 1)[:, None], budget, early_bonus=0.1)
  credit = np.asarray(advantages.truncated_step(rewards))
  stays = credit.argmax(axis=1)
  print('slate: rewards', np.asarray(rewards).round(3).tolist(), 'advantages', credit.round(3).tolist())
  figure, axes = plt.subplots(1, steps, figsize=(8, 2.4), sharey=True, layout='constrained')
  for step, ax in enumerate(axes):
    for index, value in enumerate(credit[step]):
      frame = INK if index == stays[step] else 'none'
      ax.bar(index, value, 0.75, color=GOOD if value > 0 else BAD, edgecolor=frame, linewidth=2)
    ax.axhline(0, color=INK, linewidth=0.8)
    labels = ['answer' if a else 'search' for a in is_answer[step]]
    ax.set_xticks(np.arange(5), labels, rotation=45)
    ax.set_title(f'step {step + 1}: five from one prefix', fontsize=9)
    tidy(ax)
  axes[0].set_ylabel('advantage', fontsize=8)
  figure.supxlabel('the framed one stays on the path', fontsize=8)
  return figure


def carl():
  spans = [('search', 'invoke', 18), ('evidence', 'assimilate', 14), ('search', 'invoke', 16),
           ('evidence', 'assimilate', 14), ('answer', 'commit', 8)]
  values, outcome = np.array([[0.32, 0.71, 0.45, 0.8, 0.93]]), np.array([1.0])
  credit = np.asarray(advantages.smdp_td(values, outcome, np.array([5])))[0]
  smeared = np.asarray(advantages.smdp_td(values, outcome, np.array([5]), lam=1.0))[0]
  print('carl: advantages', credit.round(3), 'sum', credit.sum().round(3), 'lambda 1', smeared.round(3))
  edges = edges_of(spans)
  figure, (top, middle, bottom) = rows(3.8, [2.2, 2.2, 0.9])
  top.plot(edges, [*values[0], outcome[0]], 'o-', color=INK, linewidth=1.2, markersize=4)
  for x, v in zip(edges, [*values[0], outcome[0]]):
    top.annotate(f'{v:.2f}', (x, v), xytext=(0, 6), textcoords='offset points', fontsize=8, ha='center')
  top.set_xlim(-MARGIN, edges[-1] + MARGIN)
  top.set_ylim(0, 1.25)
  top.set_xticks([])
  top.set_title('V at the boundaries, and the outcome R = 1 after the last segment', fontsize=9, loc='left')
  tidy(top)
  rollout(middle, spans, per_token(spans, credit), 'advantage: the change of V across the segment')
  for left, right, value in zip(edges, edges[1:], credit):
    middle.annotate(f'{value:+.2f}', ((left + right) / 2, value), xytext=(0, 3 if value > 0 else -10),
                    textcoords='offset points', fontsize=8, ha='center')
  middle.set_ylim(-0.42, 0.52)
  strip(bottom, spans)
  return figure


def main():
  folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
  folder.mkdir(parents=True, exist_ok=True)
  for draw in (search_r1, cusearch, search_r2, r_search, slate, carl):
    figure = draw()
    figure.savefig(folder / f'credit_{draw.__name__}.png', dpi=110)
    plt.close(figure)
  print('plots in', folder, 'drawn with jax', jax.__version__)


if __name__ == '__main__':
  main()
