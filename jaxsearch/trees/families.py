"""How model families write calls of tools: Hermes (Qwen2.5, Qwen3, ChatML), Qwen3-Coder, Llama 3.

A family reads a turn's calls and writes one; native.py puts them into the turns of a chat template. One more
is an entry of FAMILIES, with the marks by which `family_of` knows its template.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxsearch.trees.grammars import Malformed

Raw = tuple[str, dict] | Malformed  # name and arguments as they were written
_CALL = re.compile(r'<tool_call>(.*?)(</tool_call>|\Z)', re.DOTALL)
_LLAMA = re.compile(  # where a turn begins to call: at the tag, as a whole, or with an object that has a name
  r'<\|python_tag\|>|\A(?=\{)|^[ \t]*(?:```\w*\s*)?(?=(?:\[\s*)?\{[^{}]*"name"\s*:)', re.MULTILINE)
_FUNCTION = re.compile(
  r'(?:<tool_call>\s*)?<function=([^>\n]*)>(.*?)'
  r'(?:</function>(?:\s*</tool_call>)?|((?=(?:<tool_call>\s*)?<function=)|\Z))', re.DOTALL)
_PARAMETER = re.compile(r'<parameter=([^>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)', re.DOTALL)
_WORDS = {'True': True, 'False': False, 'None': None}
UNOPENED = Malformed('shape', 'The call does not begin. Write it again, whole.')
UNCLOSED = Malformed('unclosed', 'The call does not end. Write it again, whole.')


def read_hermes(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[Raw]]:
  """Returns (text beside the calls, calls): JSON objects in `<tool_call>`; a list of them is read too."""
  calls = []
  for match in _CALL.finditer(text):
    calls += _objects(match[1]) if match[2] else [UNCLOSED]
  rest = _CALL.sub('', text)
  return rest, [*calls, *[UNOPENED] * ('</tool_call>' in rest)]


def read_llama3(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[Raw]]:
  """Returns (text before the calls, calls): JSON behind `<|python_tag|>`, in a fence, or bare; `;` joins."""
  if not (begun := _LLAMA.search(text)):
    return text, []
  written = text[begun.end():].replace('<|python_tag|>', ' ').strip().removesuffix('```')
  return text[:begun.start()], _objects(written)


def read_coder(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[Raw]]:
  """Returns (text beside the calls, calls): `<function=…>` of `<parameter=…>`, values by the schema."""
  calls = []
  for match in _FUNCTION.finditer(text):
    known = schemas.get(match[1], {}).get('properties', {})
    values = {name: _value(value, known.get(name, {})) for name, value in _PARAMETER.findall(match[2])}
    calls.append((match[1], values) if match[3] is None else UNCLOSED)
  rest = _FUNCTION.sub('', text)
  return rest, [*calls, *[UNCLOSED] * ('<tool_call>' in rest)]


def _objects(text: str) -> Iterator[Raw]:
  """Yields the calls of JSON objects or lists that follow each other."""
  decoder, at = json.JSONDecoder(), 0
  while at < len(text.rstrip(' \t\r\n;')) or not at:
    at += len(text[at:]) - len(text[at:].lstrip(' \t\r\n;'))
    try:
      value, at = decoder.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
      yield Malformed('json', f'The call is not JSON: {error}.')
      return
    yield from map(_call, value if value and isinstance(value, list) else [value])


def _call(value: Any) -> Raw:
  name, arguments = None, None
  if isinstance(value, dict):
    name, arguments = value.get('name'), value.get('arguments', value.get('parameters'))
  try:
    if isinstance(arguments, str):  # as servers write them
      arguments = json.loads(arguments)
    if isinstance(name, str) and isinstance(arguments, dict):
      as_json([name, arguments]).encode()  # half a surrogate pair is no text
      return name, arguments
  except (ValueError, RecursionError):
    pass
  return Malformed('shape', 'A call is an object with a "name", which is a text, and an object of arguments.')


def _kinds(schema: Any) -> set[str]:
  """Returns the types that a JSON schema allows, as far as it says."""
  schema = schema if isinstance(schema, Mapping) else {}  # it may be true
  own = schema.get('type') or ['string'] * all(isinstance(one, str) for one in schema.get('enum', [0]))
  others = [*schema.get('anyOf', ()), *schema.get('oneOf', ())]
  return set([own] if isinstance(own, str) else own).union(*map(_kinds, others))


def _value(text: str, schema: Any) -> Any:
  """Reads JSON if the schema has no string, or has an array or object too and `text` begins with [ or {."""
  kinds = _kinds(schema)
  if 'string' in kinds and not (text[:1] in ('[', '{') and kinds & {'array', 'object'}):
    return text
  try:
    value = _WORDS[text] if text in _WORDS else json.loads(text)
    as_json(value).encode()  # half a surrogate pair is no text
  except (ValueError, RecursionError):
    return text
  return value


def as_json(value: Any) -> str:
  """Writes JSON with the letters as they are."""
  return json.dumps(value, ensure_ascii=False)


def write_hermes(name: str, arguments: Mapping[str, Any]) -> str:
  """Writes a call as a JSON object in `<tool_call>`."""
  return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'


def write_llama3(name: str, arguments: Mapping[str, Any]) -> str:
  """Writes a call as a bare JSON object."""
  return f'{{"name": "{name}", "parameters": {as_json(arguments)}}}'


def write_coder(name: str, arguments: Mapping[str, Any]) -> str:
  """Writes a call as `<function=…>` of `<parameter=…>`."""
  text = ''.join(f'<parameter={key}>\n{value if isinstance(value, str) else as_json(value)}\n</parameter>\n'
                 for key, value in arguments.items())
  return f'<tool_call>\n<function={name}>\n{text}</function>\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Family:
  """Holds what models of a family have in common."""
  # (text, parameters of tools by name) -> (text beside the calls, calls).
  read: Callable[[str, Mapping[str, Any]], tuple[str, list[Raw]]]
  write: Callable[[str, Mapping[str, Any]], str]  # (name, arguments) -> a call
  ends: tuple[str, ...] = ('<|im_end|>',)  # tokens that end a turn; the first is the template's
  # Names of tags that act, beside the method's.
  tags: tuple[str, ...] = ('tools', 'tool_call', 'tool_response', 'function', 'parameter')
  role: str = 'tool'  # of results in the template
  # What is around a result, where the template has no such role; '' if nothing is.
  result: str = '<tool_response>\n{}\n</tool_response>'
  calling: str = 'end your turn with'


FAMILIES = {
  'hermes': Family(read_hermes, write_hermes),
  'qwen3_coder': Family(read_coder, write_coder),
  'llama3': Family(read_llama3, write_llama3, ('<|eot_id|>', '<|eom_id|>'), role='ipython', result='',
                   calling='write nothing but'),
}


def family_of(template: str | None) -> str | None:
  """Returns the family of a chat template, ChatML's without tools too; None if it is of none here."""
  marks = {'<function=': 'qwen3_coder', '<tool_call>': 'hermes', '<|start_header_id|>': 'llama3',
           '<|im_start|>': 'hermes'}
  return next((family for mark, family in marks.items() if mark in (template or '')), None)
