"""Reads from the text of a compiled program (HLO of CPU, GPU or TPU) how it loops and what it sends between
devices."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute',
         'collective-broadcast')
_BITS = dict(pred=8, bf16=16, c64=64, c128=128)
_BITS |= {f'{kind}{bits}': bits for kind in 'suf' for bits in (4, 8, 16, 32, 64)}
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)')
_ARRAY = re.compile(r'\b([a-z]+\d*)\w*\[([\d,]*)\]')
_ALONE = re.compile(r'replica_groups=(\{\{\d+\}|\[\d+,1\]<)')
_CALLED = re.compile(r'\b(?:body|condition|calls|to_apply|called_computations|branch_computations|'
                     r'true_computation|false_computation)=(\{[^}]*\}|%[\w.-]+)')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction of a program that runs on every device."""
  kind: str      # one of KINDS
  bytes: int     # of its operands or results on one device, the larger: the whole array that is gathered
  times: int     # product of the lengths of the loops around it, of those whose length is known
  in_turn: bool  # inside a loop whose length is data, such as that over micro-batches; `times` is per turn


class Instruction(NamedTuple):
  name: str
  bytes: int
  opcode: str
  operands: list[str]
  line: str


def collectives(text: str) -> list[Collective]:
  """Lists the collectives that a compiled program runs, in the order of its text within each computation.

  Those among groups of one device, which only some compilers remove, are left out.
  """
  entry, found = computations(text)
  listed = []

  def walk(computation, times, in_turn):
    sizes = {instruction.name: instruction.bytes for instruction in found[computation]}
    for _, size, opcode, operands, line in found[computation]:
      kind = opcode.removesuffix('-start')
      if kind in KINDS:
        given = sum(sizes.get(operand, 0) for operand in operands)
        # What an asynchronous start returns holds its operands beside its results.
        result = size - given if opcode != kind and size > given else size
        if not _ALONE.search(line):
          listed.append(Collective(kind, max(given, result), times, in_turn))
        continue
      length = loop_length(line, found) if opcode == 'while' else 1
      for name in re.findall(r'%([\w.-]+)', ' '.join(_CALLED.findall(line))):
        walk(name, times * (length or 1), in_turn or length is None)

  walk(entry, 1, False)
  return listed


def traffic(listed: Iterable[Collective]) -> int:
  """Returns the bytes that one device sends, near enough; an all-reduce is a scatter and a gather."""
  return sum(each.bytes * each.times * (2 if each.kind == 'all-reduce' else 1) for each in listed)


def loop_length(line: str, computations: dict) -> int | None:
  """Returns how often a while loop runs, or None where that is data.

  The compiler of TPUs leaves it out: there the condition compares a counter with a constant.
  """
  if count := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
    return int(count[1])
  condition = computations[re.search(r'condition=%?([\w.-]+)', line)[1]]
  constants = {name: int(match[1]) for name, *_, line in condition
               if (match := re.search(r'= s32\[\]\S* constant\((\d+)\)', line))}
  root = next(each for each in condition if each.line.lstrip().startswith('ROOT'))
  called = re.search(r'calls=%?([\w.-]+)', root.line)
  compared = ''.join(each.line for each in computations[called[1]]) if called else root.line
  bounds = [constants[operand] for operand in root.operands if operand in constants]
  return bounds[0] if ' compare(' in compared and 'direction=LT' in compared and len(bounds) == 1 else None


def computations(text: str) -> tuple[str, dict[str, list[Instruction]]]:
  """Returns the name of the entry, and the instructions of every computation."""
  entry, name, computations = '', '', collections.defaultdict(list)
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      name = match[2]
      entry = name if match[1] else entry
    elif match := _INSTRUCTION.match(line):
      result, shape, opcode, operands = match.groups()
      bits = sum(math.prod(int(n) for n in dims.split(',') if n) * _BITS.get(dtype, 8)
                 for dtype, dims in _ARRAY.findall(shape))
      operands = re.findall(r'%?([\w.-]+)', re.sub(r'/\*.*?\*/', '', operands))
      computations[name].append(Instruction(result, bits // 8, opcode, operands, line))
  assert entry, 'this text is no compiled HLO program'
  return entry, computations
