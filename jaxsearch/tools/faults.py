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
  """What the model sees instead of `output`: for 'working' the output, for 'empty' nothing, for 'irrelevant' passages about
  something else, for 'garbage' random characters, as many as the output had, but 40 to 200: each may be a token."""
  garbage = rng.choice(LETTERS, min(max(len(output), 40), 200)) if kind == 'garbage' else ()
  return {'working': output, 'empty': '', 'irrelevant': IRRELEVANT, 'garbage': ''.join(garbage)}[kind]
