"""The report at the end of a run: the learning curve, and the same questions answered before and after.

One self-contained HTML file, made from `metrics.jsonl` and `evaluations.jsonl` alone, so it can be made again at any time.
Branches of a rollout stand below their parents; spans are coloured by their advantage.
"""

import base64
import collections
import json
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from jaxsearch.training.runs import read as read_rows
from jaxsearch.trees.tree import Node, Role, Tree

CURVES = (('em', 'exact match'), ('searches', 'searches per question'), ('reward', 'reward'), ('entropy', 'entropy'))
METRICS = ('reward', 'em', 'searches', 'loss', 'kl', 'entropy', 'logprob_gap', 'tokens_generated', 'tokens_trained',
           'seconds_generate', 'seconds_tools', 'seconds_train',  # and of Search-R2:
           'em_draft', 'em_kept', 'revised', 'a_prec', 'v_inter', 's_trim', 'g_bar', 'gain_predicted', 'gain_measured')
SAMPLES = 12  # questions whose rollouts are shown
GOOD, BAD = (0x1F, 0x6F, 0xB2), (0xC8, 0x45, 0x2F)  # distinct for the colour-blind too
FULL = 0.5  # the advantage with the strongest colour; the same for all rollouts, so that they can be compared


def write_report(run: str | pathlib.Path) -> pathlib.Path:
  """Writes `learning_curve.png` and `report.html` into the run folder and returns the path of the page."""
  run = pathlib.Path(run)
  page, curve, config = run / 'report.html', run / 'learning_curve.png', run / 'config.json'
  rows, evaluations = read_rows(run / 'metrics.jsonl'), read_rows(run / 'evaluations.jsonl')
  plot_curves(rows, evaluations, curve)
  settings = json.loads(config.read_text(encoding='utf-8')) if config.exists() else {}
  page.write_text(render(rows, evaluations, settings, curve.read_bytes()), encoding='utf-8')
  return page


def plot_curves(rows: list[dict], evaluations: list[dict], path: pathlib.Path) -> None:
  """Four small plots over the steps, with dots for the evaluations on held-out questions."""
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display
  from matplotlib.ticker import MaxNLocator
  figure = Figure(figsize=(10, 5.6), layout='constrained')
  for axes, (key, title) in zip(figure.subplots(2, 2).flat, CURVES):
    steps, values = [row['step'] for row in rows], [row[key] for row in rows]
    axes.plot(steps, values, color='#9db4c8', linewidth=1, label='training, each step')
    axes.plot(steps, smoothed(values), color='#1f5a8a', linewidth=2, label='training, smoothed')
    for greedy, colour, name in ((False, '#d1495b', 'held out, sampled'), (True, '#edae49', 'held out, greedy')):
      points = [(e['step'], e[key]) for e in evaluations if key in e and (e['temperature'] == 0) == greedy]
      if points:
        axes.plot(*zip(*points), 'o', color=colour, markersize=6, label=name)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel('step', fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    if key == 'em':
      axes.set_ylim(-0.02, 1.02)
      axes.legend(fontsize=7.5, loc='lower right')
  figure.savefig(path, dpi=110)


def smoothed(values: list[float], keep: float = 0.8) -> list[float]:
  """Exponential moving average, corrected for its start."""
  total, weight, result = 0.0, 0.0, []
  for value in values:
    total, weight = keep * total + value, keep * weight + 1
    result.append(total / weight)
  return result


def render(rows: list[dict], evaluations: list[dict], config: dict, curve: bytes) -> str:
  """The page as HTML; everything that a model or a tool wrote is escaped."""
  import jinja2
  environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
  environment.globals.update(pieces=pieces, colour=colour, signed=lambda value: f'{value:+.2f}'.replace('-', '−'))
  template = environment.from_string(pathlib.Path(__file__).with_name('report.html').read_text(encoding='utf-8'))
  sampled = [e for e in evaluations if e.get('samples')]
  first, last = (sampled[0], sampled[-1]) if sampled else ({'samples': []}, {'samples': []})
  pairs = [[sample | {'blocks': blocks(sample['spans'])} for sample in pair]
           for pair in zip(first['samples'][:SAMPLES], last['samples'])]
  every = [block for pair in pairs for sample in pair for block in sample['blocks']]
  known = {key: [row[key] for row in rows if row.get(key) is not None] for key in METRICS}
  metrics = {key: (rows[0].get(key), rows[-1].get(key), np.mean(values)) for key, values in known.items() if values}
  return template.render(
    rows=rows, metrics=metrics, evaluations=evaluations, pairs=pairs,
    first=first, last=last, config=config, curve=base64.b64encode(curve).decode(),
    credited=any('advantage' in block for block in every), branching=any(block['branch'] for block in every))


def pieces(text: str) -> list[tuple[str, str]]:
  """(kind, text) of the parts of a policy span: its elements, such as ('search', '<search>…</search>'), and 'other' text."""
  # re.split with one group gives text, element, text, element, …
  parts = re.split(r'(<\w+>.*?</\w+>)', text, flags=re.DOTALL)
  return [(part[1:part.index('>')] if i % 2 else 'other', part) for i, part in enumerate(parts) if part]


def spans(tree: Tree) -> list[dict]:
  """The record of a tree: its spans depth first, each with role and text.

  Where present also `segment`, its kind; `value`, the critic's value of the state before the span; `advantage`, if all its tokens
  share one; `parent`, the index of the span that it follows, if that is not the one before it; `dropped`: true in branches that
  the rollout did not continue from.
  """
  recorded, dropped = [], _dropped(tree)
  last = {None: -1}  # node -> index of the last span on its path
  for node in tree.walk():
    # The copy of a context follows, in time, the span that it was copied from.
    parent = len(recorded) - 1 if node.role is Role.CONTEXT else last[node.parent]
    last[node] = len(recorded) if node.tokens else parent
    if not node.tokens:
      continue
    span = {'role': node.role.value, 'text': node.text}
    if 'segment' in node.data:
      span['segment'] = node.data['segment']
    if node.values is not None:
      span['value'] = float(node.values[0])
    if node.advantages is not None and np.ndim(node.advantages) == 0:
      span['advantage'] = float(node.advantages)
    if parent != len(recorded) - 1:
      span['parent'] = parent
    if node in dropped:
      span['dropped'] = True
    recorded.append(span)
  return recorded


def blocks(recorded: Sequence[dict]) -> list[dict]:
  """Recorded spans in the order of the page, without the first prompt: below a span its dropped branches, then the kept one.

  Each gets `depth`: in how many dropped branches it is nested; `branch`: '2 of 5' at the start of a branch, else '';
  `forgotten`: whether it is tool output that the policy saw only while it wrote the next segment.
  """
  children = collections.defaultdict(list)
  for i, span in enumerate(recorded):
    children[span.get('parent', i - 1)].append(i)
  found, stack = [], [(i, 0, '') for i in reversed(children[-1])]
  while stack:
    i, depth, branch = stack.pop()
    if i or recorded[i]['role'] != Role.PROMPT.value:
      forgotten = recorded[i + 1:i + 2] and recorded[i + 1].get('segment') == 'assimilate'
      found.append({'dropped': False} | recorded[i] | {'depth': depth, 'branch': branch, 'forgotten': forgotten})
    number = len(children[i])
    branches = [(recorded[child].get('dropped', False), -place, child) for place, child in enumerate(children[i], start=1)]
    for dropped, place, child in sorted(branches):  # the kept one first: it is popped last
      stack.append((child, depth + (dropped and number > 1), f'{-place} of {number}' if number > 1 else ''))
  return found


def colour(advantage: float) -> str:
  """White at 0, towards blue above and red below; never so dark that black text on it is hard to read."""
  share = 0.62 * min(abs(advantage) / FULL, 1.0)
  return '#' + ''.join(f'{round(255 + share * (hue - 255)):02x}' for hue in (GOOD if advantage > 0 else BAD))


def _dropped(tree: Tree) -> set[Node]:
  """The nodes in branches that the rollout did not continue from.

  Of several children one is kept: a trained one before one taken out of training, then one that leads to the answer, then one
  with spans below it; none, if nothing tells them apart and none was answered or continued. Children beside a copied context
  are no alternatives: they were read and forgotten.
  """
  dropped = set()
  for node in tree.walk():
    children = node.children
    if node in dropped or len(children) < 2 or any(child.role is Role.CONTEXT for child in children):
      continue
    answers = [tree.answer is not None and any(tree.answer in below.text for below in child.walk() if below.role is Role.POLICY)
               for child in children]
    ranks = [(child.trained or child.role is not Role.POLICY, answer, bool(child.children))
             for child, answer in zip(children, answers)]
    best = max(ranks)
    kept = children[ranks.index(best)] if any(best[1:]) or ranks.count(best) == 1 else None
    dropped.update(below for child in children if child is not kept for below in child.walk())
  return dropped
