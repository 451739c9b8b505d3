"""What a broken tool returns instead of its output: CARL's test of resilience (appendix K, table 16)."""

import numpy as np

KINDS = ('working', 'empty', 'irrelevant', 'garbage')
IRRELEVANT = ('Doc 1(Title: Kettle) A kettle is a vessel for heating water. Kettles have been made of clay, copper and steel.\n'
              'Doc 2(Title: Tide table) A tide table lists the times of high and low water at a port.\n')
LETTERS = [chr(code) for code in (*range(0x21, 0x7f), *range(0xa1, 0x180))]


def check(kind: str) -> None:
  """Raises ValueError for a fault that is none of KINDS."""
  if kind not in KINDS:
    raise ValueError(f'fault={kind!r} is none of {", ".join(KINDS)}')


def apply(kind: str, output: str, rng: np.random.Generator) -> str:
  """What the model gets to see instead of `output`.

  Args:
    kind: 'working' leaves it, 'empty' returns nothing, 'irrelevant' passages about something else, 'garbage' characters
      drawn at random, as many as the output had, but 40 to 200: each may be a token.
  """
  check(kind)
  if kind == 'working':
    return output
  if kind == 'empty':
    return ''
  if kind == 'irrelevant':
    return IRRELEVANT
  return ''.join(rng.choice(LETTERS, min(max(len(output), 40), 200)))
