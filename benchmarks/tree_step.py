"""What the tree layout saves: a batch with shared prefixes laid out once, and the same batch as separate rows.

    python benchmarks/tree_step.py [--shape slate|report]

slate    trees of B = 4 steps with k = 5 candidates of 32 tokens and three passages (288 tokens) a step. As a separate row,
         every candidate carries its whole prefix.
report   groups of 5 chains with a prompt of 1,500 tokens, as FinQA's questions with their reports in them, and 40 to 200
         tokens of the policy in each chain.

Both layouts go through the same loss and gradients, which must agree. The last line is one JSON object with the ratios of tokens
and seconds, separate rows over trees.
"""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.train_step import best_seconds
from jaxsearch.data.questions import Question
from jaxsearch.models.architecture import DecoderConfig, initial_params
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.training import batch as batches, step as steps
from jaxsearch.trees.layout import TrainingRows, lay_out
from jaxsearch.trees.tree import Role, Tree

CONFIG = DecoderConfig(vocab_size=8192, hidden_size=256, intermediate_size=704, num_layers=4, num_heads=8, num_kv_heads=2,
                       head_dim=32, rope_theta=1e6, qkv_bias=True, tie_embeddings=True)
STEPS, SIBLINGS, PROMPT, CANDIDATE, PASSAGES = 4, 5, 64, 32, 288  # of 'slate'
REPORT, GROUP, SHORTEST, LONGEST = 1500, 5, 40, 200  # of 'report'
SETTINGS = dict(config=CONFIG, temperature=1.0, chunk=1024, clip_low=0.2, clip_high=0.2, dual_clip=None, kl_coef=0.0,
                entropy_coef=0.0)


def grown(rng: np.random.Generator) -> Tree:
  """A tree as SLATE grows it, of random tokens, with random credit."""
  tree = Tree(None)
  node = tree.root.append(rng.integers(CONFIG.vocab_size, size=PROMPT), Role.PROMPT)
  for step in range(STEPS):
    siblings = []
    for _ in range(SIBLINGS):
      siblings.append(node.append(rng.integers(CONFIG.vocab_size, size=CANDIDATE), Role.POLICY,
                                  sampler_logprobs=rng.normal(-9.0, 0.1, CANDIDATE)))
      siblings[-1].advantages = float(rng.normal())
    if step < STEPS - 1:
      chosen = siblings[rng.integers(SIBLINGS)]
      node = chosen.append(rng.integers(CONFIG.vocab_size, size=PASSAGES), Role.OBSERVATION)
  return tree


def separate(tree: Tree) -> list[Tree]:
  """A tree for each candidate: all that it was generated from, and itself."""
  found = []
  for node in tree.nodes(Role.POLICY):
    alone = Tree(None)
    prefix = alone.root.append(node.parent.path_tokens(), Role.PROMPT)
    own = prefix.append(node.tokens, Role.POLICY, sampler_logprobs=node.sampler_logprobs)
    own.advantages = node.advantages
    found.append(alone)
  return found


def group(rng: np.random.Generator, question: Question) -> list[Tree]:
  """The chains of a question about a report, of random tokens, with random credit."""
  prompt = rng.integers(CONFIG.vocab_size, size=REPORT)
  chains = [Tree(None, question) for _ in range(GROUP)]
  for chain in chains:
    size = rng.integers(SHORTEST, LONGEST + 1)
    node = chain.root.append(prompt, Role.PROMPT).append(
      rng.integers(CONFIG.vocab_size, size=size), Role.POLICY, sampler_logprobs=rng.normal(-9.0, 0.1, size))
    node.advantages = float(rng.normal())
  return chains


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--shape', choices=('slate', 'report'), default='slate')
  parser.add_argument('--trees', type=int, default=8, help="of 'report': groups")
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  if args.shape == 'slate':
    forest = [grown(rng) for _ in range(args.trees)]
    length = -(-max(tree.count() for tree in forest) // 64) * 64
    as_trees = lay_out(forest, length, pad_id=0, how='step-mean')
    as_rows = lay_out([alone for tree in forest for alone in separate(tree)], length, pad_id=0, how='seq-mean-token-mean')
    weights = ('loss_weights', 'gains', 'losses')  # a sum over steps, a mean over the rest
    as_rows = dataclasses.replace(as_rows, **{name: getattr(as_rows, name) * np.float32(STEPS) for name in weights})
  else:
    forest = [chain for i in range(args.trees) for chain in group(rng, Question(str(i), '', ()))]
    longest = max(tree.count() for tree in forest)
    as_trees = lay_out(forest, REPORT + GROUP * LONGEST, pad_id=0)
    for tree in forest:
      tree.question = None  # so that it is laid out alone
    as_rows = lay_out(forest, -(-longest // 64) * 64, pad_id=0)
  params = initial_params(CONFIG, jax.random.key(0))
  mesh = meshes.make_mesh(devices=jax.devices()[:1])
  shardings = jax.tree.map(lambda _: transfer.replicated(mesh), params)

  @jax.jit
  def gradients(params, batch):
    return steps.accumulate(lambda p, b: steps.policy_loss(p, b, **SETTINGS), params, batch, shardings)[0]

  def run(rows: TrainingRows):
    batch = jax.tree.map(jnp.asarray, batches.make_batch(rows, 1))
    seconds = best_seconds(lambda: jax.block_until_ready(gradients(params, batch)), args.repeats)
    return gradients(params, batch), seconds, int(rows.real.sum())

  trees, tree_seconds, tree_tokens = run(as_trees)
  rows, row_seconds, row_tokens = run(as_rows)
  scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(rows))
  gap = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(trees), jax.tree.leaves(rows))) / scale
  print(json.dumps({
    'shape': args.shape, 'device': jax.devices()[0].device_kind, 'tokens_trees': tree_tokens, 'tokens_rows': row_tokens,
    'fewer_tokens': round(row_tokens / tree_tokens, 2), 'seconds_trees': round(tree_seconds, 3),
    'seconds_rows': round(row_seconds, 3), 'faster': round(row_seconds / tree_seconds, 2), 'gradient_gap': gap}))
  assert gap < 1e-4, f'gradients differ by {gap} of the largest'


if __name__ == '__main__':
  main()
