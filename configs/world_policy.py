"""The warm-started policy that ships with the package, made from nothing.

    python -m recipes world --policy --config.out=runs/world_policy

About two hours on two CPU cores, minutes on an accelerator. recipes/world/policies.py explains the stages. The fourth has to
pass a gate: 85 % of the answers to questions about held-out entities are right. The mix then keeps the skill of searching and
spoils the strategy, which is what reinforcement learning repairs.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.model = 'random:world-tiny'
  config.out = 'runs/world_policy'
  config.optim.update(lr_warmup_updates=40, b2=0.98, weight_decay=0.05)
  config.short = config_dict.create(  # chains that fit into short rows, where attention is cheap
    updates=1200, rows=16, row_length=256, learning_rate=3e-3, schedule='constant',
    passages=0.25,                   # share of encyclopedia entries
    retellings=0.0,                  # share of entries retold
    drills=0.0,                      # share of single steps about names of random tokens
    renamed=0.6,                     # share of chains under made-up names
  )
  config.skill = config_dict.create(
    updates=900, rows=8, row_length=512, learning_rate=2e-3, schedule='cosine', passages=0.05,
    retellings=0.0, drills=0.0, renamed=0.5,
  )
  config.names = config_dict.create(
    updates=400, rows=8, row_length=512, learning_rate=1e-3, schedule='cosine', passages=0.05, retellings=0.35,
    drills=0.0, renamed=0.7,
  )
  config.drill = config_dict.create(
    updates=850, rows=8, row_length=512, learning_rate=1.2e-3, schedule='cosine', passages=0.0, retellings=0.1,
    drills=0.75, renamed=0.5,        # of the examples; chains are longer, so they are still half of the tokens
  )
  config.mix = config_dict.create(
    updates=150, rows=8, row_length=512, learning_rate=4e-4, schedule='cosine',
    at_once=0.5, one_search=0.35,    # shares of chains that answer without a search, or after one; the rest as needed
    sharpen=1.3,                     # factor of all logits afterwards: guessing flattens the policy, and rollouts sample at 1
    evidence=0.4,                    # share of chains in the format of R-Search
  )  # fmt: skip
  config.review = config_dict.create(  # the policy that Search-R2 starts from: it has seen what a review looks like
    updates=120, rows=8, row_length=512, learning_rate=4e-4, schedule='cosine',
    at_once=0.3, one_search=0.3, noise=0.25,  # kinds of drafts, and the share of reviews that say anything
    reviews=0.6,                     # share of examples; the rest are those of the mix
  )
  config.carl = config_dict.create(  # the policy that CARL starts from: the format
    updates=900, rows=8, row_length=512, learning_rate=8e-4, schedule='cosine',
    # Shares of the kinds of examples, see recipes/world/carl_examples.py.
    statements=0.35, closed_book=0.1, forced=0.1, episodes=0.15, drills=0.15, searches=0.15, answers=0.0,
    at_once=0.5, one_call=0.2,       # of the episodes: answers without a call, or after one
    lost=0.1, renamed=0.4,           # contexts that lost what mattered; chains under made-up names
  )  # fmt: skip
  config.recall = config.carl.copy_and_resolve_references()  # and the facts that it knows closed-book
  config.recall.update(updates=300, learning_rate=4e-4, statements=0.5, closed_book=0.06, forced=0.1, episodes=0.08, drills=0.13,
                       searches=0.08, answers=0.05)
  config.reader = config_dict.create(  # the frozen model of another family for R-Search's evidence reward
    model='random:world-reader', updates=900, rows=16, row_length=256, learning_rate=3e-3, schedule='cosine',
  )
  config.gate = config_dict.create(em=0.85, questions='world:dev', number=200, hops=(1, 2))
  return config.lock()
