"""Computes the least and the expected time of a step from what its programs need: pure arithmetic.

A program takes at least as long as the slowest of three: its arithmetic, its traffic with the memory, what it
receives from other devices, each at the published rate (the roofline). `CALIBRATION` has what real ones take
beside. A step runs programs a number of times that follows from its questions, chains, turns and tokens.
Judges take no time here.
"""

import dataclasses
import math
from collections.abc import Mapping

import ml_collections

PHASES = {'rollout': ('prefill', 'decode'), 'score': ('score', 'values'), 'update': ('update', 'critic')}

# What one H100 took (benchmarks/RESULTS.md#on-an-h100), and what no device has measured yet.
CALIBRATION = {
  'products': 0.6,      # of the peak: an update of Qwen2.5-1.5B, recomputation counted; a prefill had 0.77
  'memory': 0.76,       # of the bandwidth: decoding with Qwen2.5-3B, to 1 % at three lengths with the floor
  'collective': 10e-6,  # seconds at least; assumed
  # Kernels of a layer per decoded token on GPUs, without collectives: counted in programs compiled for H100,
  # heads split or not (tests/sampler/test_kernels.py). The 25 to 30 kernels outside layers are not counted.
  'kernels': 16,
  'kernel': 3.7e-6,     # seconds at least; those of that decode
  'span': 0.98e-3,      # seconds of that host, one policy span after the other, calls of prefills included
  'search': 0.1,        # seconds, sampler.tool_workers at a time; assumed, configs do not say it
  # Bytes a second of a shared disk: Filestore High Scale, 10 TiB;
  # cloud.google.com/filestore/docs/performance
  'disk_write': 880 * 2**20, 'disk_read': 2600 * 2**20,
}


@dataclasses.dataclass(frozen=True)
class Work:
  """Describes a step: trees of a prompt, `turns` observations, and policy spans around and between them."""
  questions: int
  trees: int        # of all questions; a chain that branches off counts as one
  branches: int     # alternatives for every policy span (SLATE), of which one goes on
  turns: float      # on average
  prompt: int       # tokens
  tokens: int       # of a policy span
  observation: int  # tokens
  chains: int = 1   # of a tree, among `trees`

  @property
  def decoded(self) -> int:
    return self.trees * self.branches * (self.turns + 1) * self.tokens

  @property
  def prefilled(self) -> int:
    """Tokens; the trees of a question share its prompt."""
    return self.questions * self.prompt + self.trees * self.turns * self.observation

  @property
  def mean_length(self) -> float:
    """Tokens in front of a decoded one, on average."""
    return self.prompt + self.turns * (self.tokens + self.observation) / 2 + (self.tokens - 1) / 2

  @property
  def trained(self) -> int:
    """Tokens in training rows: all of them, prompts included."""
    return self.decoded + self.prefilled


def work(config: ml_collections.ConfigDict, turns: int | None = None, tokens: int | None = None,
         prompt: int | None = None, observation: int | None = None) -> Work:
  """Returns the most that a config asks for: every chain uses all its turns and fills its path.

  What is given replaces what is computed. A prompt has 256 tokens, or a quarter of a short path; an
  observation 512, or less where all would take half of what is left.
  """
  grow, length = config.grow, config.sampler.length
  if turns is None:
    if 'max_segments' in grow:
      turns = (grow.max_segments - 1) // 2
    else:
      turns = grow.budget - 1 if 'budget' in grow else grow.get('max_turns', 4)
      turns -= 'max_revisions' in grow  # Search-R2 counts the last span too
  prompt = prompt or max(1, min(256, length // 4))
  observation = observation or max(1, min(512, (length - prompt) // 2 // max(turns, 1)))
  room = (length - prompt - turns * observation) // (turns + 1)
  most = min(grow.get('max_tokens', 512), grow.get('max_response', math.inf) // (turns + 1))
  chains = 1 + grow.get('max_revisions', 0) + grow.get('extra', 0)
  chains += grow.get('rounds', 0) * grow.get('branches', 0)
  trees = config.questions_per_step * config.group_size * chains
  tokens = tokens or max(1, min(most, room))
  return Work(config.questions_per_step, trees, grow.get('k', 1), turns, prompt, tokens, observation, chains)


def published(work: Work) -> Work:
  """Returns Search-R1's step as published: 2,560 chains, on average 250 generated tokens, 1.5 searches."""
  return dataclasses.replace(work, questions=512, trees=2560, chains=1, branches=1, turns=1.5, tokens=100)


def calls(work: Work, config: ml_collections.ConfigDict, *, scored: int, hosts: int, slots: int, segment: int,
          prefill: int, whole: bool = False) -> dict[str, tuple[float, float]]:
  """Returns program -> (calls in a step, turns of its loop in a step), each on all devices at once.

  Args:
    scored: passes over a batch, see `learner.score_passes`.
    slots: paths that a host decodes at a time, full until the last are left.
    segment: tokens of a decode segment.
    prefill: tokens that a host prefills in a call.
    whole: chains without a slot wait until the whole round is done, as chains of equal length would.
  """
  rounds = work.trees * work.branches / (hosts * slots)
  steps = max(1, math.ceil(rounds) if whole else rounds) * (work.turns + 1) * work.tokens
  some = config.credit.get('strategy', 'full') != 'full'  # CuSearch then trains on `keep` chains
  kept = min(config.credit.keep, work.trees) if some else work.trees
  updates = math.ceil(kept / (config.train.mini_batch * work.chains or kept))
  rows = math.ceil(work.trained * kept / work.trees / config.train.row_length)
  micro = updates * math.ceil(rows / updates / config.train.micro_rows)
  trained = config.train.epochs * updates, config.train.epochs * micro
  return {'decode': (steps / segment, steps), 'prefill': (work.prefilled / (hosts * prefill), 0),
          'score': (scored * updates, scored * micro), 'values': (1, micro),
          'update': trained, 'critic': trained}


def expected(arithmetic: float, memory: float, network: float, collectives: int = 0,
             layers: int = 0) -> float:
  """Returns the expected seconds of a call or turn from its least ones, with a floor that no rate shortens.

  Args:
    collectives: that it waits for.
    layers: whose kernels follow each other, each of them short.
  """
  floor = collectives * CALIBRATION['collective'] + layers * CALIBRATION['kernels'] * CALIBRATION['kernel']
  return max(arithmetic / CALIBRATION['products'], memory / CALIBRATION['memory'], network) + floor


def waits(work: Work, *, hosts: int, workers: int) -> float:
  """Returns the expected seconds of a rollout beside its programs: policy spans on the host, and searches.

  Args:
    workers: searches at a time, of a host.
  """
  spans, searches = work.trees * work.branches * (work.turns + 1), work.trees * work.turns
  served = spans * CALIBRATION['span'] / hosts
  return served + searches / workers * CALIBRATION['search'] / hosts


def reload_seconds(size: int, hosts: int) -> float:
  """Returns the expected seconds until servers on `hosts` have new weights of `size` bytes, by a disk."""
  return size / CALIBRATION['disk_write'] + hosts * size / CALIBRATION['disk_read']


def step_seconds(seconds: Mapping[str, tuple[float, float]],
                 times: Mapping[str, tuple[float, float]]) -> dict[str, float]:
  """Returns phase -> seconds, from the time of every program: (of a call, of a turn of its loop)."""
  spent = {name: sum(each * count for each, count in zip(seconds[name], times[name])) for name in seconds}
  return {phase: sum(spent.get(name, 0.0) for name in names) for phase, names in PHASES.items()}
