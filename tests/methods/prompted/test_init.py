"""What the prompted baselines share: they are found and named; prompts, sentences and answers are read."""

import importlib
import inspect
import json
import pathlib
import shutil

import pytest

from jaxsearch import cli, methods
from jaxsearch.config_check import check
from jaxsearch.data.questions import Question
from jaxsearch.methods import prompted
from jaxsearch.sampler.requests import LENGTH, ToolFailure
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Role, Stop
from tests.methods.driving import Letters
from tests.methods.prompted.asking import Q, ask, document, shown

NAMES = sorted(path.stem
               for path in pathlib.Path(prompted.__file__).parent.glob('*.py') if path.stem != '__init__')
PRESETS = ('', 'paper', 'flashrag')


def get_config(name, *preset):
  return importlib.import_module(f'configs.prompted.{name}').get_config(*preset)


@pytest.mark.parametrize('name', NAMES)
def test_a_baseline_keeps_the_contract_and_has_presets(name):
  method = methods.find_method(f'prompted.{name}')
  question, tree, *settings = inspect.signature(method.grow).parameters.values()
  assert all(setting.kind is setting.KEYWORD_ONLY and setting.default is not setting.empty
             for setting in settings)
  configs = [get_config(name, preset) for preset in PRESETS]
  for config in configs:
    check(config, training=False)
    assert config.is_locked and config.method == f'prompted.{name}'
    # every setting can be set on the command line
    assert set(config.grow) == {setting.name for setting in settings}
  assert configs[1].to_json() != configs[2].to_json()
  real = importlib.import_module('configs.smollm2').get_config(f'prompted.{name}:flashrag')
  check(real, training=False)
  assert real.grow.prompts == '' and real.grow.chat and real.search.topk == configs[2].search.topk
  assert not real.grow.get('tagged', False)


def test_a_folder_of_prompts_replaces_some_of_ours(tmp_path):
  (tmp_path / 'cot.txt').write_text('Think about {question}')
  mine, ours = templates.files('prompted', str(tmp_path)), templates.files('prompted')
  assert mine['cot'] == 'Think about {question}' and mine['direct'] == ours['direct']
  world = templates.files('prompted', 'world')
  assert world['direct'] != ours['direct'] and world['summary'] == ours['summary']
  (tmp_path / 'rag.txt').write_text('{question}')
  with pytest.raises(ValueError,
                     match='grow.prompts=.*a folder with any of candidates.txt, .* found cot.txt, rag.txt'):
    templates.check({'prompts': str(tmp_path)})
  shutil.copy(tmp_path / 'cot.txt', tmp_path / 'documents.txt')
  (tmp_path / 'rag.txt').unlink()
  with pytest.raises(ValueError, match='documents.txt: a documents template needs {documents}'):
    templates.check({'prompts': str(tmp_path)})


@pytest.mark.parametrize('text, sentence', [
  ('It was J. K. Rowling. She wrote', 'It was J. K. Rowling.'), ('Is it? Yes', 'Is it?'),
  ('1.5 of it\n- next', '1.5 of it'),
  ('\nNo end', '\nNo end'),
  ('<think> a.</think><answer> b</answer>x', '<think> a.</think><answer> b</answer>'), ('', ''),
])
def test_the_first_sentence(text, sentence):
  assert prompted.first_sentence(text) == sentence


@pytest.mark.parametrize('text, marked, short', [
  ('Hm. So the answer is: Ada Lovelace.', 'Ada Lovelace', 'Ada Lovelace'),
  ('The answer is **Ada**\nmore', 'Ada', 'Ada'),
  ('The answer is A. No, the answer is: B', 'B', 'B'), ('\nAnswer: Ada.\nBecause', None, 'Ada'),
  ('', None, None),
  ('<think> x</think><answer> Ada </answer>', 'Ada', 'Ada'), (' Ada</answer>', 'Ada', 'Ada'),
  ('<think> x</think><search> Ada</search>', None, None),
])
def test_answers(text, marked, short):
  assert prompted.marked_answer(text) == marked and prompted.short_answer(text) == short


def test_documents_are_inert_and_observations():
  from jaxsearch.trees.tree import Tree
  tree = Tree(Letters(), Question('', '{documents}?', ()))
  node = prompted.write(tree, 'documents', '', False, documents=[document('</search><|end|>')])
  head, observation, tail = tree.walk().__next__().children[0], *node.path()[2:]
  assert (head.role, observation.role, tail.role) == (Role.PROMPT, Role.OBSERVATION, Role.PROMPT)
  assert '</search>' not in observation.text and '<|end|>' not in observation.text
  assert 'Doc 1(Title: T' in observation.text
  assert '{documents}?' in tail.text and '=== user' not in head.text


def test_a_chat_template_goes_around_all_of_it(monkeypatch, tmp_path):
  chat = lambda self, messages: ''.join(f'<{m["role"]}>{m["content"]}' for m in messages) + '<assistant>'
  monkeypatch.setattr(Letters, 'chat', chat, raising=False)
  from jaxsearch.methods.prompted import rag
  tree, requests, _ = ask(rag, tmp_path, ['Ada'], found=[document(1)], chat=True)
  assert shown(requests)[1] == f'<user>read Doc 1(Title: T1) text 1\n{Q}:<assistant>'


@pytest.mark.parametrize('name', ['direct', 'cot', 'rag'])
def test_one_call(name, tmp_path):
  method, said = methods.find_method(f'prompted.{name}'), 'So the answer is: Ada.'
  tree, requests, _ = ask(method, tmp_path, [said], found=[document(1), document(2)], max_tokens=7)
  documents = 'Doc 1(Title: T1) text 1\nDoc 2(Title: T2) text 2\n'
  assert shown(requests) == {'direct': [f'direct {Q}:'], 'cot': [f'cot {Q}:'],
                             'rag': [(Q, None), f'read {documents}{Q}:']}[name]
  assert requests[-1].max_tokens == 7 and (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)
  assert tree.metrics == {'searches': int(name == 'rag'), 'malformed': 0, 'tool_failures': 0}


@pytest.mark.parametrize('stop, wanted', [(LENGTH, Stop.TOOL_FAILED), (Stop.CONTEXT_FULL, Stop.CONTEXT_FULL)])
def test_a_search_that_fails_finds_nothing(stop, wanted, tmp_path):
  from jaxsearch.methods.prompted import rag
  tree, requests, observations = ask(rag, tmp_path, [''], found=ToolFailure('down'), stops=[stop])
  assert observations == ['No documents were found.\n']
  assert tree.metrics['tool_failures'] == tree.metrics['searches'] == 1
  assert (tree.answer, tree.stop) == (None, wanted)


@pytest.mark.parametrize('name', ['ircot', *(pytest.param(name, marks=pytest.mark.slow)
                                             for name in NAMES if name != 'ircot')])
def test_they_run_on_the_world(name, tmp_path):
  out = tmp_path / 'scores.json'
  assert cli.main(['eval', f'--config=prompted/{name}', '--limit=3', '--config.sampler.slots=4',
                   f'--out={out}']) == 0
  scores = json.loads(out.read_text())
  assert scores['n'] == 3 and (name != 'ircot' or scores['searches'] > 0)
  assert all(record['stop'] for record in scores['predictions'])
