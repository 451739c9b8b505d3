"""Out of memory, in one line: what was being done, and which fields of the config make it take less.

Imports no JAX, so that the command line can ask `ran_out` before anything is loaded.
"""

import contextlib
import re
from collections.abc import Iterator

POOL = 0.9  # of a device's memory, for arrays: the rest is for programs and buffers of collectives
SAMPLER = "lower sampler.slots or sampler.length (of a reader, judge or refiner: its `slots` and `length`)"
UPDATE = 'lower train.micro_rows, train.chunk or train.row_length, or set remat=full'
STATE = ('set dtype=bfloat16 with optim.master_weights=False, loss.kl_coef=0 (no copy of the initial policy) '
         'or lora.rank, or take more devices (mesh.fsdp)')


class OutOfMemory(MemoryError):
  """An allocation failed; the message says what for, and which fields to change."""


def ran_out(error: BaseException) -> bool:
  """Tells whether an error is an allocation that failed, on the host or on a device."""
  of_jax = type(error).__name__ == 'JaxRuntimeError'
  return isinstance(error, MemoryError) or (
    of_jax and bool(re.search('RESOURCE_EXHAUSTED|out.of.memory', str(error), re.IGNORECASE)))


def explained(error: BaseException, doing: str = '', less: str = f'{SAMPLER}; {UPDATE}') -> OutOfMemory:
  """Returns the error for the user: what ran out while `doing` what, and how it takes `less`."""
  size = re.search(r'allocat\w+ ([\d.,]+ ?\w*)', str(error))
  asked = f' ({size[1]} asked for)' if size else ''
  return OutOfMemory(f'out of memory{f" while {doing}" if doing else ""}{asked}: {less}')


@contextlib.contextmanager
def named(doing: str, less: str) -> Iterator[None]:
  """Opens a context or decorates: an allocation that fails inside raises OutOfMemory of the innermost."""
  try:
    yield
  except Exception as error:
    if ran_out(error) and not isinstance(error, OutOfMemory):
      raise explained(error, doing, less) from error
    raise
