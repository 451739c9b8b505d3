"""The methods in the calls of model families: no method knows a grammar, so each must grow in all of them."""

import dataclasses

import pytest

from jaxsearch.evaluation import rstool
from jaxsearch.methods import carl, cusearch, find_method, r_search, search_r1, search_r2, slate, step_search
from jaxsearch.methods.actions import Action
from jaxsearch.sampler.requests import Generate, RunPython, Score, Search, ToolFailure
from jaxsearch.tools import find_tool
from jaxsearch.trees import grammar, native
from jaxsearch.trees.grammars import Called
from jaxsearch.trees.tree import Role, Stop, spans
from tests.methods import driving
from tests.methods.driving import segments
from tests.trees.speaking import SMALL, small

FAMILIES = list(SMALL)
ANSWER = '<think>hm</think><answer> Ada </answer>'


def drive(family, said, method=search_r1, template='search_r1', tools=('search', 'open'), **settings):
  """Grows a tree for a policy that writes texts, and calls as (name, arguments); a turn that is a tuple is cut off."""
  tokenizer, spans = small(family), []
  malformed = settings.pop('malformed', 'reply')
  names = getattr(method, 'TOOLS', tools)
  speech = native.open_grammar(tokenizer, getattr(method, 'TAGS', grammar.SEARCH_R1),
                               {name: find_tool(name) for name in names}, grammar=family, malformed=malformed)
  for turn in said:
    whole, parts = not isinstance(turn, tuple), turn if isinstance(turn, tuple | list) else [turn]
    text = '; '.join(part if isinstance(part, str) else speech.family.write(*part.popitem()) for part in parts)
    spans.append(tokenizer.encode(text) + [tokenizer.eos_ids[0]] * whole)
  return driving.drive(spans, grow=method.grow, template=template, speech=speech, **settings)


def search(query):
  return {'search': {'query': query}}


def test_calls_of_one_turn_are_served_together_in_order():
  found = lambda request: [driving.FOUND[0].__class__(request.query, request.query, 'text')]
  tree, requests, observations = drive('hermes', [[search('a'), search(['b', 'c'])], ANSWER], found=found)
  assert [type(request) for request in requests] == [Generate, Search, Search, Search, Generate]
  assert [request.query for request in requests[1:4]] == ['a', 'b', 'c']
  assert observations == ['\n<|im_start|>user\n<tool_response>\n[a] a\ntext\n</tool_response>\n<tool_response>\n'
                          '[b] b\ntext\n\n[c] c\ntext\n</tool_response><|im_end|>\n<|im_start|>assistant\n']
  assert (tree.answer, tree.stop, tree.metrics['searches'], tree.metrics['found']) == ('Ada', Stop.ANSWERED, 3, 3)
  assert [document.id for document in segments(tree)[0].data['documents']] == ['a', 'b', 'c']
  of_a_server = [Called('search', {'q': 'x'}), Called('search', {'query': ['a', 7]})]
  assert Action(None, '', of_a_server, None).query == 'a\n7'


@pytest.mark.parametrize('family', FAMILIES)
def test_what_is_wrong_with_a_call_is_said_and_counted(family):
  said = [[{'search': {}}], [{'serach': {'query': 'a'}}], ('I think that',), [search('a')], ANSWER]
  tree, _, observations = drive(family, said, max_turns=6)
  assert 'search(query)' in observations[0] and 'query: ' in observations[0]
  assert 'There is no tool' in observations[1] and 'open(document, line?)' in observations[1]
  assert 'cut off' in observations[2] and 'text' in observations[3]
  counts = {name: count for name, count in tree.metrics.items() if count and name.startswith('malformed')}
  assert counts == {'malformed': 3, 'malformed_arguments': 1, 'malformed_tool': 1, 'malformed_cut': 1}
  assert tree.answer == 'Ada' and tree.metrics['searches'] == 1


def test_a_malformed_call_may_be_the_end():
  tree, requests, observations = drive('hermes', [[{'search': {}}]], malformed='end')
  assert len(requests) == 1 and not observations and tree.stop is Stop.MALFORMED
  assert tree.metrics['malformed_arguments'] == 1
  tree, requests, observations = drive('hermes', [[search('a'), {'search': {}}]], malformed='end')  # one of two
  assert len(requests) == 2 and not observations and tree.stop is Stop.MALFORMED
  tree, requests, observations = drive('hermes', [[search('a'), {'search': {}}]], slate, k=1, rewards='outcome',
                                       malformed='end')
  assert len(requests) == 2 and not observations and tree.stop is Stop.MALFORMED
  tree, requests, _ = drive('hermes', [[{'python': {}}]], carl, 'carl', malformed='end')
  assert len(requests) == 1 and tree.stop is Stop.MALFORMED
  assert tree.metrics['malformed'] == tree.metrics['malformed_arguments'] == 1


def test_a_tool_that_fails_is_said():
  tree, _, observations = drive('hermes', [[search('a')], ANSWER], found=ToolFailure('down <tool_call> <|im_end|>'))
  assert 'The tool failed: down (tool_call> (|im_end|>' in observations[0] and tree.metrics['tool_failures'] == 1


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('name', ['search_r1', 'cusearch', 'r_search', 'research', 'step_search', 'igpo'])
def test_methods_of_one_chain(family, name):
  method = find_method(name)
  template = name if name in ('r_search', 'research', 'step_search') else 'search_r1'
  answer = '<think>x</think><original_evidence>text</original_evidence><answer>\\boxed{Ada}</answer>'
  tree, requests, _ = drive(family, [[search('a')], answer], method, template, asked='Ada', scored=-1.0)
  assert requests[1].query == 'a' and 'Ada' in tree.answer
  assert [node.role for node in tree.nodes(Role.OBSERVATION)] and tree.metrics['searches'] == 1
  if name == 'cusearch':
    assert cusearch.reward(tree, weight=1.0) == 1.0
  if name == 'r_search':
    assert tree.metrics['evidence_f1'] > 0 and r_search.reward(tree) > 1


@pytest.mark.parametrize('answer, earns', [('So it is <answer>Ada</answer>', True), ('<answer>Ada</answer>', False)])
def test_a_thought_of_step_search_needs_no_tags(answer, earns):
  tree, *_ = drive('llama3', [[search('a')], answer], find_method('step_search'), 'step_search')
  assert (step_search.reward(tree) > 0) == earns


def test_the_format_needs_calls_and_an_answer_in_tags():
  form = lambda said: cusearch.reward(drive('hermes', said, cusearch)[0], weight=1.0)
  assert form([[search('a')], 'Ada']) == 0 and form([[{'search': {}}], ANSWER]) == 0 and form([ANSWER]) == 1


@pytest.mark.parametrize('family', FAMILIES)
def test_slate_compares_turns(family):
  asked = lambda request: 1 if 'query' in type(request.item).__name__.lower() else 0  # searches are best
  tree, requests, _ = drive(family, [[search('a')], [search('b')], ('no',), ANSWER, ANSWER, 'Bo'], slate, k=3, budget=2,
                            asked=asked, best=True)
  assert [request.query for request in requests if isinstance(request, Search)] == ['a', 'b']
  assert tree.answer == 'Ada' and len(tree.root.children[0].children) == 3 and tree.metrics['malformed_cut'] == 1
  assert tree.metrics['searches'] == 1


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('name', ['tree_grpo', 'trace'])
def test_chains_branch_at_turns(family, name):
  method = find_method(name)
  tree, requests, _ = drive(family, [[search('a')], ANSWER, 'Bo', ANSWER], method)
  first, *others = tree.root.children[0].children
  assert len(others) == 2 and sum(isinstance(request, Search) for request in requests) == 1
  method.credit([[tree]], driving.context())
  assert [node.data['answered'] for node in (first, *others)] == [1, 1, 1]
  assert tree.answer == 'Ada' and all(node.advantages is not None for node in segments(tree))


@pytest.mark.parametrize('family', FAMILIES)
def test_search_r2_cuts_at_a_turn_and_reviews_in_a_turn_of_the_user(family):
  scored = lambda request: [[-5.0 if place == 0 else -60.0 * (place > 1)] for place in range(len(request.continuations))]
  tree, requests, _ = drive(family, [[search('a')], 'no', [search('b')], ANSWER], search_r2, scored=scored,
                            review='search_r2', refiner='policy', asked=1, max_turns=3)
  review = next(request.node for request in requests if isinstance(request, Score))
  frames = tree.grammar.frames
  assert review.text.startswith(frames.user[0]) and review.text.endswith(frames.user[1])
  assert tree.answer == 'Ada' and tree.metrics['revised'] == 1
  kept = next(node for node in segments(tree) if tree.answer in node.text)
  assert [request.query for request in requests if isinstance(request, Search)] == ['a', 'b']
  assert [node.role for node in kept.path()[:3]] == [Role.ROOT, Role.PROMPT, Role.POLICY] and len(kept.path()) == 5


@pytest.mark.parametrize('family', FAMILIES)
def test_carl_runs_the_python_tool_and_forgets_its_output(family):
  said = [[{'python': {'code': 'print(1)'}}], ('<context> It is 1. </context>',), [{'python': {}}],
          ('<context> </context>',), '\\boxed{Ada}']
  tree, requests, observations = drive(family, said, carl, 'carl', printed='raw <|eot_id|>output')
  programs = [request.code for request in requests if isinstance(request, RunPython)]
  assert programs == ['print(1)'] and tree.answer == 'Ada' and tree.metrics['malformed_arguments'] == 1
  copies = tree.nodes(Role.CONTEXT)
  assert copies[0].text == tree.grammar.observe(copies[0].parent, [(None, '<context>It is 1.</context>')])
  last = next(node for node in segments(tree) if node.data['segment'] == 'commit')
  assert 'raw' in observations[0] and all('raw' not in node.text for node in last.path())
  assert [node.data['segment'] for node in segments(tree)] == ['invoke', 'assimilate', 'invoke', 'assimilate', 'commit']


@pytest.mark.parametrize('first, last', [
  ('I quote in <original_evidence> and end with <answer> tags.', 'Found.'), ('I search.', 'Now <answer>.')])
def test_tags_that_a_thought_names_are_no_boxes(first, last):
  end = f'<think>{last}</think>\n<original_evidence>text</original_evidence>\n<answer>Ada Lovelace</answer>'
  said = [[f'<think>{first}</think>\n', search('ada')], end]
  tree, _, _ = drive('hermes', said, r_search, 'r_search', asked='Ada Lovelace')
  tree.question = dataclasses.replace(tree.question, golden_answers=('Ada Lovelace',))
  assert r_search.reward(tree) == pytest.approx(1 + tree.metrics['evidence_f1'] + 0.4)
  assert not tree.metrics['evidence_unfounded']
  assert rstool.evidence_of({'spans': spans(tree)}) == {'evidence': 'text', 'forfeited': False}


def test_carl_takes_no_context_and_no_answer_from_a_thought():
  said = [[{'python': {'code': "print(search('x'))"}}],
          ('<think>I copy it into <context>…</context>',), (' tags.</think>\n<context>Ada wrote it.</context>',),
          '<think>Is it \\boxed{Ada}?</think>\nI cannot tell.']
  tree, _, _ = drive('hermes', said, carl, 'carl', printed='Ada wrote it')
  kept = [node.data['context'] for node in tree.walk() if node.data.get('segment') == 'assimilate']
  assert kept == ['Ada wrote it.'] and tree.answer is None
