"""What the training grids of docs/claims/plan.md have in common, and the policies that they start from.

    python -m recipes beds actor both growing exchanged --config.out=runs/beds
    jaxsearch export --checkpoint runs/beds/growing/checkpoints/1 --out runs/beds/grown   # 1.6 searches on three hops

A tenth of the usual learning rate: with that of base.py every bed was at its end after three steps. One search in ten finds
something else, in training and evaluation alike.
"""

ACTOR = 'runs/beds/actor'  # searches a wrong title somewhere in a third of its chains
GROWN = 'runs/beds/grown'

BED = {
  'steps': 12, 'questions_per_step': 16, 'optim.learning_rate': 1e-5, 'search.noise': 0.1,
  'data.hops': (1, 3), 'data.arithmetic': False, 'sampler.length': 640, 'checkpoint_every': 12,
  'eval.every': 3, 'eval.number': 360, 'eval.temperatures': (0.0,), 'eval.questions': 'world:test+world:dev',
}
PATHS = {'data.hops': (3,)}  # one hop count, paths alone; 260 held-out questions, all that there are


def control(*hops: int) -> dict:
  """Returns a row that trains on paths with the answers of others: EM that it gains is not owed to right answers."""
  return {'answers exchanged': {'data.questions': '+'.join(f'runs/beds/exchanged_{hop}.jsonl' for hop in hops)}}
