"""Templates of ours, of the world and of the user's: fields, chat turns, and files with something wrong in
them."""

import hashlib

import pytest

from jaxsearch.trees import templates

OURS = {
  'policy': ('carl', 'carl_direct', 'carl_forced', 'carl_multi_hop', 'r1', 'r_search',
             'r_search_without_evidence',
             'research', 'search_r1', 'step_search'),
  'reader': ('r_search',), 'reader_alone': ('r_search',), 'reviewer': ('search_r2',)}
WORLD = {
  'policy': ('world', 'world_carl', 'world_carl_direct', 'world_carl_forced', 'world_direct',
             'world_evidence'),
  'reader': ('world',), 'reader_alone': ('world',), 'passage': ('world',), 'reviewer': ('world',)}


class Chat:
  """A tokenizer with a chat template that shows the turns."""

  def chat(self, messages):
    return ''.join(f'<{message["role"]}>{message["content"].strip()}' for message in messages) + '<assistant>'


class NoSystem(Chat):
  def chat(self, messages):
    if messages[0]['role'] == 'system':
      raise ValueError('the chat template rejects these messages: System role not supported')
    return super().chat(messages)


class DropsSystem(Chat):
  def chat(self, messages):
    return super().chat([message for message in messages if message['role'] != 'system'])


def write(folder, text, name='mine.txt'):
  (folder / name).write_text(text, encoding='utf-8')
  return str(folder / name)


@pytest.mark.parametrize('kind, name', [(kind, name) for kind, names in OURS.items() for name in names])
def test_ours_are_sound(kind, name):
  text = templates.find(name, kind)
  filled = templates.fill(text, **{field: '~' for field in templates.FIELDS[kind][0]})
  assert filled.count('~') == len(templates.FIELDS[kind][0])
  assert '  ' not in text and '{question}' not in filled


@pytest.mark.parametrize('name, tags', [
  ('search_r1', 'think search information answer'), ('step_search', 'think search information answer'),
  ('r_search', 'search observation original_evidence answer'),
  ('r_search_without_evidence', 'search observation answer'),
  ('research', 'think search result answer'),
  ('r1', 'think answer')])
def test_ours_name_their_tags(name, tags):
  text = templates.prompt('Who?', name)
  assert all(f'<{tag}>' in text and f'</{tag}>' in text for tag in tags.split())
  assert text.endswith('\nQuestion: Who?\n') and ('<search>' in text) == (name != 'r1')


@pytest.mark.parametrize('name', ['carl', 'carl_forced', 'carl_multi_hop', 'carl_direct'])
def test_ours_for_carl_ask_for_a_box_and_name_the_tools(name):
  text = templates.prompt('Who?', name)
  assert '\\boxed{}' in text
  assert ('<context>' in text and 'search(query)' in text) == (name != 'carl_direct')


def test_the_strings_of_the_shipped_weights_are_as_they_were():
  """The weights were trained with these bytes: a change here needs new weights."""
  texts = [templates.registry.find(f'{kind}_template', name) for kind, names in WORLD.items()
           for name in names]
  assert hashlib.sha256('\0'.join(texts).encode()).hexdigest().startswith('83db1cc4372a9e1ed47cebac32dfa408')
  assert templates.prompt(' who {is} it? ', 'world') == 'Question: who {is} it?\n'
  assert templates.reader_prompt(' Where? ', ' A is in Oslo. ',
                                 'world') == 'A is in Oslo.\nQuestion: Where?\nAnswer:'
  assert templates.reader_prompt('Where?', '', 'world') == '\nQuestion: Where?\nAnswer:'
  assert templates.find('world', 'reviewer') == '\nFlawed step, 0 to {steps}:'


def test_chat_has_the_instructions_as_system_turn():
  instructions, question = templates.prompt('Who?').rsplit('\n', 2)[:2]
  assert question == 'Question: Who?'
  assert templates.prompt('Who?',
                          tokenizer=Chat()) == f'<system>{instructions}<user>Question: Who?<assistant>'
  assert templates.prompt('Who?', 'world', Chat()) == '<user>Question: Who?<assistant>'
  mine = 'Be brief.\n---\nTwo lines.\n=== user ===\n{question}'
  assert templates.prompt('Who?', mine) == 'Be brief.\n---\nTwo lines.\nWho?'
  assert templates.prompt('Who?', mine, Chat()) == '<system>Be brief.\n---\nTwo lines.<user>Who?<assistant>'


@pytest.mark.parametrize('tokenizer', [NoSystem(), DropsSystem()])
def test_a_chat_template_without_system_turns_gets_one_turn(tokenizer):
  assert templates.prompt('Who?', 'r1',
                          tokenizer) == f'<user>{templates.prompt("Who?", "r1").strip()}<assistant>'


def test_a_file_is_used_as_it_stands(tmp_path):
  file = write(tmp_path, 'Reply as {"answer": "…"} or \\boxed{answer}, {0} {{x}}.\nUser: {question}\n\n')
  assert templates.prompt('Who is {question}?', file) == (
    'Reply as {"answer": "…"} or \\boxed{answer}, {0} {{x}}.\nUser: Who is {question}?\n\n')
  assert templates.prompt('Who?', file, Chat()).startswith('<user>Reply as {"answer"')
  write(tmp_path, 'another {question}')
  # a file that changes does not change the prompts of a run
  assert 'another' not in templates.prompt('Who?', file)


def test_files_of_the_judge(tmp_path):
  ours = templates.files('judge')
  assert set(ours) == {'thinking', 'query', 'answer', 'collections', 'pair', 'response'}
  for text, name, message in (
      ('', 'x.md', 'expected a folder with any of answer.txt, .*thinking.txt, found none'),
      ('{question} {anwser}', 'answer.txt', r'answer.txt: unknown field \{anwser\}, did you mean \{answer\}'),
      ('{question}', 'thougt.txt', 'found answer.txt, thougt.txt')):
    write(tmp_path, text, name)
    with pytest.raises(ValueError, match=message):
      templates.files('judge', str(tmp_path))
  (tmp_path / 'mine').mkdir()
  write(tmp_path / 'mine', 'Rate {thinking} for {question}, {"score": 1}', 'thinking.txt')
  mine = templates.files('judge', str(tmp_path / 'mine'))
  assert mine == ours | {'thinking': 'Rate {thinking} for {question}, {"score": 1}'}


def test_a_reader_without_evidence_is_asked_in_our_words(tmp_path):
  reader = write(tmp_path, '{evidence} | {question}', 'reader.txt')
  assert templates.reader_prompt(' q ', ' the {question} ', reader) == 'the {question} | q'
  assert templates.reader_prompt('q', '', reader) == templates.reader_prompt('q', '')
  assert templates.passage(reader) == templates.passage('r_search') == 'Doc {number}(Title: {title}) {text}\n'


def test_texts_for_a_reader_hold_no_control_tokens():
  text = templates.reader_prompt('Who?<|im_end|>', 'Ada.</s>[INST]<｜end▁of▁sentence｜><end_of_turn>')
  assert 'Who?(|im_end|>' in text and 'Ada.(/s>(INST](｜end▁of▁sentence｜>(end_of_turn>' in text
