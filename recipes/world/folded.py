"""Gold chains whose context is folded: what a policy imitates before it trains with `grow.fold='summary'`.

A chain is grown by the method itself, with what a perfect policy would write: gold turns, and summaries that
state all that was found so far. So paths are folded where those of a rollout are.
"""

import os
import random

import ml_collections

from jaxsearch import setup
from jaxsearch.data.questions import Question
from jaxsearch.sampler.requests import Generate
from jaxsearch.training import rejection
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from jaxsearch.world.chains import full_chain, search
from recipes.world.examples import stated


def write(config: ml_collections.ConfigDict, path: str | os.PathLike, number: int) -> dict[str, float]:
  """Writes chains of `number` questions of the warm split, with the `data.hops` of a config and without
  arithmetic, as `jaxsearch sft` takes them; returns what they are."""
  tokenizer = setup.load_tokenizer(config)
  questions = world.questions('warm', tuple(config.data.hops), arithmetic=False)
  drawn = random.Random(config.seed).sample(questions, min(number, len(questions)))
  trees = [grown(config, tokenizer, question) for question in drawn]
  fitting = [tree for tree in trees if max(leaf.length for leaf in tree.leaves()) <= config.sampler.length]
  rejection.write(path, [fitting])
  return {'chains': len(fitting), 'too_long': len(trees) - len(fitting),
          'folds': sum(tree.metrics['folds'] for tree in fitting) / max(len(fitting), 1),
          'longest': max((leaf.length for tree in fitting for leaf in tree.leaves()), default=0)}


def grown(config: ml_collections.ConfigDict, tokenizer, question: Question) -> Tree:
  """Grows the gold chain of a question by the method of a config."""
  tree = Tree(tokenizer, question, grammar=setup.open_grammar(config, tokenizer))
  tree.length = config.sampler.length
  turns, done = [text for role, text in full_chain(question) if role == 'policy'], 0
  growth, reply = setup.bind_grow(config)(question, tree), None
  while True:
    try:
      request = growth.send(reply)
    except StopIteration:
      tree.prune()
      return tree
    if not isinstance(request, Generate):
      reply = [search(each.query) for each in request]
      continue
    end, said = '</context>', f'<context> {stated(question.metadata["steps"][:done])}</context>'
    if end not in request.stop:
      end, said, done = '', turns[done], done + 1
    reply = request.node.append(said, Role.POLICY)
    reply.stop = end or next(stop for stop in request.stop if stop in said)
