"""What a program computes, and what its compiled form moves through memory.

FLOPs are counted in the traced program: there they are the same for every target, and no compiler hides them in a kernel. Bytes
are counted in the compiled text, after fusion. Both count a loop as often as it runs; one whose length is data (the micro-batches
of an update, the tokens of a decode segment) counts once, and `cut` gives the body of that loop as a program of its own.
"""

import math
import re

import numpy as np

from jaxsearch.models.kernels import decode_attention

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)')
_ARRAY = re.compile(r'\b(pred|bf16|[suf]\d+|c64|c128)\w*\[([\d,]*)\](\{[^}]*\})?')
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'replica-id',
         'opt-barrier'}
_SLICES = {'dynamic-slice', 'slice', 'gather'}


def count(jaxpr) -> tuple[np.ndarray, np.ndarray]:
  """What all devices do outside, and in one turn, of the loops whose length is data.

  Returns:
    two times [3]: FLOPs of products of matrices; bytes that kernels move beyond their operands and results (below 0 where they
    skip some), by their cost estimates; bytes of the kernel that decodes, which is planned as if every slot were full. FLOPs of
    a kernel without an estimate are those of its body times its grid.
  """
  once, each = np.zeros(3), np.zeros(3)
  for eqn in jaxpr.eqns:
    name, params, times, kernel = eqn.primitive.name, eqn.params, 1, eqn.params.get('cost_estimate')
    if name == 'dot_general':
      (contracted, _), _ = params['dimension_numbers']
      once[0] += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if kernel is not None:
      arrays = [one.aval for one in (*eqn.invars, *eqn.outvars)]
      beyond = kernel.bytes_accessed - sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
      once += kernel.flops, beyond, kernel.bytes_accessed if params.get('name') == decode_attention.NAME else 0
      continue
    if name == 'pallas_call':
      times = math.prod(params['grid_mapping'].grid)
    elif name == 'scan':
      times = params['length']
    elif name == 'shard_map':
      times = math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
    inner = [count(getattr(one, 'jaxpr', one)) for value in params.values()
             for one in (value if isinstance(value, (tuple, list)) else (value,)) if hasattr(getattr(one, 'jaxpr', one), 'eqns')]
    if name == 'cond':
      inner = [max(inner, key=lambda one: one[0][0])]  # the dearest branch
    for outside, inside in inner:
      once, each = (once, each + inside + outside) if name == 'while' else (once + times * outside, each + times * inside)
  return once, each


def cut(text: str) -> tuple[str, str | None]:
  """(the text with the body of its outermost loop of unknown length left out, that body as a program); the text, None without."""
  _, computations = _computations(text)
  for line, (_, _, opcode, _) in (one for lines in reversed(computations.values()) for one in lines):  # the entry is last
    if opcode == 'while' and 'known_trip_count' not in line:
      body = re.search(r'body=%?([\w.-]+)', line)[1]
      rest = text.replace(line, line.replace(' while(', ' tuple(').replace('body=', 'no_body=').replace('condition=', 'no='))
      return rest, re.sub(rf'^(%?{re.escape(body)} )', r'ENTRY \1', text.replace('\nENTRY ', '\n'), flags=re.MULTILINE)
  return text, None


def traffic(text: str, cached: int = 0, dearest: bool = True) -> int:
  """Bytes that a compiled program reads from and writes to the memory of a device.

  Every instruction reads its operands and writes its results, a fusion as one. Slices read what they take, updates in place
  write what they put; what the compiler keeps on the chip (TPU: memory space 1) is free.

  Args:
    cached: what a kernel makes and others read is free too where it has at most so many bytes: a cache of the device (GPU) that
      the text does not show.
    dearest: of a conditional the dearest branch runs, else the cheapest.
  """
  entry, computations = _computations(text)

  def of(name: str) -> float:
    sizes, given = {}, set()  # in memory; what no kernel of this computation made
    for _, (own, size, opcode, operands) in computations[name]:
      if opcode in ('parameter', 'constant') or (opcode in _FREE and not given.isdisjoint(operands)):
        given.add(own)
      sizes[own] = size if own in given or size > cached else 0
    whole = {own: size for _, (own, size, *_) in computations[name]}
    return sum(cost(sizes, whole, *one) for one in computations[name])

  def cost(sizes, whole, line, instruction):
    own, full, opcode, operands = instruction
    size = sizes[own]
    if opcode in _FREE or opcode.endswith('-done'):
      return 0
    called = {key: value for key, value in re.findall(r'(\w+)=%([\w.-]+)', line)}
    if opcode == 'while':
      count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
      return (int(count[1]) if count else 1) * of(called['body'])
    if opcode == 'conditional':
      found = re.findall(r'(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.-]+))', line)
      return (max if dearest else min)(of(branch) for branch in re.findall(r'%([\w.-]+)', str(found)))
    if opcode in ('call', 'async-start'):
      return of(called.get('to_apply') or called['calls'])
    if opcode.endswith('-start'):  # what it returns holds its operands too
      return size
    if opcode == 'custom-call' and 'triton' in line:  # a kernel of ours: `count` has what it moves beyond whole operands
      return sum(whole.get(operand, 0) for operand in operands) + full
    given = [sizes.get(operand, 0) for operand in operands]
    if opcode == 'fusion':
      return _fusion(computations[called['calls']], given, size)
    if opcode in _SLICES:
      return (full if given[0] else 0) + size
    if opcode in ('dynamic-update-slice', 'scatter'):
      put = operands[1 if opcode == 'dynamic-update-slice' else -1]
      return sizes.get(put, 0) + (whole.get(put, 0) if size else 0)
    return sum(given) + size

  return int(of(entry))


def _fusion(body, given, size):
  """Bytes of a fusion whose operands have `given` bytes and whose results have `size`."""
  instructions = {instruction[0]: (line, instruction) for line, instruction in body}
  total, written = 0, size
  for line, (own, full, opcode, _) in body:
    if opcode == 'parameter':
      number = int(re.search(r'parameter\((\d+)\)', line)[1])
      uses = [(kind, result, operands) for _, (_, result, kind, operands) in body if own in operands]
      if uses and all(kind in _SLICES and operands[0] == own for kind, _, operands in uses):
        total += min(sum(result for _, result, _ in uses), given[number])
      elif not (uses and all(kind == 'dynamic-update-slice' and operands[0] == own for kind, _, operands in uses)):
        total += given[number]
    if opcode == 'dynamic-update-slice':  # in place
      _, operands = instructions[own][1][2:]
      update = instructions[operands[1]][1][1] if operands[1] in instructions else 0
      written -= min(max(full - update, 0), written)
  return total + written


def _computations(text):
  """(name of the entry, {name: [(line, (instruction, bytes in memory, opcode, operands))]})."""
  entry, name, computations = None, None, {}
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      name = match[2]
      computations[name] = []
      entry = name if match[1] else entry
    elif (match := _INSTRUCTION.match(line)) and name is not None:
      _, own, shape, opcode, rest = match.groups()
      size = sum(math.prod(int(n) for n in dims.split(',') if n) * _bits(kind) for kind, dims, layout in _ARRAY.findall(shape)
                 if 'S(1)' not in layout) / 8
      operands = re.findall(r'%([\w.-]+)', rest.split('), ')[0])
      computations[name].append((line, (own, size, opcode, operands)))
  return entry, computations


def _bits(kind):
  return 8 if kind == 'pred' else int(re.search(r'\d+', kind)[0])
