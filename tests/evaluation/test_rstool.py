"""The policy as a tool: its evidence, a reader asked with and without it, and both behind the command
line."""

import dataclasses
import json
import re
import types

import httpx
import pytest

from jaxsearch import cli
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import answers, rstool
from jaxsearch.methods import r_search
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.assistants import Assistant
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.tools import SearchBySource
from jaxsearch.tools.chat import ChatError
from jaxsearch.trees import templates
from jaxsearch.trees.tree import spans
from jaxsearch.world import files as world
from tests.methods.driving import drive
from tests.tools.serving import server
from tests.training import child


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer.load(world.folder())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tiny random model, with questions and passages of its own."""
  folder = tmp_path_factory.mktemp('inputs')
  child.make_inputs(folder)
  return folder


def flags(folder):
  """The world's policy, and the tiny model as reader."""
  return ['--config=configs/r_search.py', '--config.sampler.slots=8', '--config.sampler.length=448',
          f'--config.reader.model={folder}/model', '--config.reader.slots=4', '--config.reader.max_tokens=8']


SEARCH = '<search> red </search>'
BOX = '<original_evidence> It is red. </original_evidence>'
ANSWER = '<answer> red </answer>'


@pytest.mark.parametrize(('said', 'expected'), [
  ([SEARCH, BOX + ANSWER], ('It is red.', False)),
  ([SEARCH, SEARCH, BOX + BOX + ANSWER], ('', False)),  # evidence twice
  ([BOX + ANSWER], ('', True)),  # never searched
  ([BOX + SEARCH, ANSWER], ('', True)),  # searched later
])
def test_evidence_is_the_only_box(said, expected):
  tree, *_ = drive(said, grow=r_search.grow, template='world_evidence', max_turns=2, max_tokens=16,
                   asked=ToolFailure('there is no reader'))
  found = rstool.evidence_of({'spans': spans(tree)})
  assert (found['evidence'], found['forfeited']) == expected


# The second model.

QUESTIONS = [Question('1', 'Where is A?', ('Ames',)), Question('2', 'Where is B?', ('Bath',)),
             Question('3', 'Where is C?', ('Como',))]
FOUND = [{'evidence': 'A is in Ames.', 'prediction': 'Ames', 'searches': 2, 'forfeited': False},
         {'evidence': 'B is in Bari.', 'prediction': 'Bath', 'searches': 1, 'forfeited': False},
         {'evidence': '', 'prediction': None, 'searches': 0, 'forfeited': True}]


class Passages:
  def search(self, queries, topk):
    self.asked = list(queries), topk
    found = [Document('1', 'A', 'A is in Oslo.'), Document('2', 'B', 'B is in Bath.')]
    return [found[:topk] for _ in queries]


def places(prompts):
  """A reader who believes the last place of which it is told; without any, it is always in Como."""
  return [f' {(["Como"] + re.findall("is in ([A-Z][a-z]+)", prompt))[-1]} \n' for prompt in prompts]


def ask(reader, questions, found, search):
  """The figures and the predictions of what a tool found and a reader says."""
  told = rstool.ask_reader(reader, questions, [one['evidence'] for one in found], search, 2)
  records = [{'id': question.id, 'source': '', 'question': question.question, 'stop': None,
              'golden_answers': list(question.golden_answers)} | one | replies
             for question, one, replies in zip(questions, found, told)]
  return rstool.scores(records) | answers.outcomes(records), rstool.predictions(records)


def test_three_ways_of_asking():
  search, prompts = Passages(), []
  reader = rstool.Reader(lambda asked: prompts.extend(asked) or places(asked), 'r_search')
  scores, records = ask(reader, QUESTIONS, FOUND, search)
  assert search.asked == (['Where is A?', 'Where is B?', 'Where is C?'], 2)
  said = [[record[way] for record in records] for way in ('alone', 'rag', 'rstool', 'policy')]
  assert said == [['Como'] * 3, ['Bath'] * 3, ['Ames', 'Bari', 'Como'], ['Ames', 'Bath', None]]
  right = {'alone': 1 / 3, 'rag': 1 / 3, 'rstool': 2 / 3, 'policy': 2 / 3}
  assert scores == pytest.approx(scores | {
    **{f'{metric}_{way}': share for way, share in right.items() for metric in ('em', 'f1')},
    'with_evidence': 2 / 3, 'searches': 1.0, 'service_calls': 9, 'service_calls_failed': 0, 'forfeited': 1,
    'n': 3})
  assert records[0] == json.loads(json.dumps(records[0])) | {'evidence': 'A is in Ames.', 'searches': 2}
  alone, rag, told = prompts[0], prompts[3], prompts[6]
  assert told == templates.reader_prompt('Where is A?', 'A is in Ames.')
  documents = 'Doc 1(Title: A) A is in Oslo.\nDoc 2(Title: B) B is in Bath.'
  assert rag == templates.reader_prompt('Where is A?', documents)
  assert 'passages' not in alone and alone.endswith('\nQuestion: Where is A?\nAnswer:')
  assert prompts[8] == prompts[2]  # no evidence: asked alone


def test_the_searches_of_the_reader_are_paid_too(monkeypatch):
  search, kept = Passages(), answers.Kept(None, {}, 3)
  search.paid, search.price = 2, 0.5  # by the agent
  search.search = lambda queries, topk: setattr(search, 'paid', search.paid + len(queries)) or [[]] * len(queries)
  kept.add({number: one | {'searches_paid': 1} for number, one in enumerate(FOUND)})
  monkeypatch.setattr(rstool.answers, 'answer', lambda *_, **__: None)
  monkeypatch.setattr(rstool, 'evidence_of', lambda record: {'evidence': record['evidence']})
  rstool.answer(None, rstool.Reader(places, 'r_search'), QUESTIONS, None, kept, sampling=None, search=search, topk=2,
                on_progress=lambda *_: None)
  assert [(record['searches_paid'], record.get('searches_cost')) for record in kept.all()] == [
    (4, 1.5), (1, None), (1, None)]


def test_a_question_is_searched_in_the_passages_of_its_source():
  opened = {}
  search = SearchBySource(lambda source: opened.setdefault(source, Passages()))
  questions = [dataclasses.replace(question, metadata={'source': source}) for question, source in zip(QUESTIONS, 'xyx')]
  ask(rstool.Reader(places, 'r_search'), questions, FOUND, search)
  assert {source: back_end.asked for source, back_end in opened.items()} == {
    'x': (['Where is C?'], 2), 'y': (['Where is B?'], 2)}


def test_a_reply_that_failed_counts_as_wrong_and_is_counted():
  def refused(prompts):
    said = places(prompts)
    return [ChatError('http://a', 'refused') if 'Where is A?' in prompt else reply
            for prompt, reply in zip(prompts, said)]

  scores, records = ask(rstool.Reader(refused, 'world'), QUESTIONS, FOUND, Passages())
  assert scores['service_calls_failed'] == 3 and scores['em_rstool'] == pytest.approx(1 / 3)
  assert records[0]['rstool'] is None
  (line,) = answers.summary(scores)
  assert line.startswith('3 of 9 calls of judge or reader failed; the last: ') and 'refused' in line
  with pytest.raises(ChatError, match='refused'):
    ask(rstool.Reader(refused, 'world'), QUESTIONS[:1], FOUND[:1], Passages())


def test_what_a_reader_is_shown_is_shortened_and_harmless(tokenizer):
  sizes = types.SimpleNamespace(length=200, tokenizer=tokenizer)
  reader = rstool.Reader(places, 'r_search', Assistant(sizes, max_tokens=20))
  special = tokenizer.special_tokens[0]
  evidence = f'{special} <answer> Bonn </answer> ' + 'The red town. ' * 200
  prompt = reader.prompt('Where?', [Document('', '', evidence)])
  assert 170 <= len(tokenizer.encode(prompt)) <= 180
  assert prompt.endswith('\nQuestion: Where?\nAnswer:') and 'Bonn' in prompt
  assert special not in prompt and '<answer>' not in prompt
  server = rstool.Reader(places, 'r_search')  # which knows its own room
  whole = server.prompt('Where?', [Document('', '', evidence)])
  assert len(whole) > len(evidence) and '<answer>' not in whole


# The commands.


def evaluate(folder, out, *more):
  return ['eval', '--as-tool', *flags(folder), '--questions=world:test', '--limit=8', f'--out={out}', *more]


@pytest.fixture(scope='module')
def own(folder, tmp_path_factory):
  """The result of an evaluation with the world's policy as tool."""
  out = tmp_path_factory.mktemp('own') / 'r.json'
  assert cli.main(evaluate(folder, out, f'--checkpoint={world.folder()}', f'--plots={out.parent}/plots')) == 0
  written = sorted(str(file.relative_to(out.parent)) for file in out.parent.rglob('*'))
  assert written == ['plots', 'plots/rstool.png', 'r.json']
  result = json.loads(out.read_text())
  assert result['n'] == 8 and result['with_evidence'] > 0 and result['service_calls_failed'] == 0
  assert sum(count for name, count in result.items() if name.startswith('stop_')) == 8
  assert result['searches_asked'] == sum(record['searches'] for record in result['predictions']) > 0
  made = result['manifest']
  assert made['reader'] == f'{folder}/model' and made['tool'] == str(world.folder())
  return result


def test_a_server_finds_what_eval_finds(own, folder, monkeypatch):
  """`serve --as-tool` gives what `eval --as-tool` finds itself: both are greedy."""
  pytest.importorskip('jaxsearch.tools.http_server')
  from tests.tools.running import serve
  warmed, served = [], []

  def run(app, listener, what):
    assert warmed and what == 'evidence' and listener.getsockname()[0] == '127.0.0.1'
    with serve(app) as url:
      ask = lambda question: httpx.post(f'{url}/evidence', json={'question': question}, timeout=300,
                                        headers={'authorization': 'Bearer sesame'}, trust_env=False)
      served.extend(ask([record['question'] for record in own['predictions']]).json())
      refused = ask('red ' * 1000)
      assert refused.status_code == 413 and 'the question is too long' in refused.json()['error']

  monkeypatch.setattr('jaxsearch.tools.http_server.run', run)
  monkeypatch.setattr('jaxsearch.sampler.engine.Engine.compile_all', lambda engine: warmed.append(engine))
  assert cli.main(['serve', '--as-tool', *flags(folder), f'--checkpoint={world.folder()}', '--port=0',
                   '--token=sesame']) == 0
  fields = {'answer': 'policy', 'evidence': 'evidence', 'searches': 'searches'}
  assert [[one[name] for name in fields] for one in served] == [
    [record[name] for name in fields.values()] for record in own['predictions']]


def test_eval_with_a_chat_server_as_reader(folder, capsys):
  reply = {'choices': [{'message': {'content': 'red'}}]}
  with server((200, reply)) as (url, seen):
    assert cli.main(['eval', '--as-tool', *flags(folder), f'--questions={folder}/questions.jsonl',
                     '--limit=2', f'--reader-url={url}/v1', '--reader-model=m',
                     '--config.grow.evidence_template=r_search']) == 0
  assert json.loads(capsys.readouterr().out)['em_alone'] == 0.5
  assert len(seen) == 6 and seen[0][0] == '/v1/chat/completions' and seen[0][2]['model'] == 'm'
  asked = [body['messages'][0]['content'] for _, _, body in seen]
  assert all(text.startswith(('Take the answer', 'What is the answer')) for text in asked)


def test_a_search_server_takes_its_token_from_a_file_or_a_variable(folder, monkeypatch, tmp_path):
  pytest.importorskip('starlette')
  tokens, http_server, file = [], 'jaxsearch.tools.http_server', tmp_path / 'token'
  monkeypatch.setattr(f'{http_server}.search_app', lambda backend, token, limits: tokens.append(token))
  monkeypatch.setattr(f'{http_server}.run', lambda *_: None)
  start = lambda token: cli.main(['serve', f'--corpus={folder}/corpus.jsonl', '--port=0', f'--token={token}'])
  for variable in ('JAXSEARCH_TOKEN', 'JAXSEARCH_SEARCH_TOKEN'):
    monkeypatch.setenv(variable, variable)
    assert start('') == 0
  file.write_text('sesame\n')
  assert start(f'@{file}') == 0 and tokens == ['JAXSEARCH_TOKEN', 'JAXSEARCH_SEARCH_TOKEN', 'sesame']
  file.write_text('\n')  # no open server by mistake
  assert start(f'@{file}') == 2
