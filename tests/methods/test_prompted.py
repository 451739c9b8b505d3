"""The prompted baselines: what they share, then each of them with terse prompts, so that a test can spell out all
that the policy is shown."""

import dataclasses
import importlib
import inspect
import itertools
import json
import math
import pathlib
import shutil

import numpy as np
import pytest

from jaxsearch import cli, methods
from jaxsearch.config_check import check
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import agents
from jaxsearch.methods import prompted
from jaxsearch.methods.prompted import adaptive_rag, cot_tools, flare, ircot, iter_retgen, rag, react, search_o1, sure
from jaxsearch.sampler.requests import LENGTH, Ask, Generate, Refused, RunPython, Score, Search, ToolFailure
from jaxsearch.trees import grammars, templates
from jaxsearch.trees.grammar import SEARCH_R1
from jaxsearch.trees.tree import Role, Stop, Tree
from tests.methods.driving import ANSWER, SEARCH, Letters, drive

NAMES = sorted(path.stem
               for path in pathlib.Path(prompted.__file__).parent.glob('*.py') if path.stem != '__init__')
PRESETS = ('', 'paper', 'flashrag')
PROMPTS = {
  'direct': 'direct {question}:', 'cot': 'cot {question}:', 'documents': 'read {documents}{question}:',
  'reasoned': 'reason {documents}{question}:', 'candidates': 'two {documents}{question}:',
  'summary': 'for {candidate} {documents}{question}:',
  'validity': '{summary} supports {candidate} {question}?',
  'ranking': '1 {first} 2 {second} {question}?', 'complexity': 'hard {question}?',
  'search_o1': 'search {limit} {question}:',
  'extract': '{reasoning} | {query} {documents}:', 'react': 'act {question}:', 'tools': 'may {question}:',
  'tools_forced': 'must {question}:',
}  # fmt: skip
Q = 'Who wrote it?'


def document(number):
  return Document(str(number), f'T{number}', f'text {number}')


def by_query(request):
  """One document, whose title is the query."""
  return [Document(request.query, request.query, 'text')]


def ask(method, folder, said, **settings):
  """`drive` with the terse prompts, which it writes into a folder."""
  for name, text in PROMPTS.items():
    (folder / f'{name}.txt').write_text(text)
  grow = lambda question, tree, template, **own: method.grow(question, tree, **own)
  return drive(said, grow=grow, prompts=str(folder), speech=grammars.of_tags(Letters(), getattr(method, 'TAGS', SEARCH_R1)),
               **settings)


def shown(requests):
  """What the policy is shown at each call, and the queries: 'text' and ('query',)."""
  read = {Generate: lambda one: one.node.tree.tokenizer.decode(one.node.path_tokens()),
          Search: lambda one: (one.query,)}
  return [read[type(one)](one) for one in requests if type(one) in read]


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
  ('The answer is **Ada**\nmore', 'Ada', 'Ada'), ('So the answer is:\n\nAda\nmore', 'Ada', 'Ada'),
  (r'So the answer is: $\boxed{\text{Ada}}$.', 'Ada', 'Ada'),
  ('The answer is A. No, the answer is: B', 'B', 'B'), ('\nAnswer: Ada.\nBecause', None, 'Ada'),
  ('', None, None),
  ('<think> x</think><answer> Ada </answer>', 'Ada', 'Ada'), (' Ada</answer>', 'Ada', 'Ada'),
  ('<think> x</think><search> Ada</search>', None, None),
])
def test_answers(text, marked, short):
  assert prompted.marked_answer(text) == marked and prompted.short_answer(text) == short


def test_documents_are_inert_and_observations():
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
  tree, requests, _ = ask(rag, tmp_path, ['Ada'], found=[document(1)], chat=True)
  assert shown(requests)[1] == f'<user>read Doc 1(Title: T1) text 1\n{Q}:<assistant>'


@pytest.mark.parametrize('name', ['direct', 'cot', 'rag'])
def test_one_call(name, tmp_path):
  method, said = methods.find_method(f'prompted.{name}'), 'So the answer is: Ada.'
  tree, requests, _ = ask(method, tmp_path, [said], found=[document(1), document(2)], max_tokens=7)
  documents = 'Doc 1(Title: T1) text 1\nDoc 2(Title: T2) text 2\n'
  assert shown(requests) == {'direct': [f'direct {Q}:'], 'cot': [f'cot {Q}:'],
                             'rag': [(Q,), f'read {documents}{Q}:']}[name]
  assert requests[-1].max_tokens == 7 and (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)
  assert tree.metrics == {'searches': int(name == 'rag'), 'malformed': 0, 'tool_failures': 0}


@pytest.mark.parametrize('stop, wanted', [(LENGTH, Stop.TOOL_FAILED), (Stop.CONTEXT_FULL, Stop.CONTEXT_FULL)])
def test_a_search_that_fails_finds_nothing(stop, wanted, tmp_path):
  tree, requests, observations = ask(rag, tmp_path, [''], found=ToolFailure('down'), stops=[stop])
  assert observations == ['No documents were found.\n']
  assert tree.metrics['tool_failures'] == tree.metrics['searches'] == 1
  assert (tree.answer, tree.stop) == (None, wanted)


# Adaptive-RAG: who classifies, and where a question goes.

ROUTES = [('A', 'direct', ['Ada'], 'direct'), ('B', 'rag', ['Ada'], 'read'),
          ('C', 'ircot', ['answer is: a', 'Ada'], 'reason')]


@pytest.mark.parametrize('letter, name, said, call', ROUTES)
def test_the_policy_sends_a_question_to_one_of_three(letter, name, said, call, tmp_path):
  scores = [[-1.0] if one == letter else [-2.0] for one in 'ABC']
  tree, requests, _ = ask(adaptive_rag, tmp_path, said, scored=lambda _: scores)
  assert isinstance(requests[0], Score) and requests[0].continuations == (' A', ' B', ' C')
  assert tree.tokenizer.decode(requests[0].node.path_tokens()) == f'hard {Q}?'
  assert next(one for one in shown(requests) if isinstance(one, str)).startswith(call)
  assert tree.answer == 'Ada'
  assert [key for key, value in tree.metrics.items() if key.startswith('route')
          and value] == [f'route_{name}']


@pytest.mark.parametrize('letter, name, said, call', ROUTES)
def test_or_a_model_does(letter, name, said, call, tmp_path):
  tree, requests, _ = ask(adaptive_rag, tmp_path, said, classifier='model', asked=f'Level {letter}.')
  assert isinstance(requests[0], Ask)
  assert (requests[0].service, requests[0].item) == ('classifier', f'hard {Q}?')
  assert tree.metrics[f'route_{name}'] == 1 and tree.metrics['unclassified'] == 0


@pytest.mark.parametrize('settings', [dict(classifier='model', asked='who knows'),
                                      dict(scored=lambda _: [[-1.0], None, [-2.0]])])
def test_without_a_class_it_is_rag(settings, tmp_path):
  tree, requests, _ = ask(adaptive_rag, tmp_path, ['Ada'], **settings)
  assert tree.metrics['unclassified'] == tree.metrics['route_rag'] == 1


def test_a_classifier_that_fails_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="grow.classifier='model': gone"):
    ask(adaptive_rag, tmp_path, [], classifier='model', asked=ToolFailure('gone'))


def test_an_evaluation_opens_the_classifier_but_no_judge():
  config = importlib.import_module('configs.prompted.adaptive_rag').get_config()
  assert list(agents.open_agent(config).tools.services) == ['classifier']
  assert not agents.open_agent(importlib.import_module('configs.search_r2').get_config()).tools.services


# CoT + tools: programs whose output stays, answers before the first program refused with `always`.

PROGRAM = 'I count.\n```python\nprint(1)\n```\n'
BOXED = r'It is \boxed{7}.'


@pytest.mark.parametrize('always, call', [(False, 'may'), (True, 'must')])
def test_the_output_of_programs_stays(always, call, tmp_path):
  tree, requests, observations = ask(cot_tools, tmp_path, [PROGRAM, PROGRAM, BOXED], printed='7',
                                     always=always, max_tokens=90)
  output = '<output>7</output>\n'
  assert shown(requests) == [f'{call} {Q}:', f'{call} {Q}:{PROGRAM}{output}',
                             f'{call} {Q}:{(PROGRAM + output) * 2}']
  assert [one.code for one in requests if isinstance(one, RunPython)] == ['print(1)'] * 2
  assert requests[0].max_tokens == 90
  assert (tree.answer, tree.stop, tree.metrics['searches']) == ('7', Stop.ANSWERED, 2)


def test_always_refuses_an_answer_before_the_first_program(tmp_path):
  tree, requests, observations = ask(cot_tools, tmp_path, [BOXED, PROGRAM, BOXED], printed='7', always=True)
  assert observations[0] == cot_tools.REFUSED
  assert (tree.answer, tree.metrics['refused'], tree.metrics['searches']) == ('7', 1, 1)
  tree, *_ = ask(cot_tools, tmp_path, [BOXED] * 2, always=True, max_turns=1)
  assert tree.answer == '7' and tree.metrics['refused'] == 1  # it has to end


@pytest.mark.parametrize('last, printed, stop', [
  (PROGRAM, '7', Stop.BUDGET), ('Hm.', '7', Stop.MALFORMED),
  (PROGRAM, ToolFailure('down'), Stop.TOOL_FAILED)])
def test_turns_of_programs_are_limited(last, printed, stop, tmp_path):
  tree, requests, observations = ask(cot_tools, tmp_path, [PROGRAM, last], printed=printed, max_turns=1)
  assert (tree.answer, tree.stop, tree.metrics['malformed']) == (None, stop, stop is Stop.MALFORMED)
  failed = stop is Stop.TOOL_FAILED
  assert ('The tool failed: down' in observations[0]) == failed == tree.metrics['tool_failures']


def test_output_can_be_forgotten(tmp_path):
  said = [PROGRAM, '<context> seven </context>', BOXED]
  tree, requests, _ = ask(cot_tools, tmp_path, said, printed='7', forget=True)
  assert shown(requests)[1:] == [f'may {Q}:{PROGRAM}<output>7</output>\n',
                                 f'may {Q}:{PROGRAM}<context>seven</context>\n']
  assert tree.answer == '7'


# FLARE: looks ahead one sentence, searches where a token is improbable, masks such tokens in the query, writes anew.

def chances(*probabilities):
  return [math.log(p) for p in probabilities]


def test_only_an_unsure_sentence_is_searched_for_and_written_anew(tmp_path):
  said = ['It is a play. And', 'Bob wrote it.', 'Ada wrote it.', 'So the answer is: Ada.']
  tree, requests, _ = ask(flare, tmp_path, said, found=by_query, stops=['. '] + ['end'] * 3,
                          logprobs=chances(.9, .6, .1, .8),
                          search_below=0.8, mask_below=0.5, look_ahead=64)
  assert shown(requests) == [
    f'cot {Q}:',
    f'cot {Q}:It is a play.',                                         # without documents
    ('Bob wrote it.',), f'reason Doc 1(Title: Bob wrote it.) text\n{Q}:It is a play.',
    # what was written anew is kept, however improbable
    f'cot {Q}:It is a play. Ada wrote it.',
  ]  # fmt: skip
  assert {one.max_tokens for one in requests if isinstance(one, Generate)} == {64}
  assert (tree.answer, tree.stop, tree.metrics['searches']) == ('Ada', Stop.ANSWERED, 1)


def span(text, probabilities):
  node = Tree(Letters()).root.append(text, Role.POLICY)
  node.sampler_logprobs = [math.log(p) for p in probabilities]
  return node


@pytest.mark.parametrize('probabilities, query', [
  ([.9] * 8, ''), ([.8] * 8, ''),                                     # at the threshold it is sure
  # unsure of one token, which stays in the query
  ([.9, .9, .7, .9, .9, .9, .9, .9], 'Ada B.'),
  ([.9, .9, .9, .9, .3, .9, .9, .9], 'Ada .'),                        # masked
  ([.1] * 8, ''),                                                     # nothing left to search for
  # what comes after the sentence does not count
  ([.9, .9, .9, .9, .9, .9, .1, .1], ''),
])  # fmt: skip
def test_the_query_leaves_out_what_is_improbable(probabilities, query):
  assert flare.unsure_query(span('Ada B. x', probabilities), 'Ada B.', 0.8, 0.4) == query


# IRCoT: a sentence a call, the sentence as the next query, the cap on documents, the stop, the reader.

def test_thoughts_are_queries_and_a_reader_answers(tmp_path):
  said = ['It is a play. The', ' Ada wrote it.', 'So the answer is: Bob.', 'Ada']
  tree, requests, _ = ask(ircot, tmp_path, said, found=by_query, stops=['. ', 'end', 'end', 'end'],
                          max_tokens=33)
  first, second, third = (f'Doc {i}(Title: {title}) text\n'
                          for i, title in enumerate((Q, 'It is a play.', 'Ada wrote it.'), 1))
  assert shown(requests) == [
    (Q,), f'reason {first}{Q}:',
    ('It is a play.',), f'reason {first}{second}{Q}:It is a play.',
    ('Ada wrote it.',), f'reason {first}{second}{third}{Q}:It is a play. Ada wrote it.',
    f'read {first}{second}{third}{Q}:',  # the reader does not see the chain
  ]  # fmt: skip
  assert '. ' in requests[1].stop
  assert {one.max_tokens for one in requests if isinstance(one, Generate)} == {33}
  assert [node.text for node in tree.nodes(Role.CONTEXT)] == ['It is a play.', 'It is a play. Ada wrote it.']
  assert (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)


@pytest.mark.parametrize('named', [True, False])
def test_documents_accumulate_once_each_up_to_the_cap(named, tmp_path):
  """Whether the server names them or not, as Search-R1's does not."""
  given = lambda *numbers: [document(n) if named else dataclasses.replace(document(n), id='') for n in numbers]
  found = iter([given(1, 2), given(2, 3, 4)])
  said = ['a b.', 'c d.', 'e f.', 'Ada']
  tree, requests, _ = ask(ircot, tmp_path, said, found=lambda _: next(found), max_documents=3, max_thoughts=3)
  # at the cap nothing is searched for
  assert len([one for one in shown(requests) if isinstance(one, tuple)]) == 2
  read = ''.join(f'Doc {i}(Title: T{i}) text {i}\n' for i in (1, 2, 3))
  assert shown(requests)[-1] == f'read {read}{Q}:'
  assert ircot.grow.__kwdefaults__['max_documents'] == 15


def test_without_a_reader_the_chain_answers(tmp_path):
  tree, requests, _ = ask(ircot, tmp_path, ['So the answer is: Bob.'], reader=False)
  assert tree.answer == 'Bob' and len(requests) == 2
  tree, requests, _ = ask(ircot, tmp_path, ['Hm, hm.'] * 2, reader=False, max_thoughts=2)
  assert tree.answer is None and tree.stop is Stop.MALFORMED


# Iter-RetGen: the rounds, their queries, and what each round is shown.

@pytest.mark.parametrize('reason, call', [(True, 'reason'), (False, 'read')])
def test_each_round_searches_for_the_question_and_the_last_answer(reason, call, tmp_path):
  said = ['The answer is Bob.', 'The answer is Ada', 'So the answer is: Eve.']
  tree, requests, _ = ask(iter_retgen, tmp_path, said, found=by_query, reason=reason)
  queries = [Q, f'{Q} The answer is Bob.', f'{Q} The answer is Ada']  # the last answer alone, not all of them
  assert shown(requests) == [one for query in queries
                             for one in ((query,), f'{call} Doc 1(Title: {query}) text\n{Q}:')]
  assert tree.answer == 'Eve' and tree.metrics['searches'] == 3


# ReAct: thought, action, observation; searches, lookups, the end; a policy that writes tags.

FINISH = ' I know.\nAction 2: Finish[Ada]\n'


@pytest.mark.parametrize('ends, head', [('\n', 'Observation'), ('', '\nObservation'), ('\nObservation', '')])
def test_the_trace_of_react(ends, head, tmp_path):
  said = f' Hm.\nAction 1: Search[ the author ]{ends}'
  tree, requests, _ = ask(react, tmp_path, [said, FINISH], found=[document(1)], max_tokens=30)
  assert shown(requests) == [
    f'act {Q}:', ('the author',), f'act {Q}:{said}{head} 1: Doc 1(Title: T1) text 1\nThought 2:']
  assert requests[0].stop == (']\n', '\nObservation') and requests[0].max_tokens == 30
  assert (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)


def test_a_lookup_goes_through_what_was_found(tmp_path):
  found = [Document('1', 'T', 'Ada was born. Bob was not.'), Document('2', 'U', 'Later Ada wrote it.')]
  said = ['Search[a]', 'Lookup[ada]', 'Lookup[ada]', 'Lookup[ada]', 'Lookup[Bob]', 'Finish[x]']
  tree, _, observations = ask(react, tmp_path, said, found=found)
  assert [one.split(': ', 1)[1].strip() for one in observations[1:]] == [
    'Ada was born.', 'Later Ada wrote it.', 'No more results.', 'Bob was not.']
  assert tree.metrics['searches'] == 1


def test_an_unknown_action_is_told_and_costs_a_step(tmp_path):
  tree, _, observations = ask(react, tmp_path, ['Hm.', 'Search[ ]', 'Action: Finish[]'])
  assert all('That is no action' in one for one in observations)
  assert (tree.metrics['malformed'], len(observations), tree.stop) == (3, 2, Stop.MALFORMED)


def test_a_policy_may_write_tags(tmp_path):
  tree, requests, observations = ask(react, tmp_path, [SEARCH, ANSWER], tagged=True, max_steps=2)
  assert tree.answer == 'Ada'
  assert observations == ['\n<information>Doc 1(Title: Title) text\n</information>\n']


# Search-o1: documents are read in a call of their own, repeated queries are refused, searches and turns are limited.

TAGGED = 'So <answer> Ada </answer>'


def search(query):
  return f'hm <search> {query} </search>'


def test_a_search_is_served_even_where_a_thought_says_what_the_answer_is(tmp_path):
  tree, *_ = ask(search_o1, tmp_path, [f'I doubt that the answer is Bo. {search("it")}', TAGGED], found=by_query, extract=False)
  assert (tree.answer, tree.metrics['searches']) == ('Ada', 1)


def test_documents_are_read_before_they_enter_the_chain(tmp_path):
  tree, requests, observations = ask(search_o1, tmp_path, [search('it'), 'By <b>Ada</b>. </search>', TAGGED],
                                     found=by_query,
                                     max_searches=4, max_tokens=50, extract_tokens=20)
  assert shown(requests) == [
    f'search 4 {Q}:', ('it',),
    # a call of its own, which sees the reasoning
    'hm (search> it (/search> | it Doc 1(Title: it) text\n:',
    # and the chain sees only what it wrote
    f'search 4 {Q}:{search("it")}\n<information>By Ada .</information>\n',
  ]  # fmt: skip
  assert [one.max_tokens for one in requests if isinstance(one, Generate)] == [50, 20, 50]
  assert observations == ['Doc 1(Title: it) text\n']
  assert [node.role for node in tree.leaves()[0].path()][-2] is Role.CONTEXT
  assert (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)


def test_a_repeated_query_is_refused(tmp_path):
  tree, requests, observations = ask(search_o1, tmp_path, [search('it'), 'x', search(' IT '), TAGGED],
                                     found=by_query)
  assert search_o1.REPEATED in observations[0] and tree.metrics['searches'] == tree.metrics['refused'] == 1


def test_searches_are_limited(tmp_path):
  said = [search('a'), search('b'), search('c'), search('a'), TAGGED]
  tree, requests, observations = ask(search_o1, tmp_path, said, found=by_query, max_searches=2, extract=False)
  assert [search_o1.LIMITED in one for one in observations] == [False, False, True, False]
  assert search_o1.REPEATED in observations[3]
  assert tree.metrics['searches'] == tree.metrics['refused'] == 2 and tree.answer == 'Ada'


@pytest.mark.parametrize('last, stop, malformed', [(search('b'), Stop.BUDGET, 0), ('hm', Stop.MALFORMED, 1)])
def test_turns_are_limited_and_a_span_without_an_action_ends_the_chain(last, stop, malformed, tmp_path):
  tree, requests, _ = ask(search_o1, tmp_path, [search('a'), last], found=by_query, max_turns=2,
                          extract=False)
  assert (tree.answer, tree.stop, tree.metrics['searches']) == (None, stop, 1)
  assert tree.metrics['malformed'] == malformed
  with pytest.raises(Refused, match='grow.max_turns=0'):
    ask(search_o1, tmp_path, [], found=by_query, max_turns=0)


# SuRe: candidates, a summary for each, validity and ranking in both orders, and the sum of both.

DOCUMENT = 'Doc 1(Title: T1) text 1\n'
VERDICTS = list(itertools.product(['True', 'no'], ['true.', 'False'], *[['Passage 1', 'passage 2', '?']] * 2))


def test_what_sure_asks(tmp_path):
  said = ['(a) Ada, (b) Bob Roe.', 'sum A', ' sum B ', 'True', 'False', 'Passage 1', 'Passage 2']
  tree, requests, _ = ask(sure, tmp_path, said, found=[document(1)], max_tokens=9, summary_tokens=77)
  assert shown(requests) == [
    (Q,), f'two {DOCUMENT}{Q}:', f'for Ada {DOCUMENT}{Q}:', f'for Bob Roe {DOCUMENT}{Q}:',
    f'sum A supports Ada {Q}?', f'sum B supports Bob Roe {Q}?', f'1 sum A 2 sum B {Q}?',
    f'1 sum B 2 sum A {Q}?',
  ]  # fmt: skip
  assert [one.max_tokens for one in requests[1:]] == [9, 77, 77, 8, 8, 8, 8]
  assert tree.answer == 'Ada' and tree.root.data['scores'] == {'Ada': 2.0, 'Bob Roe': 0.0}


@pytest.mark.parametrize('verdicts', VERDICTS)
def test_the_sum_of_verdicts_decides(verdicts, tmp_path):
  valid, ranked = verdicts[:2], [{'1': 1, '2': 0, '?': .5}[verdict[-1]] for verdict in verdicts[2:]]
  matrix = np.array([[0, ranked[0]], [ranked[1], 0]])  # [i, j]: whether i wins as the first of i and j
  scores = np.array(['true' in verdict.lower() for verdict in valid]) + matrix.sum(1)
  tree, *_ = ask(sure, tmp_path, ['(a) Ada (b) Bob', 's', 't', *verdicts])
  assert tree.answer == ['Ada', 'Bob'][scores.argmax()]


@pytest.mark.parametrize('said, answer',
                         [('(a) Ada (b) Ada', 'Ada'), ('The answer is Ada.', 'Ada'), ('(a)', '(a)')])
def test_one_candidate_needs_no_judge(said, answer, tmp_path):
  tree, requests, _ = ask(sure, tmp_path, [said])
  assert tree.answer == answer and len(requests) == 2


@pytest.mark.parametrize('name', ['ircot', *(pytest.param(name, marks=pytest.mark.slow)
                                             for name in NAMES if name != 'ircot')])
def test_they_run_on_the_world(name, tmp_path):
  out = tmp_path / 'scores.json'
  assert cli.main(['eval', f'--config=prompted/{name}', '--limit=3', '--config.sampler.slots=4',
                   f'--out={out}']) == 0
  scores = json.loads(out.read_text())
  assert scores['n'] == 3 and (name != 'ircot' or scores['searches'] > 0)
  assert all(record['stop'] for record in scores['predictions'])
