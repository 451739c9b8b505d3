"""How long all advantages of a large batch take in one jit call, against plain NumPy loops.

  python benchmarks/advantages.py [--trajectories 65536] [--segments 16] [--siblings 8]

Ends with one JSON line. Both sides get the same float32 arrays and compute the group-relative advantages, whitened GAE, CARL's
segment differences, SLATE's advantages of every step among `siblings` alternatives, CuSearch's phase, allocation and advantages
of the selected chains, and Search-R2's reward and the three terms of its gain. `ratio` is the time of the loops over that of the
call, `max_difference` the largest difference of the results.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxsearch import advantages

GAMMA, LAM, MAX_DEPTH = 0.99, 0.95, 5


def make_batch(trajectories, segments, siblings, seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, segments + 1, trajectories)
  cut_probs = rng.random((trajectories, segments), np.float32)
  reward = rng.integers(0, 2, trajectories).astype(np.float32)
  mask = np.arange(segments) < lengths[:, None]
  last = np.arange(segments) == lengths[:, None] - 1
  return dict(
      reward=reward,
      process=rng.random(trajectories, np.float32),
      group_ids=np.arange(trajectories) // siblings,
      values=np.where(mask, rng.random((trajectories, segments), np.float32), 0),
      segment_rewards=np.where(last, reward[:, None], 0).astype(np.float32),
      mask=mask,
      lengths=lengths,
      steps=rng.integers(-2, 3, (trajectories // siblings, segments, siblings)).astype(np.float32),
      depths=rng.integers(0, MAX_DEPTH + 1, trajectories),
      accept=rng.random(trajectories, np.float32),
      cut_probs=cut_probs / cut_probs.sum(axis=1, keepdims=True),
      gain=rng.random((trajectories, segments), np.float32) - 0.5)


def in_one_call(key, batch, *, groups, budget):
  hybrid = advantages.hybrid_reward(batch['reward'], batch['process'])
  tokens, _ = advantages.gae(batch['segment_rewards'], batch['values'], batch['mask'], gamma=GAMMA, lam=LAM)
  capacities = jnp.bincount(batch['depths'], length=MAX_DEPTH + 1)
  phase = advantages.advance_phase(0, capacities, budget)
  allocation = advantages.depth_greedy(capacities, *advantages.depth_plan('phase', budget, MAX_DEPTH, phase))
  selected = advantages.select_by_depth(key, batch['depths'], allocation)
  trimmed = batch['reward'] + (batch['cut_probs'] * batch['gain']).sum(axis=1)
  terms = advantages.refinement_gain(
      batch['accept'], batch['cut_probs'], batch['gain'], batch['reward'], trimmed)
  return dict(
      hybrid=hybrid,
      relative=advantages.group_relative(hybrid, batch['group_ids'], groups),
      tokens=advantages.whiten(tokens, batch['mask']),
      segments=advantages.smdp_td(batch['values'], batch['reward'], batch['lengths']),
      steps=advantages.truncated_step(batch['steps']),
      allocation=allocation,
      selected=selected,
      retained=advantages.group_relative(hybrid, batch['group_ids'], groups, mask=selected),
      **terms)


def in_loops(batch, selected, *, groups, budget):
  """The same in Python loops; the random selection `selected` comes from the call."""
  hybrid = np.array([r * (1 + p) for r, p in zip(batch['reward'], batch['process'])])
  tokens, segments = np.zeros(batch['values'].shape), np.zeros(batch['values'].shape)
  for row, length in enumerate(batch['lengths']):
    values, advantage = batch['values'][row], 0.0
    for k in reversed(range(length)):
      following = values[k + 1] if k + 1 < length else 0.0
      advantage = batch['segment_rewards'][row, k] + GAMMA * following - values[k] + GAMMA * LAM * advantage
      tokens[row, k] = advantage
      segments[row, k] = (values[k + 1] if k + 1 < length else batch['reward'][row]) - values[k]
  counted = tokens[batch['mask']]
  tokens = np.where(batch['mask'], (tokens - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8), 0)
  steps = np.zeros(batch['steps'].shape)
  for question, scores in enumerate(batch['steps']):
    for step, r in enumerate(scores):
      steps[question, step] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
  capacities = [int((batch['depths'] == depth).sum()) for depth in range(MAX_DEPTH + 1)]
  phase = int(sum(capacities[2:]) >= budget)
  trimmed = np.array([r + p @ g for r, p, g in zip(batch['reward'], batch['cut_probs'], batch['gain'])])
  everything = np.ones(len(hybrid), bool)
  return dict(
      hybrid=hybrid, relative=relative_in_loops(hybrid, batch['group_ids'], groups, everything),
      tokens=tokens, segments=segments, steps=steps, allocation=allocate_in_loops(capacities, budget, phase),
      selected=selected, retained=relative_in_loops(hybrid, batch['group_ids'], groups, selected),
      a_prec=np.cov(batch['accept'], batch['reward'] - trimmed, ddof=0)[0, 1],
      v_inter=1 - batch['accept'].mean(),
      s_trim=sum(np.cov(p, g, ddof=0)[0, 1] for p, g in zip(batch['cut_probs'].T, batch['gain'].T)))


def relative_in_loops(rewards, group_ids, groups, mask):
  out, members = np.zeros(len(rewards)), [[] for _ in range(groups)]
  for i, group in enumerate(group_ids):
    if mask[i]:
      members[group].append(i)
  for own in members:
    r = rewards[own]
    if len(own) == 1:
      out[own] = r
    elif own:
      out[own] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
  return out


def allocate_in_loops(capacities, budget, phase):
  """'phase' has one target; its overflow goes to deeper buckets, then to shallower ones."""
  allocation, left = [0] * len(capacities), budget
  for depth in [*range(phase + 1, len(capacities)), *range(phase, -1, -1)]:
    allocation[depth] = min(capacities[depth], left)
    left -= allocation[depth]
  return np.array(allocation)


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--trajectories', type=int, default=65536)
  parser.add_argument('--segments', type=int, default=16)
  parser.add_argument('--siblings', type=int, default=8)
  parser.add_argument('--repeats', type=int, default=10)
  args = parser.parse_args(argv)

  batch = make_batch(args.trajectories, args.segments, args.siblings)
  sizes = dict(groups=args.trajectories // args.siblings, budget=args.trajectories // 2)
  on_device, key = jax.device_put(batch), jax.random.key(0)
  start = time.perf_counter()
  compute = jax.jit(lambda key, batch: in_one_call(key, batch, **sizes)).lower(key, on_device).compile()
  compile_seconds = time.perf_counter() - start
  times = []
  for _ in range(args.repeats + 1):
    start = time.perf_counter()
    got = jax.block_until_ready(compute(key, on_device))
    times.append(time.perf_counter() - start)
  seconds = float(np.median(times[1:]))

  start = time.perf_counter()
  expected = in_loops(batch, np.asarray(got['selected']), **sizes)
  loop_seconds = time.perf_counter() - start
  difference = max(
      float(np.abs(np.asarray(got[name], np.float64) - expected[name]).max()) for name in expected)
  print(json.dumps(dict(
      benchmark='advantages', device=jax.devices()[0].device_kind, trajectories=args.trajectories,
      segments=args.segments, milliseconds=round(1e3 * seconds, 3),
      numpy_loop_milliseconds=round(1e3 * loop_seconds, 1), ratio=round(loop_seconds / seconds, 1),
      compile_seconds=round(compile_seconds, 2), max_difference=difference)))


if __name__ == '__main__':
  main()
