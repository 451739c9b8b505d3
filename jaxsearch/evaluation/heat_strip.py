"""One rollout as a strip of HTML: each segment in the colour of its advantage, with what the critic thought before it.

A strip is drawn from the spans that an evaluation records (`spans`), so a report can draw it again from its files.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from jaxsearch.trees.tree import Role, Tree

GOOD, BAD = (0x1F, 0x6F, 0xB2), (0xC8, 0x45, 0x2F)  # apart for the colour-blind too
FULL = 0.5  # the advantage from which on a colour is full: the same in all strips, so that they can be compared

_STRIP = 'font:13px/1.45 system-ui,sans-serif;color:#1d2733;white-space:normal;overflow-wrap:anywhere'
_BAR = 'display:flex;flex-wrap:wrap;gap:2px;font-variant-numeric:tabular-nums;margin-bottom:8px'
_CELL = 'padding:2px;border:1px solid #c4ccd5;border-radius:3px;text-align:center;line-height:1.25;white-space:nowrap'
_SMALL = 'font-size:11px;color:#55677a'
_TEXT = 'white-space:pre-wrap;padding:3px 8px;border-radius:3px;margin:1px 0 7px'


def spans(tree: Tree) -> list[dict]:
  """All spans of a tree in order of time: role and text, and where present the critic's value of the state before the span,
  the span's advantage (if all of its tokens share one) and which segment it is."""
  return [{'role': node.role.value, 'text': node.text} | _credit(node) for node in tree.walk() if node.tokens]


def heat_strip(tree: Tree) -> str:
  """The strip of a credited tree, as an HTML fragment that needs nothing else."""
  return draw(spans(tree), tree.reward)


def draw(recorded: Sequence[dict], outcome: float | None = None) -> str:
  """The strip of recorded spans. Above, a cell for each segment with its advantage, below it V of the state it began in, and
  the outcome at the end; then the texts, without the prompt. A tool's output that the policy saw only while it wrote the
  next segment is dimmed. All text is escaped."""
  shown = [span for span in recorded if span['role'] != Role.PROMPT.value]
  segments = [span for span in shown if span['role'] == Role.POLICY.value]
  cells = [_cell(span) for span in segments]
  if outcome is not None:
    cells.append(f'<div style="flex:0 0 1.5em"><div style="{_CELL}"><span style="{_SMALL}">R</span><br>'
                 f'<b>{outcome:g}</b></div></div>')
  following = [*shown[1:], {}]
  texts = [_text(span, after.get('segment') == 'assimilate') for span, after in zip(shown, following)]
  return f'<div style="{_STRIP}"><div style="{_BAR}">{"".join(cells)}</div>{"".join(texts)}</div>'


def colour(advantage: float) -> str:
  """White at 0, towards blue above and red below; never so dark that black text on it is hard to read."""
  share = 0.62 * min(abs(advantage) / FULL, 1.0)
  return '#' + ''.join(f'{round(255 + share * (hue - 255)):02x}' for hue in (GOOD if advantage > 0 else BAD))


def _credit(node) -> dict:
  credit = {'segment': node.data['segment']} if 'segment' in node.data else {}
  if node.values is not None:
    credit['value'] = float(node.values[0])
  if node.advantages is not None and np.ndim(node.advantages) == 0:
    credit['advantage'] = float(node.advantages)
  return credit


def _cell(span: dict) -> str:
  """As wide as its text is long, within reason."""
  name, advantage, value = html.escape(span.get('segment', 'policy')), span.get('advantage'), span.get('value')
  number, fill = ('–', '#ffffff') if advantage is None else (_signed(advantage), colour(advantage))
  below = '' if value is None else f'<div style="{_SMALL}">V {value:.2f}</div>'
  return (f'<div style="flex:{len(span["text"]) + 40} 1 0;min-width:4.4em">'
          f'<div style="{_CELL};background:{fill}"><span style="font-size:10px">{name}</span><br><b>{number}</b></div>'
          f'{below}</div>')


def _text(span: dict, forgotten: bool) -> str:
  text, advantage = html.escape(span['text'].strip()), span.get('advantage')
  if span['role'] == Role.POLICY.value:
    label = html.escape(span.get('segment', 'policy')) + ('' if advantage is None else f' <b>{_signed(advantage)}</b>')
    fill = '#ffffff' if advantage is None else colour(advantage)
    look = f'background:{fill};border:1px solid #c4ccd5'
  elif forgotten:
    label = 'tool output · forgotten after the next segment'
    look = 'color:#6b7783;background:#f6f7f8;border:1px dashed #c4ccd5;max-height:9em;overflow:auto'
  elif span['role'] == Role.OBSERVATION.value:
    label, look = 'tool output', 'background:#fdf8ea;color:#6d530c'
  else:
    label, look = f'{html.escape(span["role"])} · stays', 'border-left:3px solid #8796a5;border-radius:0'
  return f'<div style="{_SMALL}">{label}</div><div style="{_TEXT};{look}">{text}</div>'


def _signed(advantage: float) -> str:
  return f'{advantage:+.2f}'.replace('-', '−')
