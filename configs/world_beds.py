"""The policies of the beds that studies/ measures claims on, made from the shipped one.

    python -m recipes beds --config.out=runs/beds

recipes/world/beds.py explains the stages. None of these policies has seen a question of world:rl, world:dev or world:test, but
for `growing`, which is trained on world:rl.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.out = 'runs/beds'
  config.grow.max_turns = 3  # and a last span: hops + 1 spans of the actor
  config.optim.update(lr_warmup_updates=10, b2=0.98, weight_decay=0.05)
  config.actor = config_dict.create(
    updates=150, rows=8, row_length=640, learning_rate=5e-4, schedule='cosine',
    wrong=0.112,                     # probability of a wrong title at each of three hops: 30 % of the chains have one
    repeat=0.05,                     # probability that a search is sent again
    reviews=0.2, taught=False,       # share of examples that are reviews; whether they tell flaws, or are drawn at random
  )
  config.reviewer = config.actor.copy_and_resolve_references()
  config.reviewer.update(updates=600, wrong=0.3, reviews=1.0, taught=True)
  config.seeker = config_dict.create(
    updates=100, rows=8, row_length=512, learning_rate=4e-4, schedule='cosine',
    at_once=0.2, one_search=0.2,     # shares of chains that answer without a search, or after one
    evidence=1.0,                    # share of chains with evidence
  )
  config.both = config.seeker.copy_and_resolve_references()
  config.both.update(updates=300, at_once=0.4, one_search=0.3, evidence=0.5)
  config.reading = config_dict.create(  # from the shipped reader, which has seen evidence alone
    updates=600, rows=8, row_length=384, learning_rate=2e-3, schedule='cosine',
    whole=0.7,                       # share of examples where no step is missing; else the answer is a guess
    passages=0.4,                    # share of examples with passages
    drills=0.4,                      # share of the whole ones whose answer is made up: to be read, not known
  )
  config.reader = config.reading.copy_and_resolve_references()
  config.reader.update(updates=350, learning_rate=1e-3, whole=0.85, passages=0.15, drills=0.6)
  config.gate = config_dict.create(em=0.3, em_most=0.7, questions='world:dev', number=72, hops=(3,))
  config.countries = config_dict.create(  # see recipes/world/countries.py
    updates=300, rows=4, row_length=512, learning_rate=1.2e-3, schedule='cosine',
    statements=0.55, closed_book=0.2, forced=0.08, episodes=0.17, drills=0.0,  # shares of the kinds of examples
    blank=False,                     # whether a context that lost what was asked says so
  )
  config.carl = config.countries.copy_and_resolve_references()
  config.carl.update(updates=150, rows=6, learning_rate=6e-4, statements=0.3, forced=0.1,
                     episodes=0.2, drills=0.2)
  config.carl.sharpen = 1.3            # factor of all logits afterwards, as in world_policy.py
  # Lowest and highest: right closed-book on known countries, and on unknown ones for any attribute; contexts that lose what was
  # found; right by the best strategy.
  config.carl.gate = dict(by_heart=(0.9, 1.0), guessed=(0.0, 0.05), lost=(0.3, 0.5), best=(0.6, 0.95))
  config.growing = config_dict.create(  # Search-R1 as in search_r1_grpo.py
    steps=16, questions_per_step=24, group_size=6, hops=(1, 2, 3), learning_rate=5e-5,
  )
  return config.lock()
