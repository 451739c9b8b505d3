"""The study of CARL: what continuations leave behind, how estimates are held against it, that it runs."""

import functools
import json
import types

import numpy as np
import pytest

from configs import world_beds
from jaxsearch.data.questions import Question
from jaxsearch.methods import carl as method
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.training import curation
from jaxsearch.trees import grammars
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from recipes.world import countries
from studies import carl, common
from tests.methods.driving import Letters, drive

CALL, CONTEXT = '```python\nprint(search("the author"))\n```\n', '<context> Lovelace wrote it. </context>'
RIGHT, WRONG = 'So \\boxed{Lovelace}.', 'So \\boxed{Byron}.'


def test_continuations_leave_outcomes_behind_and_the_rollout_as_it_was():
  settings = types.SimpleNamespace(max_segments=15, max_tokens=64, context_tokens=64)
  rollout = functools.partial(method.grow, template='world_carl')
  grow = lambda question, tree, template: carl.grow(
    question, tree, copies=2, settings=settings, rollout=rollout)
  said = [CALL, CONTEXT, RIGHT,        # the rollout
          WRONG, CALL, CONTEXT, RIGHT,  # from the prompt
          CONTEXT, WRONG, CONTEXT, RIGHT,  # from the raw output
          WRONG, WRONG]                # from the context
  tree, _ = drive(said, grow=grow, speech=grammars.of_tags(Letters(), method.TAGS))[:2]
  spans = carl.segments(tree)
  assert [span.text for span in spans] == said[:3] and tree.answer == 'Lovelace'
  assert [span.data['outcomes'] for span in spans] == [[0, 1], [0, 1], [0, 0]]


def test_credit_by_token_is_averaged_over_a_segment():
  trees = [Tree(Letters()), Tree(Letters())]
  for tree, said, reward in zip(trees, (('abc', 'de'), ('f',)), (1.0, 0.0)):
    node, tree.reward = tree.root, reward
    for text in said:
      node = node.append(text, Role.POLICY)
      node.values = np.linspace(0.1 * len(text), 0.6, len(text), dtype=np.float32)
  one, other = carl.by_token(trees, 1.0)
  assert one == pytest.approx([1 - 0.45, 1 - 0.4]) and other == pytest.approx([-0.1])


@pytest.fixture
def case():
  """240 rollouts of three segments whose values are known, with perfect critics but for the shuffled one."""
  rng, number = np.random.default_rng(0), 240
  states = rng.uniform(0.1, 0.9, (number, 3)).round(4)
  rewards = (rng.random(number) < states[:, 2]).astype(float).tolist()
  outcomes = [[''.join(map(str, (rng.random(16) < p).astype(int))) for p in chain] for chain in states]
  asked = [Question(f'c{n // 4}.x', '?', ('a',), {'tier': 1 + n // 4 % 2}) for n in range(number)]
  credit = np.column_stack([np.diff(states, axis=1), np.array(rewards) - states[:, 2]])
  rows = {name: {'values': states.tolist()} for name in carl.CRITICS}
  rows[carl.TOKENS] |= {f'by token {lam:g}': credit.tolist() for lam in carl.TOKEN_LAMBDAS}
  rows |= {'truth': {'outcomes': outcomes, 'rewards': rewards, 'lost': 0.4},
           'others': {'rewards': rng.integers(0, 2, (number, 4)).astype(float).tolist()},
           'best strategy': {'best': 0.8, 'called': 0.6}, 'random documents': {'called': 0.0}}
  return asked, rows, states, rewards


def test_a_perfect_critic_errs_by_nothing_and_whole_outcomes_by_their_variance(case):
  asked, rows, states, rewards = case
  of, critic = carl.states_of(asked, rows), {name: states.ravel() for name in (*carl.CRITICS, carl.NONE)}
  found, errors = carl.estimates_of(of, rows, critic)
  assert errors['λ = 0'].mean() == pytest.approx(0, abs=0.005)
  assert errors['tokens, λ = 1'].mean() == pytest.approx(errors['λ = 0'].mean(), abs=1e-6)
  outcome = np.array(rewards)[:, None] - states
  np.testing.assert_allclose(found['λ = 1'].reshape(-1, 3), outcome, atol=1e-6)
  behind = np.column_stack([states[:, 1:], rewards])  # V of the state behind each segment
  expected = (outcome - (behind - states))**2
  assert errors['λ = 1'].mean() == pytest.approx(expected.mean(), abs=0.012)
  assert of.mean(np.where(of.first, 3.0, 0)).mean == pytest.approx(1)
  group = np.column_stack([rewards, rows['others']['rewards']])
  np.testing.assert_allclose(found['GRPO'].reshape(-1, 3)[:, 1], group[:, 0] - group.mean(axis=1), atol=1e-6)


def test_the_verdict_is_about_the_contrasts_of_the_plan(case, monkeypatch):
  monkeypatch.setattr(carl, 'DRAWS', 20)
  asked, rows, *_ = case
  tables = carl.report(asked, rows)
  line = next(line for line in tables.splitlines() if line.startswith('| squared error, λ = 1 - λ = 0 |'))
  assert line.endswith('holds |')
  assert '| AUC, curated - random' in tables and 'no difference larger than 0.05' in tables


@pytest.mark.slow
def test_it_runs_on_a_bed_of_the_recipe(tmp_path, capsys, monkeypatch):
  # After one update the policy knows nothing by heart.
  tiers = lambda rows: {row['id']: 1 + place % 2 for place, row in enumerate(rows[::5])}
  monkeypatch.setattr(curation, 'tiers_by', tiers)
  config = world_beds.get_config().unlock()
  config.out = str(tmp_path)
  for name in ('countries', 'carl'):
    config[name].update(updates=1, rows=2)
  config.carl.gate = {}
  countries.make(config, Tokenizer.load(world.folder()))
  given = ['--size', 'tiny', '--bed', f'{tmp_path}/tiers', '--critics', f'{tmp_path}/critics',
           '--out', str(tmp_path)]
  common.main('carl', carl.study, carl.SIZES, given, bed='', critics='')
  rows = [json.loads(line) for line in (tmp_path / 'carl.jsonl').read_text().splitlines()]
  assert [row['part'] for row in rows[:2]] == ['truth', 'others'] and len(rows) == 4 + len(carl.CRITICS)
  assert 'curated, shared' in capsys.readouterr().out
