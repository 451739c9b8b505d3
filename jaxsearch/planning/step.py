"""From what programs need to the least time of a step: pure arithmetic.

A program takes at least as long as the slowest of three: its arithmetic, its traffic with the memory, what it receives from
other devices, each at the published rate. A step runs programs a number of times that follows from its questions, chains,
turns and tokens. Tools, judges and the host take no time here, and no program reaches its bound: expect a multiple.
"""

import dataclasses
import math
from collections.abc import Mapping

import ml_collections


@dataclasses.dataclass(frozen=True)
class Cost:
  """What one device does: in a call outside of the loop whose length is data, or in one turn of that loop."""
  flops: float = 0.0
  bytes: float = 0.0     # from and to its memory
  received: float = 0.0  # by way of collectives, as whole arrays
  cache: float = 0.0     # of the bytes, what follows the lengths of the slots, where a kernel reads no more; as if all were full

  def filled(self, share: float) -> 'Cost':
    """With slots that are full by this share."""
    return dataclasses.replace(self, bytes=self.bytes - (1 - share) * self.cache, cache=share * self.cache)

  def seconds(self, device, network) -> dict[str, float]:
    """By resource; the largest is the least time. `network` maps bytes to seconds."""
    return {'arithmetic': self.flops / device.flops, 'memory': self.bytes / device.bandwidth, 'network': network(self.received)}


@dataclasses.dataclass(frozen=True)
class Work:
  """What a step grows: trees with a prompt, `turns` observations, and in front, between and behind them policy spans."""
  questions: int
  trees: int        # of all questions
  branches: int     # alternatives for every policy span (SLATE), of which one goes on
  turns: int
  prompt: int       # tokens
  tokens: int       # of a policy span
  observation: int  # tokens

  @property
  def decoded(self) -> int:
    return self.trees * self.branches * (self.turns + 1) * self.tokens

  @property
  def prefilled(self) -> int:
    """The trees of a question share its prompt."""
    return self.questions * self.prompt + self.trees * self.turns * self.observation

  @property
  def mean_length(self) -> float:
    """Tokens in front of a decoded one, on average."""
    return self.prompt + self.turns * (self.tokens + self.observation) / 2 + (self.tokens - 1) / 2

  @property
  def trained(self) -> int:
    """Tokens in training rows: all of them, prompts included."""
    return self.decoded + self.prefilled


def work(config: ml_collections.ConfigDict, turns: int | None = None, tokens: int | None = None, prompt: int | None = None,
         observation: int | None = None) -> Work:
  """The most that a config asks for: every chain uses all its turns and fills its path; arguments replace what is so found.

  A prompt has 256 tokens, or a quarter of a short path; an observation 512, or less where all would take half of what is left.
  """
  grow, length = config.grow, config.sampler.length
  if turns is None:
    turns = (grow.max_segments - 1) // 2 if 'max_segments' in grow else grow.budget - 1 if 'budget' in grow else grow.get(
      'max_turns', 4)
  prompt = prompt or max(1, min(256, length // 4))
  observation = observation or max(1, min(512, (length - prompt) // 2 // max(turns, 1)))
  room = (length - prompt - turns * observation) // (turns + 1)
  most = min(grow.get('max_tokens', 512), grow.get('max_response', math.inf) // (turns + 1))
  return Work(config.questions_per_step, config.questions_per_step * config.group_size * (1 + grow.get('max_revisions', 0)),
              grow.get('k', 1), turns, prompt, tokens or max(1, min(most, room)), observation)


def calls(work: Work, config: ml_collections.ConfigDict, *, hosts: int, slots: int, segment: int,
          prefill: int) -> dict[str, tuple[float, float]]:
  """Program -> (calls in a step, turns of its loop in a step), each on all devices at once.

  Args:
    slots: paths that a host decodes at a time, full until the last are left.
    segment: tokens of a decode segment.
    prefill: tokens that a host prefills in a call.
  """
  steps = work.decoded / (hosts * slots) if work.trees * work.branches > hosts * slots else (work.turns + 1) * work.tokens
  kept = min(config.credit.get('keep', work.trees), work.trees)  # CuSearch trains on some
  updates = math.ceil(kept / (config.train.mini_batch or kept))
  rows = math.ceil(work.trained * kept / work.trees / config.train.row_length)
  micro = updates * math.ceil(rows / updates / config.train.micro_rows)
  scored = bool(config.loss.kl_coef) + (config.train.old_logprobs == 'recompute')
  epochs = config.train.epochs
  return {
    'decode': (steps / segment, steps), 'prefill': (work.prefilled / (hosts * prefill), 0),
    'score': (scored * updates, scored * micro), 'values': (1, micro),
    'update': (epochs * updates, epochs * micro), 'critic': (epochs * updates, epochs * micro),
  }


PHASES = {'rollout': ('prefill', 'decode'), 'score': ('score', 'values'), 'update': ('update', 'critic')}


def step_seconds(seconds: Mapping[str, tuple[float, float]], times: Mapping[str, tuple[float, float]]) -> dict[str, float]:
  """Phase -> seconds, from the least time of every program: (of a call, of a turn of its loop)."""
  return {phase: sum(a * b for name in names if name in seconds for a, b in zip(seconds[name], times[name]))
          for phase, names in PHASES.items()}


def largest(measure, start: int, multiple: int, limit: float, most: int) -> int:
  """The largest multiple up to `most` for which `measure`, which grows, is at most `limit`; 0 if not even the first.

  Every measurement is dear: the next guess lies on the line through the last one and what the first showed to grow.
  """
  known = {}

  def fits(n):
    if n not in known:
      known[n] = measure(n * multiple)
    return known[n] <= limit

  low, high = 0, most // multiple + 1  # the former fits, the latter does not
  guess = min(max(1, start // multiple), high - 1)
  while high - low > 1:
    low, high = (guess, high) if fits(guess) else (low, guess)
    finite = sorted(n for n in known if known[n] < math.inf)
    guess = (low + high) // 2 if high <= most // multiple else 2 * low
    if len(finite) > 1 and known[finite[-1]] > known[finite[0]]:
      slope = (known[finite[-1]] - known[finite[0]]) / (finite[-1] - finite[0])
      guess = int(finite[0] + (limit - known[finite[0]]) / slope)
    guess = min(max(guess, low + 1), high - 1)
  return low * multiple
