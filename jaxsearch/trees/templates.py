r"""Prompt templates: ours in prompts/ (the papers' tags, our words), the world's, and files of the user's.

A template is a name or the path of a UTF-8 text file; a run saves the text of that file. `{field}` is filled
in; all other braces stay as they are (`\boxed{}`, JSON). A line `=== user ===` splits the prompt of a policy:
with chat=True the text above it is the system turn and the text below it the user turn; otherwise that line
is dropped. A file without it is one user turn. Files are used as they stand, the last newline included, so
that a published checkpoint gets exactly the prompt that it was trained with.

`SETTINGS` says which fields of config.grow are templates; that of the reviewer comes behind the transcript,
so that its cache is kept. The fields `FOLDERS` name folders with any files of prompts/judge, prompts/writer
or prompts/prompted, each in place of ours; see `FIELDS`. What the agent wrote cannot imitate the tags in our
files, but it can imitate tags of your own.
"""

import difflib
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxsearch import registry
from jaxsearch.trees import grammar

_USER = re.compile(r'^=== user ===[ \t]*\n', re.MULTILINE)
_PROMPTS = pathlib.Path(__file__).parent / 'prompts'
FIELDS = {  # kind -> (fields that a template must have, further fields that it may have)
  **dict.fromkeys(('policy', 'native'), (('question',), ())),  # in tags, and with calls of the model's own
  'reader': (('question', 'evidence'), ()),
  'reader_alone': (('question',), ()),
  'reviewer': (('steps',), ()),
  'thinking': (('question', 'thinking'), ('context',)),
  'query': (('question', 'query'), ('context', 'thinking', 'documents')),
  'answer': (('question', 'answer'), ('golds', 'context', 'thinking')),
  'collections': (('question', 'collections'), ('golds', 'number')),
  'response': (('question', 'answer', 'golds'), ()),
  'pair': (('question', 'trajectories'), ('rubrics', 'form')),
  **dict.fromkeys(('useful', 'noisy', 'false'), (('query',), ('topk', 'question', 'answer'))),
  # The calls of methods/prompted.
  **dict.fromkeys(('direct', 'cot', 'complexity', 'react', 'tools', 'tools_forced'), (('question',), ())),
  **dict.fromkeys(('documents', 'reasoned', 'candidates'), (('question', 'documents'), ())),
  'summary': (('question', 'documents', 'candidate'), ()),
  'validity': (('question', 'candidate', 'summary'), ()),
  'ranking': (('question', 'first', 'second'), ()),
  'search_o1': (('question',), ('limit',)),
  'extract': (('query', 'documents'), ('question', 'reasoning')),
}
FOLDERS = {'judge': 'judge.templates', 'writer': 'search.writer_templates', 'prompted': 'grow.prompts'}
SETTINGS = {'template': 'policy', 'evidence_template': 'reader', 'review': 'reviewer'}  # of config.grow


def prompt(question: str, template: str = 'search_r1', tokenizer: Any = None) -> str:
  """Writes the prompt of a question, in the chat template of a `models.tokenizer.Tokenizer` if one is given.

  Raises ValueError, see `find`.
  """
  return fill(turns(find(template, 'policy'), tokenizer), question=question.strip())


def turns(text: str, tokenizer: Any = None, **variables: Any) -> str:
  """Returns a template as the policy sees it: without the line between the turns, or in a chat template.

  A chat template that refuses or drops the system turn gets the instructions in the user turn. It sees
  `variables`, such as `tools`.
  """
  parts = _USER.split(text, maxsplit=1)
  if tokenizer is None:
    return ''.join(parts)
  *system, user = map(str.strip, parts)
  try:
    text = tokenizer.chat([*({'role': 'system', 'content': text} for text in system),
                           {'role': 'user', 'content': user}], **variables)
  except ValueError:
    if not system:
      raise
    text = ''  # it refuses a system turn; one that refuses the user's too raises below
  if all(part in text for part in (*system, user)):
    return text
  return tokenizer.chat([{'role': 'user', 'content': '\n'.join([*system, user])}], **variables)


def of_calls(template: str) -> str:
  """Returns a template of the policy for models that call tools in their own way: a file, or a name.

  A name without such a template stands for the one of the papers' tags if that asks for no action in tags;
  else it raises ValueError.
  """
  ours = _names('native')
  if template in ours or template not in _names('policy'):
    return find(template, 'native')
  text = find(template, 'policy')
  if '</search>' in text or '```' in text:
    raise ValueError(f'template={template!r} asks for tags; for calls of tools there are {", ".join(ours)}')
  return text


def reader_prompt(question: str, evidence: str, template: str = 'r_search') -> str:
  """Writes the prompt of R-Search's frozen reader, its texts neutralised.

  Without evidence the reader is asked alone, in our words if `template` is a file.
  """
  kind = 'reader' if evidence.strip() else 'reader_alone'
  if kind == 'reader_alone' and template not in registry.ENTRIES['reader_template']:
    template = 'r_search'
  safe = lambda text: grammar.neutralise(text.strip(), grammar.CONTROL, grammar.R_SEARCH)
  return fill(find(template, kind), question=safe(question), evidence=safe(evidence))


def passage(template: str) -> str:
  """Returns how the reader is shown a passage of vanilla RAG: a template of {number}, {title} and {text}."""
  if template in registry.ENTRIES['passage_template']:
    return registry.find('passage_template', template)
  return 'Doc {number}(Title: {title}) {text}\n'


def fill(text: str, /, **fields: object) -> str:
  """Replaces every `{name}` of `fields` in a text, once: all other braces stay."""
  return re.sub(r'\{(' + '|'.join(fields) + r')\}', lambda match: str(fields[match[1]]), text)


@functools.lru_cache
def find(template: str, kind: str) -> str:
  """Returns the text of a template, which is a name, a file or such a text; a file is read once.

  Raises ValueError for what is neither, and for one that is not UTF-8, misses a field or misspells one.
  """
  if template in registry.ENTRIES.get(f'{kind}_template', {}):
    return registry.find(f'{kind}_template', template)
  known = _names(kind)
  if template in known:
    return _read(_PROMPTS / kind / f'{template}.txt', kind)
  if not is_file(template, kind):
    return _checked(template, kind, 'the template of the checkpoint')
  file = pathlib.Path(template).expanduser()
  if not file.is_file():
    raise ValueError(f'unknown {kind} template {template!r}: no such file, and none of {", ".join(known)}')
  return _read(file, kind)


def is_file(template: str, kind: str) -> bool:
  """Tells whether a template is a file path, not a shipped name or a text with its fields in it."""
  return template not in _names(kind) and not all(f'{{{name}}}' in template for name in FIELDS[kind][0])


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
  """Returns the text of each template that is a file, of settings such as `config.grow`."""
  return {field: find(settings[field], kind) for field, kind in SETTINGS.items()
          if field in settings and is_file(settings[field], kind)}


def _names(kind: str) -> list[str]:
  ours = (file.stem for file in (_PROMPTS / kind).iterdir())
  return sorted([*ours, *registry.ENTRIES.get(f'{kind}_template', {})])


def files(group: str, folder: str = '') -> Mapping[str, str]:
  """Reads the templates of a group of `FOLDERS` by kind: the user's in `folder`, else ours.

  'world' for 'prompted' has the formats of the shipped policies. Raises ValueError, see `find`.
  """
  if folder in registry.ENTRIES.get(group, {}):
    return files(group) | registry.find(group, folder)
  ours = {file.stem: file for file in (_PROMPTS / group).iterdir()}
  theirs = {file.stem: file for file in pathlib.Path(folder).expanduser().glob('*.txt')} if folder else {}
  if (folder and not theirs) or theirs.keys() - ours.keys():
    known, names = (', '.join(sorted(f'{name}.txt' for name in each)) for each in (ours, theirs))
    raise ValueError(f'{FOLDERS[group]}={folder!r}: expected a folder with any of {known}, '
                     f'found {names or "none"}')
  return {kind: _read(file, kind) for kind, file in (ours | theirs).items()}


def check(settings: Mapping[str, object]) -> None:
  """Raises ValueError for a template in settings such as `config.grow` that is not there or lacks a field."""
  for field, kind in SETTINGS.items():
    if field in settings:
      find(settings[field], kind)
  files('prompted', settings.get('prompts', ''))


@functools.lru_cache
def _read(file: pathlib.Path, kind: str) -> str:
  try:
    text = file.read_text(encoding='utf-8-sig')
  except UnicodeDecodeError as error:
    raise ValueError(f'{file}: not UTF-8 text ({error})') from error
  return _checked(text, kind, file)


def _checked(text: str, kind: str, where: object) -> str:
  """Returns a template; ValueError, which names `where` it is from, if it misses a field or misspells one."""
  needed, more = FIELDS[kind]
  written = set(re.findall(r'\{(\w+)\}', text))
  for name in sorted(written.difference(needed, more)):  # others may be meant, as in \boxed{answer}
    if close := difflib.get_close_matches(name, needed + more, 1, 0.8):
      raise ValueError(f'{where}: unknown field {{{name}}}, did you mean {{{close[0]}}}?')
  if missing := [name for name in needed if name not in written]:
    raise ValueError(f'{where}: a {kind} template needs {", ".join(f"{{{name}}}" for name in missing)}')
  return text
