"""The questions of a critic's warm-up: tiers, kinds, clusters, buckets."""

import json

import numpy as np
import pytest

from configs import base
from configs.carl import critic_warmup as warmup_settings
from jaxsearch import cli
from jaxsearch.data.questions import Question, read_questions, write_questions
from jaxsearch.evaluation import question_sets
from jaxsearch.training import curation, row_files
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from recipes.world import carl_examples


@pytest.fixture
def settings():
  return warmup_settings(closed_book={}, tool_required={}, second_search={})


def questions(number):
  return [Question(str(i), f'Which {i}?', ('x',)) for i in range(number)]


def test_questions_are_chosen_by_tier_and_evenly_over_clusters(settings):
  asked = questions(100)
  tiers = {question.id: 2 if int(question.id) < 30 else 1 for question in asked}
  clusters = np.array([0] * 90 + [1] * 5 + [2] * 5)
  settings.update(trajectories=50, tier_2_share=0.4)
  chosen, held_out = curation.choose(asked, tiers, clusters, settings, 0)
  assert len(chosen) == 30 == len({question.id for question in chosen})  # 25, and a fifth as many for the gate
  own = [tiers[question.id] for question in chosen]
  assert own.count(2) == 12 and own.count(1) == 18
  assert sorted(tiers[name] for name in held_out) == [1, 1, 1, 2, 2]
  of_tier_1 = [clusters[int(question.id)] for question in chosen if tiers[question.id] == 1]
  assert sorted(np.bincount(of_tier_1).tolist()) == [5, 5, 8]  # the small clusters whole, the rest from the large one
  settings.tier_2_share = 1.0
  assert sum(tiers[question.id] == 2 for question in curation.choose(asked, tiers, clusters, settings, 0)[0]) == 30
  settings.curated = False
  chosen, held_out = curation.choose(asked, tiers, clusters, settings, 0)
  assert chosen == asked[:30] and len(held_out) == 5


def test_kinds_of_rollouts_with_tools(settings):
  settings.update(tool_optional_share=0.3, multi_hop_sources=('2wiki',))
  plain, hops = Question('a', '?', ('x',)), Question('b', '?', ('x',), {'source': '2wiki'})
  rng = np.random.default_rng(0)
  for tier in (1, 2):
    kinds = [curation.tool_kind(plain, tier, settings, rng) for _ in range(1000)]
    assert set(kinds) == {'tool-optional', 'tool-required'} and 250 < kinds.count('tool-optional') < 350
  assert {curation.tool_kind(hops, 2, settings, rng) for _ in range(100)} == {'tool-optional', 'multi-hop'}
  settings.tool_optional_tiers = (2,)  # as in the paper
  assert {curation.tool_kind(plain, 1, settings, rng) for _ in range(100)} == {'tool-required'}


def test_each_source_has_its_own_clusters(settings):
  asked = [Question(str(i), '?', ('x',), {'source': ('gsm8k', '2wiki')[i % 2]}) for i in range(40)]
  points = np.random.default_rng(0).normal(size=(40, 4))
  settings.clusters = 5
  settings.source_clusters = {'gsm8k': 3}
  found = curation.clusters_by_source(points, asked, settings, 0)
  assert all(cluster[0] == question.metadata['source'] for cluster, question in zip(found, asked))
  assert [len({cluster for cluster in found if cluster[0] == source}) for source in ('gsm8k', '2wiki')] == [3, 5]


def test_held_out_questions_are_in_no_bucket(settings):
  trees = []
  for question in questions(20):
    for kind in ('closed-book', 'multi-hop'):
      tree = Tree(None, question)
      tree.root.append([1], Role.PROMPT).append([2], Role.POLICY)
      tree.root.data.update(kind=kind, held_out=int(question.id) >= 15)
      trees.append(tree)
  tiers = {str(i): 1 + i % 2 for i in range(20)}
  held_out, buckets = curation.split(trees, tiers, settings)
  ids = lambda trees: {tree.question.id for tree in trees}
  assert len(ids(held_out)) == 5 and len(held_out) == 10 and len(buckets) == 4
  assert not ids(held_out) & set().union(*map(ids, buckets)) and sum(map(len, buckets)) == 30
  drawn = curation.draw(buckets, 16, np.random.default_rng(0))
  assert [sum(tree in bucket for tree in drawn) for bucket in buckets] == [4] * 4
  buckets[1][0].reward = 0.5
  again = curation.draw([buckets[0], buckets[1][:1]], 8, np.random.default_rng(0))[4:]
  assert len(set(again)) == 4 and [tree.to_json() for tree in again] == [buckets[1][0].to_json()] * 4
  with pytest.raises(ValueError, match='tier 2 closed-book, tier 2 tool-required'):
    curation.split(trees, dict.fromkeys(tiers, 1), settings)
  settings.curated = False
  _, (bucket,) = curation.split(trees, dict.fromkeys(tiers, 1), settings)
  assert len(bucket) == 30


def test_the_command_tells_what_the_shipped_policy_knows_and_mixes_questions(tmp_path, capsys):
  known = [question for question in world.questions('warm') if carl_examples.is_known(question)][:6]
  other = [question for question in world.questions('test') if question.metadata.get('operation') == 'sum'][:6]
  write_questions([*known, *other], tmp_path / 'asked.jsonl')
  assert cli.main(['tiers', '--config=configs/carl.py', '--config.sampler.slots=16',
                   f'--questions={tmp_path}/asked.jsonl', f'--out={tmp_path}/tiers.jsonl',
                   f'--mixed={tmp_path}/mixed.jsonl']) == 0
  tiers = {record['id']: record['tier'] for record in row_files.read(tmp_path / 'tiers.jsonl')}
  assert sum(tiers[question.id] == 2 for question in known) >= 4
  assert all(tiers[question.id] == 1 for question in other)
  mixed = [question.id for question in read_questions(tmp_path / 'mixed.jsonl')]
  assert len(mixed) >= 8 and [tiers[key] for key in mixed] == [1, 2] * (len(mixed) // 2)
  assert json.loads(capsys.readouterr().out)['tier_2'] == sum(tier == 2 for tier in tiers.values()) / 12


def test_of_every_source_the_first_questions_are_taken():
  asked = [Question(str(number), '?', ('a',), {'source': source}) for number, source in enumerate('xxxyxy')]
  assert [one.id for one in question_sets.first_of_each(asked, 2)] == ['0', '1', '3', '5']
  assert question_sets.first_of_each(asked, 0) == asked


def test_held_out_questions_are_of_every_file(tmp_path):
  for name in 'ab':
    write_questions([Question(f'{name}{number}', '?', ('a',)) for number in range(3)], tmp_path / f'{name}.jsonl')
  config = base.get_config()
  config.eval.update(questions=f'{tmp_path}/a.jsonl+{tmp_path}/b.jsonl', number=2)
  assert [one.id for one in question_sets.read_held_out(config)[0]] == ['a0', 'a1', 'b0', 'b1']
