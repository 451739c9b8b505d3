"""A policy behind a chat server: what it is sent, how its replies become spans, and the whole command."""

import functools
import json
import subprocess
import sys

import jax
import pytest

from jaxsearch import cli
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.methods import search_r1
from jaxsearch.methods.prompted import flare, react
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler import chat_policy, requests
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.requests import END, GREEDY, LENGTH, Sampling, Score, Tools
from jaxsearch.tools import find_tool
from jaxsearch.tools.chat import Chat, ChatError
from jaxsearch.trees import native
from jaxsearch.trees.grammar import FENCE, SEARCH_R1
from jaxsearch.trees.tree import Role, Stop, Tree
from jaxsearch.world import files as world
from tests.tools.serving import send, server
from tests.trees.speaking import smollm2


class Search:
  def search(self, queries, topk=3):
    return [[Document('1', 'Tide', f'Tide is by Ada Moor; {query}.')][:topk] for query in queries]


def reply(text, reason='stop', **more):
  return 200, {'choices': [{'message': {'role': 'assistant', 'content': text}, 'finish_reason': reason, **more}]}


def grow_with(*answers, grow=None, sampling=GREEDY, length=2000, questions=('Who wrote Tide?',), concurrency=1, speech=None):
  """(trees, bodies of the requests) of Search-R1, or of `grow`, with these replies."""
  with server(*answers) as (url, seen):
    tokenizer = Tokenizer.load(world.folder())
    engine = chat_policy.ChatServer(Chat(f'{url}/v1', 'm', attempts=1), 'm', tokenizer, length, concurrency)
    grow = grow or functools.partial(search_r1.grow, template='search_r1' if speech else 'world', max_tokens=50)
    agent = Agent(engine, grow, Tools(Search()), GREEDY, speech)
    asked, done = [Question(str(i), text, ('Ada Moor',)) for i, text in enumerate(questions)], []
    trees, _ = rollout(agent, asked, jax.random.key(0), sampling=sampling, on_progress=lambda *counts: done.append(counts[:2]))
    assert done == [(i + 1, len(asked)) for i in range(len(asked))]
    return trees, [body for _, _, body in seen]


SEARCHES = '<think>Look.</think><search>author of Tide'
ANSWERS = '<think>So.</think><answer>Ada Moor'


def test_search_r1_over_chat():
  (tree,), bodies = grow_with(reply(SEARCHES), reply(ANSWERS))
  assert (tree.answer, tree.stop, tree.metrics['searches']) == ('Ada Moor', Stop.ANSWERED, 1)
  assert [span.text for span in tree.nodes(Role.POLICY)] == [f'{SEARCHES}</search>', f'{ANSWERS}</answer>']
  assert [span.stop for span in tree.nodes(Role.POLICY)] == ['</search>', '</answer>']
  prompt, = tree.nodes(Role.PROMPT)
  observation, = tree.nodes(Role.OBSERVATION)
  assert 'by Ada Moor; author of Tide' in observation.text
  assert bodies[0] == {'model': 'm', 'messages': [{'role': 'user', 'content': prompt.text}], 'temperature': 0.0, 'max_tokens': 50,
                       'stop': ['</search>', '</answer>']}
  assert bodies[1]['messages'][1:] == [{'role': 'assistant', 'content': f'{SEARCHES}</search>'},
                                       {'role': 'user', 'content': observation.text}]


@pytest.mark.parametrize(('given', 'stops', 'expected'), [
  (('<search>a', 'stop', None), ('</search>', '</answer>'), ('<search>a</search>', '</search>')),
  (('<search>a</search>b</answer>', 'stop', None), ('</answer>', '</search>'), ('<search>a</search>', '</search>')),  # it went on
  (('<answer>a <search>b', 'stop', None), ('</search>', '</answer>'), ('<answer>a <search>b</search>', '</search>')),
  (('I do not know', 'stop', None), ('</search>',), ('I do not know', END)),
  (('<search>a', 'length', None), ('</search>',), ('<search>a', LENGTH)),
  (('One thought', 'stop', '.'), ('.',), ('One thought.', '.')), (('One thought', 'stop', 128009), ('.',), ('One thought', END)),
  (('all of it', 'stop', None), (), ('all of it', END)),
  (('I look.\nAction 1: Search[Tide', 'stop', None), react.STOPS, ('I look.\nAction 1: Search[Tide]\n', ']\n')),
  (('I [too] look.', 'stop', None), react.STOPS, ('I [too] look.', END)), (('[a\nb', 'stop', None), react.STOPS, ('[a\nb', END)),
  (('So:\n```python\nx = 1', 'stop', None), (FENCE,), (f'So:\n```python\nx = 1{FENCE}', FENCE)),
  (('```\nx\n``` is it', 'stop', None), (FENCE,), ('```\nx\n``` is it', END))])
def test_a_reply_ends_as_a_span_does(given, stops, expected):
  assert chat_policy.ended(*given, stops) == expected


def test_react_searches_though_the_server_does_not_say_what_stopped_it():
  replies = reply('I look it up.\nAction 1: Search[Tide'), reply('I know.\nAction 2: Finish[Ada Moor')
  (tree,), _ = grow_with(*replies, grow=react.grow)
  assert (tree.answer, tree.metrics['searches'], tree.metrics['malformed']) == ('Ada Moor', 1, 0)


def test_a_span_that_ended_itself_has_the_end_token_and_the_server_never_sees_it():
  (tree,), bodies = grow_with(reply('Hm.'), reply(ANSWERS))
  first, _ = tree.nodes(Role.POLICY)
  assert first.stop == END and first.tokens[-1] in tree.tokenizer.eos_ids
  assert bodies[1]['messages'][1] == {'role': 'assistant', 'content': 'Hm.'}


def test_a_servers_own_calls_and_what_was_wrong_with_one():
  tokenizer = Tokenizer.load(world.folder())
  speech = native.open_grammar(tokenizer, SEARCH_R1, {'search': find_tool('search')}, grammar=native.SERVER)
  tree = Tree(tokenizer, Question('1', 'Who?', ('Ada',)), grammar=speech)
  asked = [{'id': name, 'function': {'name': 'search', 'arguments': arguments}}
           for name, arguments in (('a', '{"query": "Tide"}'), ('b', '{"query": '))]
  said = tokenizer.encode(speech.said({'content': 'Hm.', 'tool_calls': asked})) + list(tokenizer.eos_ids[:1])
  node = tree.root.append('Who?', Role.PROMPT).append(said, Role.POLICY)
  good, broken = speech.read(node).calls
  assert good.arguments == {'query': 'Tide'} and broken.kind == 'json'
  observation = node.append(speech.observe(node, [(good, 'Ada'), (broken, 'no JSON')]), Role.OBSERVATION)
  call = {'id': 'call_3_0', 'type': 'function', 'function': {'name': 'search', 'arguments': '{"query": "Tide"}'}}
  assert chat_policy.messages(observation) == [
    {'role': 'user', 'content': 'Who?'}, {'role': 'assistant', 'content': 'Hm.', 'tool_calls': [call]},
    {'role': 'tool', 'tool_call_id': 'call_3_0', 'content': 'Ada'}, {'role': 'user', 'content': 'no JSON'}]
  answer = observation.append(tokenizer.encode('It is Ada.') + list(tokenizer.eos_ids[:1]), Role.POLICY)
  assert speech.read(answer).answer == 'It is Ada.'
  parts = [{'type': 'thinking', 'thinking': []}, {'type': 'text', 'text': 'H'}, {'type': 'text', 'text': 'm.'}]
  quoted = {'function': {'name': 'search', 'arguments': '{"query": "what is </tool_call>?"}'}}
  asks = tree.root.append(tokenizer.encode(speech.said({'tool_calls': [quoted]})), Role.POLICY)
  assert [call.arguments for call in speech.read(asks).calls] == [{'query': 'what is </tool_call>?'}]
  for none in '', None:  # of a tool without arguments
    text = speech.said({'tool_calls': [{'function': {'name': 'search', 'arguments': none}}]})
    called = tree.root.append(tokenizer.encode(text), Role.POLICY)
    assert [one.kind for one in speech.read(called).calls] == ['arguments']
  for call in {'function': {'name': None, 'arguments': '{}'}}, {'type': 'custom'}, 7:
    text = speech.said({'content': parts, 'tool_calls': [call]})
    odd = tree.root.append(tokenizer.encode(text) + list(tokenizer.eos_ids[:1]), Role.POLICY)
    assert speech.read(odd).thinking == 'Hm.' and [one.kind for one in speech.read(odd).calls] == ['shape']


@pytest.mark.parametrize('grammar', ['tags', native.SERVER])
def test_a_turn_cut_off_in_its_thought_has_no_text_and_the_run_goes_on(grammar):
  tokenizer = Tokenizer.load(world.folder())
  speech = native.open_grammar(tokenizer, SEARCH_R1, {'search': find_tool('search')}, grammar=grammar)
  (tree,), bodies = grow_with(reply(None, 'length'), reply(None), reply('<answer>Ada Moor</answer>'), speech=speech)
  assert tree.answer == 'Ada Moor' and len(bodies) == 3 and tree.metrics['malformed'] == 2
  if grammar == native.SERVER:
    assert tree.metrics['malformed_cut'] == tree.metrics['malformed_empty'] == 1


def test_room_is_counted_by_our_tokenizer():
  (tree,), bodies = grow_with(reply('x ' * 40, 'length'), length=60)
  used = sum(len(span.tokens) for span in tree.nodes(Role.PROMPT))
  assert bodies[0]['max_tokens'] == 60 - used < 50 and tree.stop == Stop.CONTEXT_FULL and len(bodies) == 1
  (tree,), bodies = grow_with(reply('x'), length=used)
  assert tree.stop == Stop.CONTEXT_FULL and bodies == []


def test_samples_have_seeds_of_their_own():
  _, bodies = grow_with(reply(ANSWERS), sampling=Sampling(0.7), questions=('A?', 'B?'))
  assert len({body['seed'] for body in bodies}) == 2
  _, again = grow_with(reply(ANSWERS), sampling=Sampling(0.7), questions=('A?', 'B?'))
  assert again == bodies


def test_a_server_that_fails_ends_the_run_and_log_probabilities_are_refused():
  with pytest.raises(ChatError, match='chat at http'):
    grow_with((500, {}), questions=('A?', 'B?'))

  def scoring(question, tree):
    yield Score(tree.root.append('Q', Role.PROMPT), ('a',))

  with pytest.raises(ValueError, match='needs log-probabilities, which a chat server does not give'):
    grow_with(reply(''), grow=scoring)
  with pytest.raises(ValueError, match='needs log-probabilities, which a chat server does not give'):
    grow_with(reply('Ada Moor wrote it.'), grow=flare.grow)


def test_bench_with_a_chat_server(tmp_path, capsys):
  """The stand-in looks the answer up in what it is shown."""
  question = next(q for q in world.questions('test') if q.metadata['hops'] == 1)

  def chat(handler):
    shown = json.loads(handler.body)['messages']
    text = f'<answer>{question.golden_answers[0]}' if len(shown) > 1 else f'<search>{question.question}'
    send(handler, json.dumps(reply(text)[1]).encode())

  (tmp_path / 'nq.jsonl').write_text(json.dumps(
    {'id': 'a', 'question': question.question, 'golden_answers': list(question.golden_answers)}))
  with server(chat) as (url, seen):
    assert cli.main(['bench', '--config=search_r1_grpo', f'--url={url}/v1', '--model=m', f'--folder={tmp_path}',
                     f'--out={tmp_path}/r.json']) == 0
  result = json.loads((tmp_path / 'r.json').read_text())
  assert result['benchmarks']['nq']['em'] == 1.0 and result['benchmarks']['nq']['searches'] == 1.0
  assert result['manifest']['policy'] == {'url': f'{url}/v1', 'model': 'm'} and len(seen) == 2
  assert 'no corpus in' in capsys.readouterr().err  # that of the world was searched


LLAMA_CPP = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.port = sys.argv[1], 2048, 2, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope='module')
def llama_cpp():
  """The address of llama.cpp's HTTP server with SmolLM2-135M-Instruct."""
  pytest.importorskip('xllamacpp')
  with subprocess.Popen([sys.executable, '-c', LLAMA_CPP, smollm2()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL, text=True) as process:
    yield next(line.strip() for line in process.stdout if line.startswith('http'))
    process.kill()


@pytest.mark.needs_weights
def test_a_real_server_stops_where_it_is_told_and_the_stop_string_is_put_back(llama_cpp):
  tokenizer = Tokenizer.load(world.folder())

  def grow(question, tree: Tree):
    node = tree.root
    for colour in ('red', 'green', 'white'):
      node = node.append(f'Say {colour}.', Role.PROMPT).append(f'<answer>{colour}</answer>', Role.CONTEXT)
    node = node.append('Say blue.', Role.PROMPT)
    tagged = yield requests.Generate(node, ('</search>', '</answer>'), max_tokens=24)
    cut = yield requests.Generate(node, ('nowhere',), max_tokens=2)
    ends = yield requests.Generate(tree.root.append('Hello!', Role.PROMPT), ('nowhere',), max_tokens=200)
    tree.answer = [(node.text, node.stop) for node in (tagged, cut, ends)]

  engine = chat_policy.ChatServer(Chat(f'{llama_cpp}/v1', 'smollm2'), 'smollm2', tokenizer, 2000, 2)
  questions = [Question(str(i), '?', ('a',)) for i in range(3)]
  trees, _ = rollout(Agent(engine, grow, Tools(Search()), GREEDY), questions, jax.random.key(0))
  for tree in trees:
    tagged, cut, ends = tree.answer
    assert tagged == ('<answer>blue</answer>', '</answer>') and cut[1] == LENGTH and ends[1] == END and len(ends[0]) > 5
