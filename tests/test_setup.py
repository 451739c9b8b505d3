"""Search back ends and samplers as configs describe them."""

import dataclasses
import json
import shutil
import types

import jax
import pytest

from configs import base, r_search, zerosearch
from jaxsearch import cli, setup
from jaxsearch.data.questions import Question
from jaxsearch.models.architecture import DecoderConfig
from jaxsearch.sampler.engine import defaults
from jaxsearch.sampler.requests import RunPython, Tools
from jaxsearch.setup import load_tokenizer, open_backend, open_engine
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.python_sandbox import PythonSandbox
from jaxsearch.tools.search_http import HttpSearch
from jaxsearch.tools.search_web import WebSearch
from jaxsearch.tools.simulated import SimulatedSearch, WriterError
from jaxsearch.trees.tree import Tree
from jaxsearch.world import files as world
from tests.tools.serving import server


def settings(**fields):
  config = base.get_config()
  config.search.update(fields)
  return config


@pytest.mark.slow
@pytest.mark.needs_weights
def test_a_shipped_policy_answers_by_its_name(tmp_path, capsys):
  passages = {
    'Quiet Harbour': 'Quiet Harbour is a 1964 Italian drama film directed by Mara Lindqvist. '
                     'It was shown in Venice.',
    'Mara Lindqvist': 'Mara Lindqvist (born 3 May 1921) was a Swedish film director. '
                      'She was born in Uppsala.',
    'Herring': 'Herring are small fish that move in large schools.'}
  (tmp_path / 'corpus.jsonl').write_text(''.join(
    json.dumps({'id': title, 'contents': f'"{title}"\n{text}'}) + '\n' for title, text in passages.items()))
  arguments = ['--checkpoint=smollm2-wiki', f'--corpus={tmp_path}/corpus.jsonl']
  assert cli.main(['ask', 'Where was the director of film Quiet Harbour born?', *arguments]) == 0
  shown = capsys.readouterr().out
  assert 'found  Mara Lindqvist' in shown and shown.split()[-1] == 'Uppsala', shown


def test_the_simulator_of_the_config_follows_its_curriculum():
  config = zerosearch.get_config()
  backend = open_backend(config, 'world')
  assert isinstance(backend, SimulatedSearch) and backend.noise == 0.0
  assert backend.search(['Wuxi'], 2) == open_backend(settings(), 'world').search(['Wuxi'], 2)
  noisy = [open_backend(settings(backend='simulated', noise_eval=1.0, noise_false=false), 'world')
           for false in (False, True)]
  assert noisy[0].search(['capital of Peru']) != noisy[1].search(['capital of Peru'])  # of no help, or false
  backend.set_step(config.steps, config.steps)
  assert backend.noise == pytest.approx(0.5)


def test_back_ends_without_a_corpus_read_none(monkeypatch, tmp_path):
  monkeypatch.setenv('SERPER_API_KEY', 'k')
  http = open_backend(settings(backend='http', url='http://127.0.0.1:9'), 'nowhere')
  assert isinstance(http, HttpSearch) and http.url == 'http://127.0.0.1:9/retrieve'
  reply = {'choices': [{'message': {'content': 'Document 1\nTitle: A\nText: b'}}]}
  with server((200, reply)) as (url, seen):
    chat = open_backend(settings(backend='simulated', writer='chat', url=url, writer_model='m', noise_end=0.9,
                                 cache=str(tmp_path / 'replies')), 'nowhere')
    assert [chat.search(['x'], 1)[0][0].text for _ in range(2)] == ['b', 'b'] and len(seen) == 1
  chat.set_step(1, 1)
  assert chat.noise == pytest.approx(0.9) and seen[0][2]['model'] == 'm'
  web = open_backend(settings(backend='web', cache=str(tmp_path / 'searches')), 'nowhere')
  assert isinstance(web, WebSearch) and web.url == 'https://google.serper.dev/search'
  assert (tmp_path / 'searches').exists()
  assert isinstance(open_backend(settings(), 'world'), BM25)
  for timeout, deadline in ((1.0, 60.0), (90.0, 180.0)):
    tools = setup.open_tools(settings(backend='http', url='http://127.0.0.1:9', timeout=timeout))
    assert tools.deadline == deadline
    tools.python.close()
  slow = settings()
  slow.python.seconds = 120
  tools = setup.open_tools(slow, 'world')
  assert tools.deadline == 240
  tools.python.close()


def test_a_question_is_searched_for_in_the_corpus_of_its_source(tmp_path):
  for name in ('hotpotqa', '2wiki'):
    (tmp_path / name).write_text(json.dumps([{'context': [[f'River of {name}', ['It flows.']]]}]))
  tools = Tools(search=open_backend(settings(by_source=True),
                                    f'hotpotqa:{tmp_path}/hotpotqa+2wiki:{tmp_path}/2wiki'),
                python=PythonSandbox())

  def asked(source):
    return Tree(None, Question('q', '?', ('x',), {'source': source})).root

  assert [tools.find(asked(name), 'river', 3)[0].title for name in ('hotpotqa', '2wiki')] == [
    'River of hotpotqa', 'River of 2wiki']
  assert 'River of 2wiki' in RunPython(asked('2wiki'), 'search("river")').run(tools)
  with pytest.raises(ValueError, match='nothing to search for questions of gsm8k'):
    RunPython(asked('gsm8k'), 'search("river")').run(dataclasses.replace(tools, searches=[]))
  tools.python.close()
  http = open_backend(settings(backend='http', url='http://127.0.0.1:9/{source}', by_source=True))
  assert http.of('2wiki').url == 'http://127.0.0.1:9/2wiki' and http.of('2wiki') is http.of('2wiki')
  with pytest.raises(ValueError, match='by_source'):
    http.search(['river'])
  with pytest.raises(ValueError, match='nothing to search for questions of no source'):
    http.of(None)
  for source in '../other', '/etc', '':
    with pytest.raises(ValueError, match='fits into no address or path'):
      http.of(source)
  by_host = open_backend(settings(backend='http', url='http://{source}:9/retrieve', by_source=True))
  assert by_host.of('2wiki').url == 'http://2wiki:9/retrieve'
  with pytest.raises(ValueError, match="a source 'evil.example' fits into no address"):
    by_host.of('evil.example')


def test_a_model_of_ours_writes_on_a_sampler_of_its_own(tmp_path):
  """The world's policy is no writer: what it says to the prompt is refused, and what it was asked is the
  prompt."""
  folder = tmp_path / 'model'
  shutil.copytree(world.folder(), folder, ignore=shutil.ignore_patterns('*.gz', 'reader'))
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  config['chat_template'] = '{{ messages[0].content }}<think>'
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  (tmp_path / 'useful.txt').write_text('Question: {query}\n')
  backend = open_backend(settings(backend='simulated', writer='model', writer_model=str(folder),
                                  writer_templates=str(tmp_path)),
                         'nowhere')

  def written(*call):
    with pytest.raises(WriterError, match='the simulator wrote no documents') as error:
      backend.for_call(None, *call).search(['Where is Wuxi?'], 2)
    return str(error.value)

  assert written(0, 1) == written(0, 1) != written(0, 2)  # sampled, each call with a seed of its own


def test_a_helper_reads_no_further_than_its_model_has_positions():
  reader = r_search.get_config().reader
  reader.length = 4096
  assert setup._frozen_engine(reader, 'float32', None).length == 2048


def test_no_search_waits_for_the_programs_of_its_writer(monkeypatch):
  compiled = []
  engine = types.SimpleNamespace(tokenizer=types.SimpleNamespace(chat_template=''),
                                 compile_all=lambda: compiled.append(1))
  monkeypatch.setattr(setup, '_frozen_engine', lambda *_: engine)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  setup._generator('float32', None, 'm', 0.8)
  assert compiled


def test_a_model_that_does_not_fit_its_tokenizer_is_named():
  config, sizes = base.get_config(), DecoderConfig(100, 8, 8, 1, 1, 1, 8)
  with pytest.raises(ValueError, match='the tokenizer has 4096 tokens, but the model 100 embeddings'):
    open_engine(config, sizes, load_tokenizer(config))


def test_the_sampler_is_what_the_config_says_and_otherwise_what_suits_the_platform():
  tokenizer = load_tokenizer(base.get_config())
  sizes = DecoderConfig(tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
                        num_kv_heads=1,
                        head_dim=8)

  def opened(**changes):
    config = base.get_config()
    config.sampler.update(dict(slots=64, length=64) | changes)
    engine = open_engine(config, sizes, tokenizer)
    return engine.segment_steps, engine.enough, engine._counts, engine.episode_deadline

  own = dict(segment_steps=5, enough=3, prefill_lengths=(16,), prefill_tokens=64, deterministic=False,
             episode_deadline=9.0)
  assert opened(**own) == (5, 3, {16: [1, 4]}, 9.0)
  assert opened() == (32, 4, {32: [1, 4, 16], 128: [1, 4]}, float('inf'))
  assert defaults(64, 'gpu') == dict(segment_steps=8, enough=4, prefill_lengths=(64, 512),
                                     prefill_tokens=4096)


def test_prompts_that_leave_no_room_are_counted_or_refused():
  config, said = base.get_config().unlock(), []
  tokenizer = setup.load_tokenizer(config)
  questions = [Question(str(words), 'Who ' * words + '?', ()) for words in (1, 2, 3, *[1] * 200, 40)]
  lengths = [len(tokenizer.encode(f'Question: {question.question}\n')) for question in questions]
  least, most = min(lengths), max(lengths)

  def check(length):
    said.clear()
    config.sampler.length = length
    setup.check_room(config, tokenizer, questions, said.append)

  check(most + config.grow.max_tokens)
  assert not said
  check(most)
  short = sum(length + 64 > most for length in lengths)
  assert said == [f'sampler.length={most} leaves {what} questions (up to {most} tokens)' for what in (
    'no room to write after the prompts of 1 of 204',
    f'less than grow.max_tokens=64 after the prompts of {short} of 204')]
  check(least + 16)
  with pytest.raises(ValueError,
                     match=f'any prompt: they have {least} to {most} tokens, and a short span has 16'):
    check(least + 15)


def test_tools_need_a_grammar_that_calls_them():
  config = base.get_config()
  config.tools, config.mcp.servers, config.grow.grammar = ('search',), ('mine',), 'auto'
  with pytest.raises(ValueError, match=r"tools=\('search', 'mine'\) are called, which the chat template of world-tiny"):
    setup.open_grammar(config, setup.load_tokenizer(config))
  config.tools = ()
  with pytest.raises(ValueError, match=r"tools=\('mine',\) are called"):
    setup.open_grammar(config, setup.load_tokenizer(config))
