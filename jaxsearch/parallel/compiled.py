"""What a compiled program sends between devices, read from its text (`compiled.as_text()`, HLO of CPU, GPU or TPU)."""

import collections
import dataclasses
import math
import re

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
_BITS = dict(pred=8, bf16=16, c64=64, c128=128) | {f'{kind}{bits}': bits for kind in 'suf' for bits in (4, 8, 16, 32, 64)}
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)')
_ARRAY = re.compile(r'\b([a-z]+\d*)\w*\[([\d,]*)\]')
_ALONE = re.compile(r'replica_groups=(\{\{\d+\}|\[\d+,1\]<)')
_CALLED = re.compile(r'\b(?:body|condition|calls|to_apply|called_computations|branch_computations|true_computation|'
                     r'false_computation)=(\{[^}]*\}|%[\w.-]+)')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction of a program that runs on every device."""
  kind: str      # one of KINDS
  bytes: int     # of its operands or its results on one device, whichever are larger: the whole array of a gather or a scatter
  times: int     # how often it runs: product of the lengths of the loops around it; a loop whose length is data counts as 1
  in_loop: bool  # whether a loop is around it whose length is known, such as that over layers


def collectives(text: str) -> list[Collective]:
  """The collectives that a compiled program runs, in the order of its text within each computation.

  Those among groups of one device, which only some compilers remove, are left out.
  """
  entry, computations = _computations(with_lengths(text))
  found = []

  def walk(name, times, in_loop):
    instructions = computations[name]
    sizes = {own: size for own, size, *_ in instructions}
    for _, size, opcode, operands, line in instructions:
      kind = opcode.removesuffix('-start')
      if kind in KINDS and not _ALONE.search(line):
        given = sum(sizes.get(operand, 0) for operand in re.findall(r'%?([\w.-]+)', re.sub(r'/\*.*?\*/', '', operands)))
        # What an asynchronous start returns holds its operands beside its results.
        result = size - given if opcode != kind and size > given else size
        found.append(Collective(kind, max(given, result), times, in_loop))
      count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line) if opcode == 'while' else None
      for called in _CALLED.findall(line) if kind not in KINDS else ():
        for other in re.findall(r'%([\w.-]+)', called):
          walk(other, times * int(count[1]) if count else times, in_loop or count is not None)

  walk(entry, 1, False)
  return found


def with_lengths(text: str) -> str:
  """The text with a length at every loop that counts from 0 to a constant: the compiler of TPUs leaves it out."""
  _, computations = _computations(text)
  lengths = {}
  for name, instructions in computations.items():
    constants = {own: match[1] for own, *_, line in instructions if (match := re.search(r'= s32\[\]\S* constant\((\d+)\)', line))}
    for _, _, opcode, operands, line in instructions:
      if line.lstrip().startswith('ROOT') and opcode in ('compare', 'fusion'):
        called = re.search(r'calls=%?([\w.-]+)', line)
        compared = ''.join(line for *_, line in computations[called[1]]) if opcode == 'fusion' else line
        bound = [constants[operand] for operand in re.findall(r'%([\w.-]+)', operands) if operand in constants]
        if ' compare(' in compared and 'direction=LT' in compared and len(bound) == 1:
          lengths[name] = bound[0]

  def add(match):
    length = lengths.get(re.search(r'condition=%?([\w.-]+)', match[0])[1])
    return match[0] if length is None or 'known_trip_count' in match[0] else f'{match[0]}, "known_trip_count":{{"n":"{length}"}}'

  return re.sub(r'^.* while\(.*$', add, text, flags=re.MULTILINE)


def traffic(found: list[Collective]) -> int:
  """Bytes that one device sends, near enough for many devices: an all-reduce is a scatter and a gather."""
  return sum(one.bytes * one.times * (2 if one.kind == 'all-reduce' else 1) for one in found)


def _computations(text: str):
  """(name of the entry, {name: [(instruction, bytes, opcode, operands, line)]})."""
  entry, name, computations = None, None, collections.defaultdict(list)
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      name = match[2]
      entry = name if match[1] else entry
    elif match := _INSTRUCTION.match(line):
      own, shape, opcode, operands = match.groups()
      size = sum(math.prod(int(n) for n in dims.split(',') if n) * _BITS.get(dtype, 8) for dtype, dims in _ARRAY.findall(shape))
      computations[name].append((own, size // 8, opcode, operands, line))
  if entry is None:
    raise ValueError('this text has no ENTRY computation: it is no compiled HLO program')
  return entry, computations
