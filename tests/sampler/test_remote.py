"""Rollouts on servers: what is sent and how replies become spans, weights, faults; llama.cpp for real."""

import contextlib
import functools
import gc
import importlib.util
import json
import time

import jax
import numpy as np
import pytest

from configs import search_r1_grpo, slate
from jaxsearch import cli, models, setup
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import agents
from jaxsearch.methods import folding, search_r1
from jaxsearch.models import hub
from jaxsearch.models.decoder import Decoder
from jaxsearch.sampler import protocols, remote, requests
from jaxsearch.sampler.driver import Agent, rollout
from jaxsearch.sampler.requests import END, LENGTH, Generate, Sampling, Score, Tools
from jaxsearch.training import row_files
from jaxsearch.trees.tree import Role, Stop
from tests.sampler import rollout_servers
from tests.sampler.rollout_servers import serving
from tests.tools.serving import server

SEARCHES, ANSWERS = '<think>Look.</think><search>author of Tide</search>', '<think>So.</think><answer>Ada Moor</answer>'
STAND_INS = {'vllm': rollout_servers.Vllm, 'sglang': rollout_servers.Sglang}
both = pytest.mark.parametrize('kind', STAND_INS)


class Search:
  def search(self, queries, topk=3):
    return [[Document('1', 'Tide', f'Tide is by Ada Moor; {query}.')][:topk] for query in queries]


def writes(text, seed=0):
  """Searches once, then answers, and would go on."""
  return (ANSWERS if 'Ada Moor' in text else SEARCHES) + ' and so on'


@pytest.fixture(scope='module')
def policy():
  return agents.load_policy(search_r1_grpo.get_config())


@contextlib.contextmanager
def opened(kind, policy, folder, count=1, timeout=20.0, script=writes, length=600, **settings):
  """(engine with weights, its stand-ins)."""
  servers = [STAND_INS[kind](policy.tokenizer, script) for _ in range(count)]
  with contextlib.ExitStack() as stack:
    urls = [stack.enter_context(serving(server)) for server in servers]
    engine = remote.RemoteEngine(kind, policy.config, policy.tokenizer, urls=','.join(urls), folder=folder / 'weights',
                                 slots=4, length=length, timeout=timeout, **settings)
    engine.load(policy.params)
    yield engine, servers


def grown(engine, grow=None, count=6, sampling=requests.GREEDY):
  grow = grow or functools.partial(search_r1.grow, template='world', max_tokens=50)
  questions = [Question(str(i // 2), 'Who wrote Tide?', ('Ada Moor',)) for i in range(count)]
  return rollout(Agent(engine, grow, Tools(Search()), sampling), questions, jax.random.key(0))


@both
def test_a_tree_of_ids(kind, policy, tmp_path):
  with opened(kind, policy, tmp_path) as (engine, (server,)):
    trees, metrics = grown(engine)
  for tree in trees:
    assert (tree.answer, tree.stop, tree.metrics['searches']) == ('Ada Moor', Stop.ANSWERED, 1)
    spans = tree.nodes(Role.POLICY)
    assert [(span.text, span.stop) for span in spans] == [(SEARCHES, '</search>'), (ANSWERS, '</answer>')]
    for span in spans:
      path = span.parent.path_tokens()
      assert span.sampler_logprobs == [server.logprob(path + span.tokens[:i], token) for i, token in enumerate(span.tokens)]
      assert span.data['weights'] == 1
  sent = [body for path, body in server.seen if 'generate' in path]
  assert all('text' not in body and 'prompt' not in body for body in sent)
  settings = [body['sampling_params'] for body in sent if 'temperature' in body['sampling_params']]
  assert {(own['top_p'], own['top_k']) for own in settings} == {(1.0, {'vllm': 0, 'sglang': -1}[kind])}
  asked = sum(len(span.parent.path_tokens()) for tree in trees for span in tree.nodes(Role.POLICY))
  assert metrics['tokens_reused'] + metrics['tokens_prefilled'] == asked and metrics['tokens_reused'] > asked / 2
  assert metrics['tokens_decoded'] == sum(tree.count(Role.POLICY) for tree in trees)


@both
def test_a_folded_chain_is_paths_of_ids(kind, policy, tmp_path):
  writes = lambda text, _: '<context>See Tide.</context>' if folding.REQUEST in text else SEARCHES
  grow = functools.partial(folding.folding, search_r1.grow, fold='summary', fold_at=0.05, fold_tokens=30, template='world',
                           max_tokens=50, max_turns=3)
  with opened(kind, policy, tmp_path, script=writes) as (engine, (server,)):
    trees, _ = grown(engine, grow, count=2)
  for tree in trees:
    assert [node.text for node in tree.nodes(Role.CONTEXT)] == ['<context>See Tide.</context>\n'] * 3
    for span in tree.nodes(Role.POLICY):
      path = span.parent.path_tokens()
      assert span.sampler_logprobs == [server.logprob(path + span.tokens[:i], token) for i, token in enumerate(span.tokens)]


@both
def test_a_span_ends_where_ours_does(kind, policy, tmp_path, monkeypatch):
  """At the policy's end, at a length, at the end of the context; and at a stop string that the server missed."""
  ends = []

  def grow(question, tree):
    node = tree.root.append('Q', Role.PROMPT)
    for request in (Generate(node, ('never',)), Generate(node, max_tokens=3), Generate(node, ('ook',)),
                    Generate(node.append('x ' * 100, Role.OBSERVATION), max_tokens=100),
                    Generate(node.append('x ' * 1000, Role.OBSERVATION))):
      ends.append((yield request))

  with opened(kind, policy, tmp_path, length=220) as (engine, (server,)):
    monkeypatch.setattr(engine.protocol, 'stops', True)
    grown(engine, grow, count=1)
    whole, cut, word, short, none = ends
    assert (whole.stop, whole.text_without_end) == (END, writes('')) and whole.tokens[-1] in policy.tokenizer.eos_ids
    assert (cut.stop, len(cut.tokens)) == (LENGTH, 3)
    assert word.stop == 'ook' and word.text.startswith('<think>Look') and '</think>' not in word.text
    assert short.stop == Stop.CONTEXT_FULL and short.length == 220 and (none.stop, none.tokens) == (Stop.CONTEXT_FULL, [])
    assert none.sampler_logprobs == []  # so a method may join it to the span before
    monkeypatch.setattr(engine.protocol, 'stops', False)  # a server that is sent no stop strings
    grown(engine, grow, count=1)
    assert [(span.tokens, span.stop) for span in ends[5:]] == [(span.tokens, span.stop) for span in ends[:5]]


@both
def test_scores_are_those_of_the_prompt(kind, policy, tmp_path):
  def grow(question, tree):
    node = tree.root.append('Who wrote it?', Role.PROMPT)
    tree.answer = yield Score(node, ('yes', (5, 6, 7), 'no ' * 900), cue=' Ada?')

  with opened(kind, policy, tmp_path) as (engine, (server,)):
    (tree,), _ = grown(engine, grow, count=1)
    path = tree.root.children[0].tokens + policy.tokenizer.encode(' Ada?')
    expected = [server.scores(path + target)[-len(target):] for target in (policy.tokenizer.encode('yes'), [5, 6, 7])]
    assert tree.answer == [*expected, None]
    with pytest.raises(ValueError, match='temperature 0.5: servers give those at 1'):
      grown(engine, grow, count=1, sampling=Sampling(0.5))


def test_each_server_is_told_of_new_weights_by_one_process():
  shared = [['', 'http://a'], ['', 'http://b'], ['', 'http://c']]
  assert [remote.tellers([shared, shared], process) for process in (0, 1)] == [[0, 1, 0]] * 2
  beside = [[['one', 'http://localhost']]] * 2 + [[['two', 'http://localhost']]] * 2  # two processes on each of two hosts
  assert [remote.tellers(beside, process) for process in range(4)] == [[0], [0], [2], [2]]


@both
def test_new_weights_reach_the_server_and_are_ours(kind, policy, tmp_path):
  with opened(kind, policy, tmp_path, count=2) as (engine, servers):
    first = servers[0].label
    engine.load(jax.tree.map(lambda x: x * 2, policy.params))
    assert {server.label for server in servers} == {engine.label} != {first}
    folder, = (tmp_path / 'weights').iterdir()  # the older is gone
    assert {server.loading for server in servers} == {str(folder)}
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, 2 * old), models.load(folder).params, policy.params)
    trees, metrics = grown(engine)
    assert {span.data['weights'] for tree in trees for span in tree.nodes(Role.POLICY)} == {2}
    assert metrics['seconds_weights'] > 0


@both
def test_siblings_go_to_one_server_and_questions_are_shared_out(kind, policy, tmp_path):
  with opened(kind, policy, tmp_path, count=3) as (engine, servers):
    for server in servers:
      server.seen.clear()
    grown(engine)
    assert [len(server.seen) for server in servers] == [4, 4, 4]  # two trees of two spans each


@both
@pytest.mark.parametrize('fault', ['die', 'hang', 'forget'])
def test_a_fault_costs_no_tree(fault, kind, policy, tmp_path):
  # Only a server that hangs is waited for. What is well answers in time on a machine that is busy, too.
  with opened(kind, policy, tmp_path, count=2, timeout=4.0 if fault == 'hang' else 20.0) as (engine, (faulty, sound)):
    if fault == 'forget':
      faulty.label = 'default'  # it was started anew
    else:
      faulty.fault = fault
    trees, metrics = grown(engine)
    assert [tree.answer for tree in trees] == ['Ada Moor'] * 6
    if fault == 'forget':
      assert faulty.label == engine.label and metrics['servers_reloaded'] >= 1
      return
    assert metrics['requests_failed'] >= 1
    engine.load(policy.params)  # the update passes without it
    faulty.fault, faulty.label = None, 'default'
    engine.servers[0].rests_until = 0.0
    trees, _ = grown(engine)
    assert [tree.answer for tree in trees] == ['Ada Moor'] * 6 and faulty.label == sound.label == engine.label


def test_a_server_that_never_has_the_weights_ends_the_run(policy, tmp_path, monkeypatch):
  with opened('sglang', policy, tmp_path, timeout=1.0) as (engine, (server,)):
    monkeypatch.setattr(rollout_servers.Sglang, 'label', property(lambda _: 'default', lambda *_: None), raising=False)
    with pytest.raises(remote.ServerError, match="has the weights 'default' again and again, not '"):
      grown(engine)


def test_requests_that_fail_together_are_one_failure():
  server, before = remote.Server('http://127.0.0.1:9', protocols.PROTOCOLS['vllm'], 1.0), time.monotonic()
  for _ in range(6):
    server.failed()
  assert server.rest == 2.0 and server.rests_until <= time.monotonic() + 1.0
  server.rests_until = before
  server.failed()
  assert server.rest == 4.0


def test_without_a_server_that_answers_the_run_ends(policy, tmp_path):
  with opened('vllm', policy, tmp_path, timeout=2.0) as (engine, (server,)):
    server.fault = 'die'
    with pytest.raises(remote.ServerError, match='rollout server at http') as raised:
      grown(engine)
  assert cli.explain(raised.value)[0] == 3  # launch/run.sh tries again


@pytest.mark.parametrize(('kind', 'change', 'message'), [
  ('vllm', lambda reply: reply['choices'][0].pop('token_ids'), "KeyError: 'token_ids'; needs vLLM 0.32"),
  ('vllm', lambda reply: reply['choices'][0]['logprobs'].update(content=[]), '1 tokens with 0 log-probabilities'),
  ('vllm', lambda reply: reply['choices'][0].update(logprobs=None), 'not a valid response.*; needs vLLM 0.32'),
  ('vllm', lambda reply: reply.update(usage=None), 'not a valid response.*; needs vLLM 0.32'),
  ('sglang', lambda reply: reply['meta_info'].pop('output_token_logprobs'), "'output_token_logprobs'.*; needs SGLang 0.5.23"),
  ('sglang', lambda reply: reply['meta_info'].update(output_token_logprobs=[[-9.0, 5, None]]), 'of the same token in a prompt')])
def test_a_server_without_ids_or_log_probabilities_is_refused(kind, change, message, policy, tmp_path, monkeypatch):
  serve = STAND_INS[kind].serve

  def without(self, path, body):
    status, reply = serve(self, path, body)
    if reply.get('meta_info', {}).get('input_token_logprobs', []) == [] and not reply.get('prompt_logprobs'):
      change(reply)
    return status, reply

  monkeypatch.setattr(STAND_INS[kind], 'serve', without)
  with pytest.raises(ValueError, match=message), opened(kind, policy, tmp_path):
    pass


def test_a_reply_may_hold_a_whole_vocabulary():
  entry = {'id': 100_000, 'token': 'abc', 'bytes': [97, 98, 99], 'logprob': -12.345678}
  with server((200, [entry] * 152_000)) as (url, _):
    assert len(remote.Server(url, protocols.LlamaCpp, timeout=60.0).post('/completion', {}, list)) == 152_000


def test_another_server_is_refused_in_a_line(policy, tmp_path):
  with serving(rollout_servers.Sglang(policy.tokenizer, writes)) as url, pytest.raises(
      ValueError, match="sampler.engine='vllm': rollout server at .*/inference/v1/generate failed: status 404.*needs vLLM"):
    remote.RemoteEngine('vllm', policy.config, policy.tokenizer, urls=url, folder=tmp_path, slots=1, length=99, timeout=5)


def test_a_deadline_ends_an_episode_that_waits(policy, tmp_path):
  with opened('vllm', policy, tmp_path, timeout=20, episode_deadline=0.3) as (engine, (server,)):
    server.fault = 'hang'
    trees, _ = grown(engine, count=2)
    assert [tree.nodes(Role.POLICY)[-1].stop for tree in trees] == [Stop.DEADLINE] * 2


SMALL = ['--config.steps=2', '--config.questions_per_step=2', '--config.eval.every=0', '--config.data.number=4',
         '--config.train.micro_rows=8', '--config.train.row_length=320', '--config.sampler.length=320',
         '--config.progress=False', '--config.checkpoint_every=1', '--config.sampler.slots=4']


@both
def test_training_on_servers(kind, policy, tmp_path):
  server = STAND_INS[kind](policy.tokenizer, lambda text, _: SEARCHES if '</information>' not in text else ANSWERS)
  for name in ('01234567-1', 'mine'):  # of a process that was killed, and of somebody
    (tmp_path / 'run/weights' / name).mkdir(parents=True)
  with serving(server) as url:
    assert cli.main(['train', '--config=search_r1_grpo', *SMALL, '--config.group_size=2', f'--config.out={tmp_path}/run',
                     f'--config.sampler.engine={kind}', f'--config.sampler.urls={url}',
                     f'--config.train.async_steps={int(kind == "vllm")}',  # one of them a step ahead
                     '--config.monitor.window=2']) == 0
  gc.collect()
  assert [path.name for path in (tmp_path / 'run/weights').iterdir()] == ['mine']  # a restart finds none of ours
  rows = row_files.read(tmp_path / 'run/metrics.jsonl')
  assert [row['searches'] for row in rows] == [1, 1] and all(row['importance_weight'] < 2.001 for row in rows)
  assert all(row['logprob_gap'] > 0.1 and row['seconds_weights'] > 0 and row['tokens_reused'] > 0 for row in rows)
  assert ['logprob_gap' in row.get('alarms', '') for row in rows] == [False, True]  # what the stand-in says is made up


# llama.cpp.

@pytest.fixture
def llama_cpp(monkeypatch):
  if importlib.util.find_spec('xllamacpp') is None:
    pytest.skip('the package xllamacpp is not installed')
  monkeypatch.setenv('NPROC', '1')  # on busy cores its threads wait minutes for each other


@pytest.mark.parametrize('make', [search_r1_grpo.get_config, slate.get_config], ids=['search_r1', 'slate'])
def test_llama_cpp_grows_our_trees(make, llama_cpp):
  """Greedily, from a float16 export; log-probabilities agree to what rounding leaves."""
  config, trees = make().unlock(), {}
  config.sampler.slots = 4
  for config.sampler.engine in ('jax', 'llama_cpp'):
    agent = agents.open_agent(config)
    trees[config.sampler.engine], _ = rollout(agent, setup.load_questions(config, 'world:test')[:3], jax.random.key(0),
                                              sampling=requests.GREEDY)
  for ours, theirs in zip(*trees.values()):
    for span, other in zip(ours.nodes(Role.POLICY), theirs.nodes(Role.POLICY), strict=True):
      assert (span.tokens, span.stop) == (other.tokens, other.stop)
      np.testing.assert_allclose(other.sampler_logprobs, span.sampler_logprobs, atol=0.05)


@pytest.mark.parametrize('name', ['search_r1_grpo', pytest.param('slate', marks=pytest.mark.slow)])
def test_training_on_llama_cpp(name, llama_cpp, tmp_path):
  few = ['--config.group_size=2'] * (name == 'search_r1_grpo')
  assert cli.main(['train', f'--config={name}', *SMALL, *few, f'--config.out={tmp_path}/run',
                   '--config.sampler.engine=llama_cpp']) == 0
  rows = row_files.read(tmp_path / 'run/metrics.jsonl')
  assert [0 < row['logprob_gap'] < 0.01 for row in rows] == [True] * 2 and json.loads(
    (tmp_path / 'run/config.json').read_text())['sampler']['engine'] == 'llama_cpp'


def test_llama_cpp_leaves_out_tokens_that_end_within_a_character():
  found = [{'id': token, 'logprob': logprob} for token, logprob in ((7, -1.0), (80, -2.0), (9, -3.0))]
  reply = {'tokens': [7, 226, 80, 80, 9, 226], 'completion_probabilities': found, 'timings': {'cache_n': 0}}
  assert protocols.LlamaCpp.read(reply).logprobs == [-1.0, None, None, -2.0, -3.0, None]
  with pytest.raises(ValueError, match='of other tokens'):
    protocols.LlamaCpp.read(reply | {'tokens': [7, 226, 9]})


def test_llama_cpp_scores_as_ours_does(policy, llama_cpp):
  """Tokens that end within a character too."""
  def grow(question, tree):
    asked = tree.root.append(question.question, Role.PROMPT)
    tree.answer = yield Score(asked, ('yes', (5, 6, 7), '\u4f60\u597d'), cue=' Ada?')

  config, found = search_r1_grpo.get_config().unlock(), []
  config.sampler.slots = 2
  for config.sampler.engine in ('jax', 'llama_cpp'):
    engine = setup.open_engine(config, policy.config, policy.tokenizer)
    engine.load(policy.params)
    (tree,), _ = grown(engine, grow, count=1)
    found.append(np.concatenate(tree.answer))
  np.testing.assert_allclose(*found, atol=0.05)


def test_a_gguf_export_reads_back(policy, tmp_path):
  hub.save_gguf(Decoder(policy.config, params=policy.params), tmp_path / 'model.gguf', policy.tokenizer)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3), models.load(tmp_path).params, policy.params)
