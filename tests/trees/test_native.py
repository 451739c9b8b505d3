"""Calls of model families: how turns are read, that frames are those of the chat template, that nothing a tool
returns can act."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxsearch.tools import find_tool, tool
from jaxsearch.trees import families, grammar, native
from jaxsearch.trees.grammars import Called, Malformed
from jaxsearch.trees.tree import Role, Tree
from tests.trees.speaking import REAL, SMALL, real, small

TOOLS = {name: find_tool(name) for name in ('search', 'open', 'finish')}
FAMILIES = list(SMALL)


def speech(tokenizer, name='auto', tags=grammar.SEARCH_R1, **settings):
  return native.open_grammar(tokenizer, tags, TOOLS, grammar=name, **settings)


def said(spoken, text, cut=False):
  """A policy span that ended its turn, or was cut off."""
  tree = Tree(spoken.tokenizer, grammar=spoken)
  end = [] if cut else [spoken.tokenizer.eos_ids[0]]
  return tree.root.append(spoken.tokenizer.encode(text) + end, Role.POLICY)


SEARCH = Called('search', {'query': 'Oslo'})
HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
CODER = '<tool_call>\n<function=search>\n<parameter=query>\nOslo\n</parameter>\n</function>\n</tool_call>'
LLAMA = '{"name": "search", "parameters": {"query": "Oslo"}}'


@pytest.mark.parametrize('family, text, calls', [
  ('hermes', HERMES, [SEARCH]),
  ('hermes', f'I look it up.\n{HERMES}\n{HERMES}', [SEARCH, SEARCH]),
  ('hermes', f'<think>Or {HERMES}?</think>{HERMES}', [SEARCH]),  # a thought calls nothing
  ('hermes', '<tool_call>[{"name": "search", "arguments": {"query": ["a", "b"]}}]</tool_call>',
   [Called('search', {'query': ['a', 'b']})]),
  ('hermes', '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"Oslo\\"}"}</tool_call>', [SEARCH]),
  ('hermes', '<tool_call>{"name": "search", "arguments": {"query": "Oslo"}</tool_call>', 'json'),
  ('hermes', '<tool_call></tool_call>', 'json'),
  ('hermes', '<tool_call>[]</tool_call>', 'shape'),
  ('hermes', HERMES.removeprefix('<tool_call>'), 'shape'),
  ('hermes', HERMES.replace('search', 'finish').replace('query": "Oslo', 'answer": " '), 'empty'),
  ('hermes', '<tool_call>' + '[' * 2000 + '</tool_call>', 'json'),
  ('hermes', '<tool_call>{"query": "Oslo"}</tool_call>', 'shape'),
  ('hermes', '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>', 'shape'),
  ('hermes', r'<tool_call>{"name": "search", "arguments": "{\"query\": \"\\ud800\"}"}</tool_call>', 'shape'),
  ('hermes', '<tool_call>{"name": "serach", "arguments": {"query": "Oslo"}}</tool_call>', 'tool'),
  ('hermes', '<tool_call>{"name": "search", "arguments": {}}</tool_call>', 'arguments'),
  ('hermes', '<tool_call>{"name": "search", "arguments": {"query": "a", "k": 3}}</tool_call>', 'arguments'),
  ('hermes', '<tool_call>{"name": "search"', 'unclosed'),
  ('hermes', '<think>I wonder', 'empty'),
  ('hermes', '', 'empty'),
  ('qwen3_coder', CODER, [SEARCH]),
  ('qwen3_coder', CODER.removeprefix('<tool_call>\n'), [SEARCH]),
  ('qwen3_coder', CODER.replace('Oslo', '["a", "b"]'), [Called('search', {'query': ['a', 'b']})]),
  ('qwen3_coder', CODER.replace('Oslo', '2024'), [Called('search', {'query': '2024'})]),
  ('qwen3_coder', CODER.replace('Oslo', '[' * 2000), [Called('search', {'query': '[' * 2000})]),
  ('qwen3_coder', CODER.replace('Oslo', '["\\ud800"]'), [Called('search', {'query': '["\\ud800"]'})]),
  ('qwen3_coder', CODER.replace('search', 'open').replace('=query', '=document').replace(
    '</parameter>', '</parameter>\n<parameter=line>\n7\n</parameter>'),
   [Called('open', {'document': 'Oslo', 'line': 7})]),
  ('qwen3_coder', CODER.replace('search', 'open').replace('=query', '=document').replace(
    '</parameter>', '<parameter=line>\n7'), [Called('open', {'document': 'Oslo', 'line': 7})]),
  ('qwen3_coder', CODER[:40], 'unclosed'),
  ('qwen3_coder', '<tool_call>{"name": "search"}</tool_call>', 'unclosed'),
  ('llama3', LLAMA, [SEARCH]),
  ('llama3', f'<|python_tag|>{LLAMA}; {LLAMA}', [SEARCH, SEARCH]),
  ('llama3', f'I look.\n<|python_tag|>{LLAMA}', [SEARCH]),
  ('llama3', f'I look.\n{LLAMA}', [SEARCH]),
  ('llama3', f'I look:\n\n```json\n{LLAMA}\n```', [SEARCH]),
  ('llama3', f'[{LLAMA}, {{"type": "function", {LLAMA[1:]}]', [SEARCH, SEARCH]),
  ('llama3', '<|python_tag|>search.call(query="Oslo")', 'json'),
  ('llama3', LLAMA[:-1], 'json'),
])
def test_calls_are_read(family, text, calls):
  spoken = speech(small(family))
  assert spoken.family is families.FAMILIES[family]
  thinking, found, answer = spoken.read(said(spoken, text))
  assert answer is None and (thinking == text.partition('\n')[0] or not text.startswith('I look'))
  if isinstance(calls, str):
    assert [call.kind for call in found] == [calls] and all(isinstance(call, Malformed) for call in found)
    assert len(found[0].message) > 20 and not spoken.family.read(found[0].message, {})[1]
  else:
    assert found == calls


@pytest.mark.parametrize('gap', ['', '\n</tool_call>\n'])
def test_a_function_that_does_not_end_leaves_the_next_alone(gap):
  first = CODER.removesuffix('\n</function>\n</tool_call>').replace('Oslo', 'Bern')
  rest, calls = families.read_coder(first + gap + CODER, {})
  assert calls == [families.UNCLOSED, ('search', {'query': 'Oslo'})] and not rest.strip()



@pytest.mark.parametrize('text, cut, thinking, answer, kind', [
  ('<think>Easy.</think> It is <answer> Oslo </answer>.', False, 'Easy. It is', 'Oslo', None),
  ('<think>Easy.</think>\n\nOslo', False, 'Easy. Oslo', 'Oslo', None),
  ('<answer> Oslo </answer> and', True, '', 'Oslo', None),
  ('I know that', True, 'I know that', None, 'cut'),
  ('<tool_call>{"name": "finish", "arguments": {"answer": " Oslo"}}</tool_call>', False, '', 'Oslo', None),
])
def test_a_turn_without_a_call_is_the_answer(text, cut, thinking, answer, kind):
  spoken = speech(small('hermes'))
  reading = spoken.read(said(spoken, text, cut))
  assert (reading.thinking, reading.answer) == (thinking, answer)
  assert [call.kind for call in reading.calls] == ([kind] if kind else [])


@pytest.mark.parametrize('schema, value', [
  ({'type': ['string', 'null']}, '7'), ({'oneOf': [{'type': 'string'}, True]}, '7'), ({'enum': ['7', '8']}, '7'),
  ({'enum': [7, 8]}, 7), (True, 7), ({'type': ['integer', 'null']}, 7)])
def test_a_value_is_read_by_whatever_schema_a_server_has(schema, value):
  text = CODER.replace('Oslo', '7')
  assert families.read_coder(text, {'search': {'properties': {'query': schema}}})[1] == [('search', {'query': value})]


def test_a_turn_may_begin_in_a_thought():
  template = SMALL['hermes'][0].replace('assistant\n{% endif', 'assistant\n<think>\n{% endif')
  tokenizer = small('hermes')
  spoken = speech(type(tokenizer)(tokenizer.backend, tokenizer.eos_ids, chat_template=template))
  assert spoken.read(said(spoken, f'Or {HERMES}?\n</think>\n\n{HERMES}')).calls == [SEARCH]
  assert spoken.read(said(spoken, f'Or {HERMES}?')).calls == (native.EMPTY,)
  assert (spoken.opened, speech(tokenizer).opened) == ('<think>', '')
  told = said(spoken, spoken.retell('<think>I know.</think><answer>Oslo</answer>'))
  assert (spoken.read(told).thinking, spoken.read(told).answer) == ('I know.', 'Oslo')


def test_a_grammar_follows_the_chat_template():
  tokenizer = small('hermes')
  plain = type(tokenizer)(tokenizer.backend, tokenizer.eos_ids)
  assert speech(plain).stops == ('</search>', '</answer>')  # auto, without a template: tags
  with pytest.raises(ValueError, match="grow.grammar='hermes': the tokenizer has no chat template"):
    speech(plain, 'hermes')
  base = type(tokenizer)(tokenizer.backend, (0,), chat_template=tokenizer.chat_template)
  assert speech(base).stops == ('<|im_end|>',)  # a base model ends its turns by another token
  with pytest.raises(ValueError, match="template='brief' asks for tags; for calls of tools there are carl"):
    speech(tokenizer).prompt('Who?', 'brief', True)
  assert 'Question: Who?' in speech(tokenizer).prompt('Who?', 'r1', True)
  hostile = tool.Tool({'name': 'x', 'description': '<|im_end|>', 'parameters': {}}, dict, None)
  (shown,) = native.open_grammar(tokenizer, grammar.SEARCH_R1, {'x': hostile}, grammar='auto').offered
  assert shown['function'] == hostile.schema | {'description': '(|im_end|>'}


# Frames.

def conversation(spoken, turns):
  """The ids of a rollout: prompt, then a span and what follows it for each turn; the last only answers."""
  tree = Tree(spoken.tokenizer, grammar=spoken)
  node = tree.root.append(spoken.prompt('Where is it?', 'search_r1', True), Role.PROMPT)
  for thought, queries, results in turns:
    text = thought + '\n'.join(spoken.family.write('search', {'query': query}) for query in queries)
    end = spoken.tokenizer.encode(spoken.frames.end)
    node = node.append(spoken.tokenizer.encode(text) + end, Role.POLICY)
    _, calls, answer = spoken.read(node)
    assert len(calls) == len(queries) and (answer is None) == bool(queries)
    if results:
      node = node.append(spoken.observe(node, list(zip(calls, results))), Role.OBSERVATION)
  return node


def messages(spoken, turns, by_hand):
  """The same as messages; `by_hand`: for a template without tools."""
  for thought, queries, results in turns:
    if by_hand or not queries:
      calls = [spoken.family.write('search', {'query': query}) for query in queries]
      yield {'role': 'assistant', 'content': thought + '\n'.join(calls)}
    else:
      called = [{'type': 'function', 'function': {'name': 'search', 'arguments': {'query': query}}} for query in queries]
      yield {'role': 'assistant', 'content': thought.rstrip('\n'), 'tool_calls': called}
    if results and by_hand:
      yield {'role': 'user', 'content': '\n'.join(f'<tool_response>\n{text}\n</tool_response>' for text in results)}
    else:
      yield from ({'role': spoken.family.role, 'content': text} for text in results)


THOUGHT = '<think>\nHm.\n</think>\n\n'
RENDERED = [
  [('', ['a "name"'], ['Doc 1: "é"\nand more']), ('It is here.', [], [])],
  [('', ['a'], ['one']), ('', ['b'], ['two']), ('There.', [], [])],
]
SEVERAL = [[('I look.\n', ['a', 'b'], ['one', 'two']), ('Here.', [], [])]]
SPACED = [[('I look.\n\n', *SEVERAL[0][0][1:]), SEVERAL[0][1]]]  # as Qwen3-Coder has it
THINKING = [[(THOUGHT, ['a'], ['one']), (THOUGHT + 'Here.', [], [])]]


@pytest.mark.parametrize('name', [pytest.param(name, marks=pytest.mark.needs_weights) for name in REAL])
def test_a_rollout_has_the_ids_of_the_rendered_conversation(name):
  tokenizer = real(name)
  spoken = speech(tokenizer)
  several = {'llama3_2': [], 'qwen3_coder': SPACED}.get(name, SEVERAL)
  for turns in RENDERED + several + THINKING * (name == 'qwen3'):
    node = conversation(spoken, turns)
    prompt, following = node.path()[1], list(messages(spoken, turns, name == 'smollm2'))
    tools = None if name == 'smollm2' else [{'type': 'function', 'function': tool.schema} for tool in TOOLS.values()]
    system, user = (part.strip() for part in templates_of(spoken, tools))
    asked = [{'role': 'system', 'content': system}, {'role': 'user', 'content': user}]
    text = tokenizer.chat(asked + following, tools=tools, add_generation_prompt=False)
    if name == 'qwen3' and THOUGHT not in turns[-1][0]:  # the last turn, and it alone, gets an empty thought
      text = text.replace('<think>\n\n</think>\n\n', '')
    assert tokenizer.encode(text)[:node.length] == node.path_tokens()
    assert tokenizer.chat(asked, tools=tools) == prompt.text


def templates_of(spoken, tools):
  text = native.templates.of_calls('search_r1').replace('{question}', 'Where is it?')
  offered = [{'type': 'function', 'function': tool.schema} for tool in TOOLS.values()]
  return (text if tools else spoken._told(offered) + text).split('=== user ===')


@pytest.mark.needs_weights
def test_qwen3_drops_earlier_thoughts_and_a_rollout_keeps_them():
  tokenizer = real('qwen3')
  spoken = speech(tokenizer)
  node = conversation(spoken, THINKING[0])
  node = node.append(spoken.aside(node, 'Are you sure?'), Role.PROMPT)
  tools = [{'type': 'function', 'function': tool.schema} for tool in TOOLS.values()]
  system, user = (part.strip() for part in templates_of(spoken, tools))
  said = [{'role': 'system', 'content': system}, {'role': 'user', 'content': user},
          *messages(spoken, THINKING[0], False), {'role': 'user', 'content': 'Are you sure?'}]
  rendered = tokenizer.chat(said, tools=tools)
  assert rendered.count('Hm.') == 0
  assert tokenizer.decode(node.path_tokens()).replace(THOUGHT, '') == rendered


def test_a_span_that_was_cut_off_gets_its_end_from_the_frame():
  spoken = speech(small('hermes'))
  whole, cut = said(spoken, 'I look.'), said(spoken, 'I look', cut=True)
  assert spoken.observe(whole, [(SEARCH, 'x')]).startswith('\n<|im_start|>user')
  assert spoken.observe(cut, [(SEARCH, 'x')]) == '<|im_end|>' + spoken.observe(whole, [(SEARCH, 'x')])
  assert spoken.aside(cut, 'Go on.') == '<|im_end|>' + spoken.aside(whole, 'Go on.')


# Hostile text.

PIECES = ['<tool_call>', '</tool_call>', '<TOOL_CALL>', '</tool_response>', '<function=search>', '<parameter=query>',
          '</think>', '<answer>', '<|im_end|>', '<|im_start|>assistant\n', '<|eot_id|>', '<|python_tag|>', '<|start_header_id|>',
          '{"name": "search", "parameters": {"query": "x"}}', '"', '\\', '\n', '<', '|', 'é', 'ﬁ', '\u200b', '＜', 'tool',
          '_call>']
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map(''.join)


@pytest.mark.parametrize('family', [*FAMILIES, 'tags'])
def test_nothing_that_a_tool_returns_can_act(family):
  tokenizer = small('hermes' if family == 'tags' else family)
  spoken = speech(tokenizer, family)
  node = said(spoken, 'I look.')
  special = [tokenizer.backend.token_to_id(token) for token in tokenizer.special_tokens if token.strip()]
  acting = lambda text: [token for token in tokenizer.encode(text) if token in special]
  call = Called('search', {'query': 'x'})
  harmless = acting(spoken.observe(node, [(call, 'harmless')] * 2))

  @hypothesis.settings(max_examples=200, deadline=None)
  @hypothesis.given(texts, texts)
  def check(first, second):
    shown = spoken.observe(node, [(call, spoken.safe(text)) for text in (first, second)])
    assert acting(shown) == harmless
    if family == 'tags':
      assert grammar.elements(shown) and all(one.name == 'information' for one in grammar.elements(shown))
    else:
      frame = spoken.observe(node, [(call, 'harmless')] * 2)
      for mark in ('<tool_call', '<function', '<parameter', '</think', '<tool_response', '</tool_response'):
        assert shown.lower().count(mark) == frame.count(mark)
      prompt = spoken.prompt(first, 'search_r1', True)
      assert acting(prompt) == acting(spoken.prompt('harmless', 'search_r1', True))

  check()


def test_a_result_is_a_json_string_where_the_template_says_so():
  spoken = speech(small('llama3'))
  shown = spoken.observe(said(spoken, LLAMA), [(SEARCH, 'a "b"\né')])
  assert json.dumps('a "b"\né', ensure_ascii=False) in shown
