"""Chooses the questions that a critic is warmed up on (CARL's appendix C): tiers, kinds, clusters, buckets.

A question is in tier 2 if any of a few closed-book rollouts was right, else in tier 1. Of the questions that
`choose` takes, evenly over clusters of alike ones, each is rolled out closed-book and with tools; `split`
makes the buckets that updates draw from evenly.
"""

import collections
import itertools
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jaxsearch.data.questions import Question
from jaxsearch.parallel import transfer
from jaxsearch.trees.tree import Role, Tree

# Of rollouts; all but the first share a bucket.
KINDS = ('closed-book', 'tool-required', 'multi-hop', 'tool-optional')


def outcome(tree: Tree) -> dict:
  """Returns all that tiers ask of a rollout: {'id' of its question, 'right': 0 or 1}."""
  return {'id': tree.question.id, 'right': tree.question.score(tree.answer)}


def tiers_by(outcomes: Sequence[dict]) -> dict[str, int]:
  """Returns {question id: 2 if any of its closed-book rollouts was right, else 1}."""
  tiers = dict.fromkeys((row['id'] for row in outcomes), 1)
  return tiers | {row['id']: 2 for row in outcomes if row['right']}


def mixed(questions: Sequence[Question], tiers: dict[str, int]) -> list[Question]:
  """Returns as many questions of either tier as the smaller one has, taking turns, each tier in its order."""
  by_tier = [[question for question in questions if tiers[question.id] == tier] for tier in (1, 2)]
  return [question for pair in zip(*by_tier) for question in pair]


def tool_kind(question: Question, tier: int, settings: ConfigDict, rng: np.random.Generator) -> str:
  """Draws the kind of a question's rollout with tools: of `tool_optional_tiers` a share is tool-optional."""
  optional = rng.random() < settings.tool_optional_share * (tier in settings.tool_optional_tiers)
  return 'tool-optional' if optional else required(question, settings)


def required(question: Question, settings: ConfigDict) -> str:
  """Returns the kind of a rollout that has to use tools: 'multi-hop' for those of `multi_hop_sources`."""
  return 'multi-hop' if question.metadata.get('source') in settings.multi_hop_sources else 'tool-required'


def embedded(texts: Sequence[str], tokenizer, params: dict) -> np.ndarray:
  """Returns the policy's mean token embedding of each text, less that of all: [number, D], of length 1."""
  table = transfer.whole(params['embedding']).astype(np.float32)
  means = np.stack([table[tokenizer.encode(text)].mean(axis=0) for text in texts])
  points = means - means.mean(axis=0)
  return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-8)


def clusters_by_source(points: np.ndarray, questions: Sequence[Question], settings: ConfigDict,
                       seed: int) -> list[tuple[str, int]]:
  """Returns (source, cluster in it by k-means of `points` [number, D]) of each question."""
  from scipy.cluster.vq import kmeans2
  sources = [question.metadata.get('source', '') for question in questions]
  clusters = {}
  for source in sorted(set(sources)):
    places = [place for place, other in enumerate(sources) if other == source]
    number = min(settings.source_clusters.get(source, settings.clusters), len(places))
    _, labels = kmeans2(points[places], number, minit='++', seed=seed)
    clusters |= {place: (source, int(label)) for place, label in zip(places, labels)}
  return [clusters[place] for place in range(len(questions))]


def choose(questions: Sequence[Question], tiers: dict[str, int], clusters: Sequence,
           settings: ConfigDict, seed: int) -> tuple[list[Question], set[str]]:
  """Returns the questions to roll out, and the ids of those among them that are held out for the gate.

  `trajectories` / 2 are to learn from, `tier_2_share` of them in tier 2 if there are enough; each tier is
  spread evenly over clusters. `held_out` times as many of each tier come on top. If not `curated` (the
  paper's 'random-data'), the first questions are taken.
  """
  number, chosen, held_out = round(settings.trajectories // 2 * (1 + settings.held_out)), [], set()
  if settings.curated:
    rng = np.random.default_rng([seed, 2])
    tier_2 = sum(tier == 2 for tier in tiers.values())
    wanted = {2: min(round(number * settings.tier_2_share), tier_2)}
    wanted[1] = min(number - wanted[2], len(questions) - tier_2)
    for tier in (2, 1):
      members = collections.defaultdict(list)
      for place in rng.permutation(len(questions)):
        if tiers[questions[place].id] == tier:
          members[clusters[place]].append(questions[place])
      turns = itertools.chain(*itertools.zip_longest(*members.values()))  # one of each cluster in turn
      chosen += itertools.islice(filter(None, turns), wanted[tier])
  else:
    chosen += questions[:number]
  rng = np.random.default_rng([seed, 3])
  for tier in (1, 2):
    ids = [question.id for question in chosen if tiers[question.id] == tier]
    number = round(len(ids) * settings.held_out / (1 + settings.held_out))
    held_out.update(rng.permutation(ids)[:number].tolist())
  return chosen, held_out


def split(trees: Sequence[Tree], tiers: dict[str, int],
          settings: ConfigDict) -> tuple[list[Tree], list[list[Tree]]]:
  """Returns the trees of held-out questions, and buckets of the others: of a tier, closed-book or with tools.

  One bucket if nothing is curated. Raises ValueError where one has no tree.
  """
  buckets = {f'tier {tier} {kind}': [] for tier in (1, 2) for kind in KINDS[:2]}
  for tree in trees:
    if not tree.root.data['held_out'] and any(node.tokens for node in tree.nodes(Role.POLICY)):
      kind = 'closed-book' if tree.root.data['kind'] == 'closed-book' else 'tool-required'
      buckets[f'tier {tiers[tree.question.id]} {kind}'].append(tree)
  held_out = [tree for tree in trees if tree.root.data['held_out']]
  if not settings.curated:
    return held_out, [list(itertools.chain(*buckets.values()))]
  if empty := [name for name, bucket in buckets.items() if not bucket]:
    raise ValueError(f'no rollouts of {", ".join(empty)}: take more questions (critic_warmup.questions), '
                     'unless the policy is closed-book always right, or never')
  return held_out, list(buckets.values())


def draw(buckets: Sequence[Sequence[Tree]], number: int, rng: np.random.Generator) -> list[Tree]:
  """Draws `number` trees, as many from each bucket; one that is drawn again is a copy, to count again."""
  each = number // len(buckets)
  drawn = [(bucket, rng.choice(len(bucket), each, replace=len(bucket) < each)) for bucket in buckets]
  trees = [bucket[place] for bucket, places in drawn for place in places]
  return [Tree.from_json(tree.to_json(), tree.tokenizer, tree.question) if tree in trees[:place] else tree
          for place, tree in enumerate(trees)]
