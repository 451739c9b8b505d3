"""Tool calls as models were trained on them, in the turns of their chat templates; families.py reads them.

The prompt goes through the tokenizer's chat template; what follows is never rendered. Spans stay as they
were sampled. Between them are frames, cut out of a conversation of markers that the template rendered once.
The policy samples the end token of a turn; where a span was cut off, the frame supplies it. So a rollout has
the ids of the rendered conversation, except where a template rewrites what the model wrote: Qwen3 drops
earlier thoughts, and all write a call's JSON anew. Thoughts are read as thoughts, never as calls.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.families import FAMILIES, Family, as_json, family_of, read_hermes
from jaxsearch.trees.grammars import Called, Malformed, Reading, Tagged, of_tags

CUT = Malformed('cut', 'This turn was cut off. Keep it short: call a tool, or answer.')
EMPTY = Malformed('empty', 'This turn has no call and no answer. Call a tool, or answer.')


class Frames(NamedTuple):
  """Text around what is written between two turns of the policy."""
  end: str             # of a turn, which the policy samples
  results: tuple[str, str, str]  # before results, between two of them, after them
  user: tuple[str, str]  # before and after a message of the user's
  escapes: bool        # whether a result is written as a JSON string

  @property
  def thinks(self) -> bool:
    """Tells whether a turn begins in a thought that the frame opened."""
    return self.results[2].rstrip().endswith('<think>')


@functools.lru_cache
def frames_of(tokenizer: Tokenizer, family: Family) -> Frames:
  """Cuts the frames out of a conversation that the chat template renders."""
  said, marks = 'I said this.', ('the "first" result', 'the "second" result')
  escaped = [as_json(mark)[1:-1] for mark in marks]

  def after(*messages: tuple[str, str]) -> str:
    turns = [('user', 'A question?'), ('assistant', said), *messages]
    text = tokenizer.chat([{'role': role, 'content': content} for role, content in turns])
    return text.rpartition(said)[2]

  try:
    text = after(*((family.role, mark) for mark in marks))
  except ValueError:  # the template has no such role
    text = ''
  if family.result.partition('\n')[0] not in text or not text:
    text = after(('user', '\n'.join(map(family.result.format, marks))))
  escapes = all(mark in text for mark in escaped)
  first, second = escaped if escapes else marks
  before, rest = text.split(first, 1)
  between, last = rest.split(second, 1)
  opening, closing = after(('user', marks[0])).split(marks[0], 1)
  end = next((end for end in family.ends if before.startswith(end)), '')
  return Frames(end, (before.removeprefix(end), between, last), (opening.removeprefix(end), closing), escapes)


@dataclasses.dataclass(frozen=True, eq=False)
class Native(Tagged):
  """The calls of a model family, in its chat template."""
  family: Family = FAMILIES['hermes']
  kinds = 'json', 'shape', 'tool', 'arguments', 'unclosed', 'cut', 'empty'
  lead = ''
  opening = property(lambda self: self.frames.user[1])
  opened = property(lambda self: '<think>' * self.frames.thinks)

  @functools.cached_property
  def frames(self) -> Frames:
    """Returns what stands between turns."""
    return frames_of(self.tokenizer, self.family)

  @functools.cached_property
  def _ends(self) -> frozenset[int]:
    """Returns the ids of the tokens that end a turn."""
    own = map(self.tokenizer.backend.token_to_id, self.family.ends)
    return frozenset([*self.tokenizer.eos_ids, *(token for token in own if token is not None)])

  @functools.cached_property
  def stops(self) -> tuple[str, ...]:
    """Returns the ends of a turn that are no end tokens of the tokenizer, as in base models."""
    missing = self._ends - set(self.tokenizer.eos_ids)
    return tuple(map(self.tokenizer.backend.id_to_token, sorted(missing)))

  @functools.cached_property
  def offered(self) -> list[dict[str, Any]]:
    """Returns the tools, as chat templates and servers take them, inert."""
    return [{'type': 'function', 'function': json.loads(self.safe(as_json(tool.schema)))}
            for tool in self.tools.values()]

  def closed(self, node: Any) -> bool:
    """Tells whether a span ended its turn."""
    return node is None or (bool(node.tokens) and node.tokens[-1] in self._ends)

  def prompt(self, question: str, template: str, chat: bool, tools: bool = True) -> str:
    """Writes the prompt of a question, neutralised, and the tools: in words where the template drops them."""
    if (template, tools) not in self._prompts:
      offered = self.offered if tools else []
      self._prompts[template, tools] = self._rendered(templates.of_calls(template), offered)
    return templates.fill(self._prompts[template, tools], question=self.safe(question.strip()))

  @functools.cached_property
  def _prompts(self) -> dict[tuple[str, bool], str]:
    return {}  # rendered once: a template is slow

  def _rendered(self, text: str, offered: Sequence[Mapping[str, Any]]) -> str:
    plain = templates.turns(text, self.tokenizer)
    if not offered:
      return plain
    shown = templates.turns(text, self.tokenizer, tools=offered)
    return templates.turns(self._told(offered) + text, self.tokenizer) if shown == plain else shown

  def _told(self, offered: Sequence[Mapping[str, Any]]) -> str:
    shape = self.family.write('NAME', {'ARGUMENT': 'VALUE'})
    listed = '\n'.join(map(as_json, offered))
    return (f'You can call these tools, which are described in JSON, one a line:\n<tools>\n{listed}\n'
            f'</tools>\nTo call one, {self.family.calling}\n{shape}\n\n')

  def aside(self, node: Any, text: str) -> str:
    """Writes an instruction of ours that follows a span, as a turn of the user's."""
    return self._end(node) + text.strip().join(self.frames.user)

  def read(self, node: Any) -> Reading:
    """Reads a turn; without a call it is an answer, which may stand in tags."""
    thought, content = self._parts(node)
    rest, written = self.family.read(content, {name: tool.schema['parameters']
                                               for name, tool in self.tools.items()})
    calls = [each if isinstance(each, Malformed) else self._checked(*each) for each in written]
    thinking = ' '.join(filter(None, (thought, rest.partition(f'<{self.tags.answer}>')[0].strip())))
    for call in calls:
      if isinstance(call, Called) and self.tools[call.name].serve is None:
        return Reading(thinking, (), str(call.arguments['answer']).strip())
    answer = None if calls else grammar.answer(content, self.tags)
    if not calls and answer is None:
      answer = content or None if self.closed(node) else None
      calls = () if answer else (EMPTY if self.closed(node) else CUT,)
    return Reading(thinking, calls, answer)

  def _parts(self, node: Any) -> tuple[str, str]:
    """Returns (what a turn thinks, what it says)."""
    text = self.tokenizer.decode(node.tokens[:-1] if self.closed(node) else node.tokens)
    thought, ended, content = text.rpartition('</think>')
    if not ended and ('<think>' in text or self.frames.thinks):
      thought, content = content, ''
    return thought.replace('<think>', '').strip(), content.strip()

  def _checked(self, name: str, arguments: dict) -> Called | Malformed:
    if name not in self.tools:
      usage = ', '.join(tool.usage for tool in self.tools.values())
      return Malformed('tool', f'There is no tool {self.safe(repr(name)):.100}. The tools are {usage}.')
    try:
      self.tools[name].check(arguments)
    except ValueError as error:
      return Malformed('arguments', self.safe(str(error)))
    if self.tools[name].serve is None and not str(arguments['answer']).strip():
      return EMPTY
    return Called(name, arguments)

  def observe(self, node: Any, results: Sequence[tuple[Called | Malformed, str]]) -> str:
    """Writes the results of the calls of a turn, in order, as the turn that follows it."""
    before, between, after = self.frames.results
    texts = [as_json(text.strip())[1:-1] if self.frames.escapes else text.strip() for _, text in results]
    return self._end(node) + before + between.join(texts) + after

  def content(self, node: Any) -> str:
    return self._parts(node)[1]

  def resume(self, prompt: Any, notes: str) -> str:
    return self.aside(prompt, f'<context>{self.safe(notes)}</context>')

  def recall(self, node: Any, context: str) -> str:
    return self.observe(node, [(EMPTY, f'<context>{self.safe(context)}</context>')])

  def retell(self, text: str) -> str:
    found = {element.name: element.content for element in grammar.elements(text)}
    if 'answer' in found:
      said = f'<answer> {found["answer"]} </answer>'
    else:
      said = self.family.write('search', {'query': found['search']})
    thought = found.get('think', '') if 'answer' in found or self.family.result else ''  # Llama calls alone
    if self.frames.thinks:  # the template has opened the thought
      thought = f'{thought}\n</think>'.lstrip()
    return f'{thought}\n{said}'.lstrip() + self.frames.end

  def is_turn(self, node: Any, action: str) -> bool:
    """Tells whether a turn has well-formed calls alone, or an 'answer' in tags or by a call."""
    _, calls, answer = self.read(node)
    if action == 'answer':
      return answer is not None and answer != self._parts(node)[1]
    return bool(calls) and all(isinstance(call, Called) for call in calls)

  def _end(self, node: Any) -> str:
    return '' if self.closed(node) else self.frames.end


def _as_hermes(call: Any) -> str:
  """Returns a call of a server's as Hermes writes it, its arguments as the policy wrote them."""
  match call:
    case {'function': {'name': str(name), 'arguments': str() | None as arguments}}:
      arguments = (arguments or '{}').replace('</', r'<\/')  # the same JSON; no tag in it ends the call
      return f'<tool_call>\n{{"name": {as_json(name)}, "arguments": {arguments}}}\n</tool_call>'
  return f'<tool_call>\n{as_json(call)}\n</tool_call>'  # malformed


def text_of(message: Mapping[str, Any]) -> str:
  """Returns the text of a server's message: of all parts where it has a list of them, '' for null."""
  content = message.get('content') or ''
  parts = content if isinstance(content, list) else [{'text': content}]
  return ''.join(str(part.get('text') or '') for part in parts if isinstance(part, Mapping))


class ServerCalls(Native):
  """The calls of a chat server, which has the chat template; on the tree they stand as Hermes writes them."""
  frames = Frames('', ('<tool_response>\n', '\n</tool_response>\n<tool_response>\n', '\n</tool_response>'),
                  ('', ''), False)
  stops = ()

  def prompt(self, question: str, template: str, chat: bool, tools: bool = True) -> str:
    """Writes the prompt of a question, neutralised, as a message."""
    return templates.fill(templates.turns(templates.of_calls(template)), question=self.safe(question.strip()))

  def said(self, message: Mapping[str, Any]) -> str:
    """Returns a message of the server's as the policy says it on the tree."""
    return '\n'.join([*filter(None, [text_of(message)]), *map(_as_hermes, message.get('tool_calls') or ())])

  def messages(self, node: Any) -> list[dict[str, Any]]:
    """Returns a turn of the policy, or the results that follow one, as messages; [] for any other span."""
    role, above = (each and each.role.value for each in (node, node.parent))
    is_policy = role == 'policy' or (role, above) == ('context', 'observation')  # a copy, see folding.py
    of = node if is_policy else node.parent
    rest, written = read_hermes(of.text_without_end, {}) if of else ('', [])
    place = len(of.path()) if of else 0
    calls = {number: {'id': f'call_{place}_{number}', 'type': 'function', 'function': {
      'name': call[0], 'arguments': as_json(call[1])}} for number, call in enumerate(written)
      if not isinstance(call, Malformed)}
    if is_policy:
      turn = {'role': 'assistant', 'content': rest.strip()}
      return [turn | ({'tool_calls': list(calls.values())} if calls else {})]
    results = dict(enumerate(re.findall('<tool_response>\n(.*?)\n</tool_response>', node.text, re.DOTALL)))
    if node.role.value == 'prompt' or not results:
      return []
    told = [{'role': 'tool', 'tool_call_id': call['id'], 'content': results.pop(number, '')}
            for number, call in calls.items()]
    return told + [{'role': 'user', 'content': text} for text in results.values()]


NAMES = ('tags', 'auto', *FAMILIES)
SERVER = 'server'  # the grammar of a chat server that is asked for any of NAMES but 'tags'
SETTINGS = ('grammar', 'malformed')  # of config.grow: those that are not for a method's `grow`


def open_grammar(tokenizer: Any, tags: grammar.Tags, tools: Mapping[str, Any], *, grammar: str = 'tags',
                 malformed: str = 'reply') -> Tagged:
  """Opens one of the grammars NAMES for a method with these tags; 'auto' asks the chat template.

  `malformed`: such an action gets a 'reply', or is the 'end' of the episode. Raises ValueError for a
  tokenizer without a chat template.
  """
  template = getattr(tokenizer, 'chat_template', None)
  name = {SERVER: 'hermes', 'auto': family_of(template) or 'tags'}.get(grammar, grammar)
  if name == 'tags':
    return of_tags(tokenizer, tags, strict=malformed == 'end')
  if template is None and grammar != SERVER:
    raise ValueError(f'grow.grammar={grammar!r}: the tokenizer has no chat template')
  family, opened = FAMILIES[name], ServerCalls if grammar == SERVER else Native
  tags = tags._replace(others=(*family.tags, *tags.others))
  return opened(tokenizer, tags, tools, malformed == 'end', family)
