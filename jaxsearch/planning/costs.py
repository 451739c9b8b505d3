"""Counts the FLOPs and memory traffic of one device, in the traced program of its share of a run.

Traced programs give the same numbers for every target; compilers count a loop once and miss what kernels do.
Matrix products, reductions, slices and kernels count. All else is taken to be fused into them.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsearch.models.kernels import flash_attention, paged_attention
from jaxsearch.parallel.compiled import Collective, traffic
from jaxsearch.planning import programs


@dataclasses.dataclass(frozen=True)
class Cost:
  """Holds the FLOPs and bytes of a device: of a call, or of a turn of its loop over data or tokens."""
  flops: float = 0.0
  bytes: float = 0.0     # from and to its memory
  received: float = 0.0  # by way of collectives, as whole arrays
  cache: float = 0.0     # of the bytes, those that follow the lengths of slots; counted for full ones

  def filled(self, share: float) -> 'Cost':
    """Returns the cost where slots are full by this share."""
    return dataclasses.replace(self, bytes=self.bytes - (1 - share) * self.cache, cache=share * self.cache)


def of_program(program: programs.Program, alone: programs.Program, split: int,
               collectives: Sequence[Collective]) -> list[Cost]:
  """Returns what a device does in a call, and in a turn of the loop whose length is data or over tokens.

  Args:
    alone: the program with the rows and slots of one device; `split` devices share its matrices.
  """
  once, each = (counted / split for counted in count(alone.trace().jaxpr.jaxpr))
  sent = [traffic(one for one in collectives if one.in_turn == in_turn) for in_turn in (False, True)]
  if program.steps:
    (once, each), sent = (0 * once, once / program.steps), (0, sent[0] / program.steps)
  if program.gradients:  # a device's part, read and written in every turn, and again with its training state
    each[1] += 2 * program.gradients
    once[1] = 2 * (program.gradients + programs.on_device(program.args[0]))
  return [Cost(flops, size, received, cache) for (flops, size, cache), received in zip((once, each), sent)]


def count(jaxpr) -> tuple[np.ndarray, np.ndarray]:
  """Counts what runs outside the loops whose length is data, and what runs in one turn of them.

  Returns:
    two arrays [3]: FLOPs, bytes, and the bytes among them of the decoding kernel, as if all slots were full.
  """
  once, each = np.zeros(3), np.zeros(3)
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    read, written = (list(map(_bytes, variables)) for variables in (equation.invars, equation.outvars))
    if (kernel := params.get('cost_estimate')) is not None:
      once[:2] += kernel.flops, kernel.bytes_accessed
    elif params.get('name') in paged_attention.NAMES:
      flops, moved = paged_attention.cost(*(variable.aval for variable in equation.invars))
      once += flops, moved, moved
    elif name == 'pallas_call' and (
        flops := flash_attention.flops(params['name'], *(variable.aval for variable in equation.invars))):
      once[:2] += flops, sum(read) + sum(written)
    elif name == 'dot_general':
      (contracted, _), _ = params['dimension_numbers']
      terms = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
      once += 2.0 * terms * math.prod(equation.outvars[0].aval.shape), sum(read) + sum(written), 0
    elif name in ('gather', 'dynamic_slice'):
      once[1] += 2 * sum(written)
    elif name in ('scatter', 'scatter-add', 'dynamic_update_slice'):
      once[1] += 2 * read[1 if name == 'dynamic_update_slice' else 2]
    elif name.startswith('reduce_'):
      once[1] += sum(read)
    else:
      inner = [count(body) for body in _bodies(params)]
      if name == 'cond':
        inner = [max(inner, key=lambda counted: counted[0][0])]  # the branch that computes most
      times = params['length'] if name == 'scan' else 1
      for outside, inside in inner:
        once, each = (once, each + inside + outside) if name == 'while' else (
          once + times * outside, each + times * inside)
  return once, each


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
  """Yields the programs inside an equation."""
  for value in params.values():
    for part in value if isinstance(value, tuple | list) else (value,):
      body = getattr(part, 'jaxpr', part)
      if hasattr(body, 'eqns'):
        yield body


def _bytes(variable) -> int:
  return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
