"""Folded chains: what the policy sees, what is trained, what is counted and shown, in tags and in native calls."""

import contextlib
import functools
import json

import numpy as np
import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.methods import cusearch, r_search, search_r1
from jaxsearch.methods.folding import DROPPED, REQUEST, folding, thinned
from jaxsearch.sampler import chat_policy
from jaxsearch.sampler.requests import Generate
from jaxsearch.trees import grammar, native
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role, Tree, spans
from tests.methods.driving import ANSWER, QUESTION, SEARCH, Letters, context, drive
from tests.methods.test_native import FAMILIES, drive as drive_native, search
from tests.trees.speaking import small

NOTES = '<context> It is by Ada. </context>'


def folded(fold, length, *, fold_at=0.5, fold_tokens=40, grow=search_r1.grow):
  """A method that folds in a context of `length` tokens."""
  @functools.wraps(grow)
  def wrapped(question, tree, **settings):
    tree.length = length
    return folding(grow, question, tree, fold=fold, fold_at=fold_at, fold_tokens=fold_tokens, **settings)
  return wrapped


def lone(grow):
  return type('method', (), {'grow': staticmethod(grow)})


def test_a_summary_is_written_while_all_is_seen_and_takes_the_place_of_it():
  found = lambda request: [Document('1', 'Title', 'Ada Lovelace wrote it. ' * 6 * (len(request.node.path()) < 4))]
  tree, requests, _ = drive([SEARCH, NOTES, SEARCH, ANSWER], found, grow=folded('summary', 500, fold_at=0.4))
  prompt, written = tree.root.children[0], tree.nodes(Role.POLICY)
  first, summary, second, last = written
  assert [child.role for child in prompt.children] == [Role.POLICY, Role.CONTEXT]
  assert summary.parent.text == REQUEST and summary.parent.parent.text.startswith('\n<information>')
  assert [node.role for node in second.path()] == [Role.ROOT, Role.PROMPT, Role.CONTEXT, Role.POLICY]
  assert second.parent.text == '<context>It is by Ada.</context>\n' and all(node.trained for node in written)
  asked = [request for request in requests if isinstance(request, Generate)]
  assert [request.forgets for request in asked] == [False, False, True, False]
  assert all(request.node.length + request.max_tokens <= 500 for request in asked)
  assert (tree.answer, tree.metrics['searches'], tree.metrics['folds']) == ('Ada', 2, 1)
  assert tree.metrics['tokens_saved'] == summary.parent.parent.length - second.parent.length
  assert tree.metrics['answers_lost'] == 1  # 'Ada' is no gold answer, 'Ada Lovelace' was one
  assert tree.turns() == [first, second, last]
  search_r1.credit([[tree, drive([ANSWER])[0]]], context())
  assert len({node.advantages for node in written}) == 1


def test_the_oldest_results_are_dropped_and_no_thought_or_call():
  long = [Document('1', 'Title', 'text ' * 30)]
  tree, requests, _ = drive([SEARCH, SEARCH.replace('hm', 'so'), SEARCH, ANSWER], long, grow=folded('oldest', 900))
  last = tree.turns()[-1].path()
  assert [node.role.value for node in last[2:]] == [
    'policy', 'observation', 'context', 'observation', 'context', 'observation', 'policy']
  assert all(DROPPED in last[place].text and 'text' not in last[place].text for place in (3, 5))
  assert last[4].text == SEARCH.replace('hm', 'so') and 'text text' in last[7].text
  assert tree.metrics['folds'] == 2 and tree.metrics['tokens_saved'] > 200
  assert [node.text for node in tree.turns()] == [SEARCH, SEARCH.replace('hm', 'so'), SEARCH, ANSWER]
  assert sum(node.trained for node in tree.walk()) == 4


def test_the_oldest_go_first_and_no_more_than_it_takes():
  tree, _, _ = drive([SEARCH] * 3 + [ANSWER], [Document('1', 'Title', 'text ' * 30)])
  last = tree.nodes(Role.OBSERVATION)[-1]
  seen = [node for node in thinned(last, last.length - 100).path() if node.role is Role.OBSERVATION]
  assert [DROPPED in node.text for node in seen] == [True, False, False]


def test_fifty_turns_in_2048_tokens():
  """No path is longer, every token that was written is trained once, and trees of one question are merged."""
  rng, trees = np.random.default_rng(0), []
  for _ in range(2):
    turns = iter([*(f'<think>{"so " * rng.integers(1, 60)}</think><search> {turn} </search>' for turn in range(49)), ANSWER])
    tree = Tree(Letters(), QUESTION)
    growth, reply = folded('summary', 2048, fold_at=0.6)(QUESTION, tree, template='world', max_turns=60), None
    with contextlib.suppress(StopIteration):
      while request := growth.send(reply):
        reply = [[Document('1', 'Title', 'text ' * 60)]]
        if isinstance(request, Generate):
          said = NOTES if '</context>' in request.stop else next(turns)
          assert request.node.length + len(said) <= 2048 and len(said) <= request.max_tokens
          reply = request.node.append(said, Role.POLICY, sampler_logprobs=[-1.0] * len(said))
    trees.append(tree)
  rows = lay_out(trees, 4096, pad_id=0, share_trained=False)
  assert all(tree.answer == 'Ada' and len(tree.turns()) == 50 and tree.metrics['folds'] > 9 for tree in trees)
  assert rows.spans.sum() == sum(tree.count(Role.POLICY) for tree in trees) and rows.spans.max() == 1
  assert rows.real.sum() < sum(leaf.length for tree in trees for leaf in tree.leaves())


@pytest.mark.parametrize('family', FAMILIES)
def test_in_native_calls_the_request_is_a_turn_of_the_users(family):
  """What the policy sees is the conversation as its template renders it; the turn that was opened is not there."""
  grow = folded('summary', 2000, fold_at=0.1, fold_tokens=100)
  said = [[search('a')], (NOTES,), [search('a')], (NOTES,), 'Ada']
  tree, requests, _ = drive_native(family, said, lone(grow), tools=('search',))
  frames, seen = tree.grammar.frames, [request.node for request in requests if isinstance(request, Generate)]
  first, asked, resumed = seen[:3]
  observed = asked.parent
  assert tree.metrics['folds'] == 2 and tree.answer == 'Ada'
  assert asked.text == frames.end + REQUEST.strip().join(frames.user)
  assert not observed.text.endswith(frames.user[1]) and frames.results[0] in observed.text
  prompt = ''.join(node.text for node in first.path())
  notes = '<context>It is by Ada.</context>'
  assert ''.join(node.text for node in resumed.path()) == (
    prompt.removesuffix(frames.user[1]) + frames.end + notes.join(frames.user))
  assert ''.join(node.text for node in seen[4].path()) == ''.join(node.text for node in resumed.path())
  tree.prune()
  assert [leaf.role for leaf in tree.leaves()] == [Role.POLICY] * 3
  for leaf in tree.leaves():  # split spans are the ids of the whole text
    whole = tree.tokenizer.encode(''.join(node.text for node in leaf.path() if node.role is not Role.POLICY))
    assert len(whole) == sum(len(node.tokens) for node in leaf.path() if node.role is not Role.POLICY)


@pytest.mark.parametrize('family', FAMILIES)
def test_results_in_native_calls_are_dropped(family):
  long = [Document('1', 'Title', 'text ' * 60)]
  grow = folded('oldest', 1000, fold_at=0.3)
  said = [[search('a'), *[search('b')] * (family == 'hermes')], [search('a')], [search('a')], 'Ada']
  tree, _, _ = drive_native(family, said, lone(grow), tools=('search',), found=long)
  old = next(node for node in tree.walk() if 'fold' in node.data)
  results = [(None, DROPPED)] * (2 if family == 'hermes' else 1)
  assert old.text == tree.grammar.observe(old.parent, results) and tree.metrics['folds'] >= 1


@pytest.mark.parametrize(('said', 'notes'), [
  ('<context> half', 'half'), ('I know it.', 'I know it.'), ('<search> more </search>', '(search> more (/search>'), ('', None)])
def test_any_summary_leaves_a_tree_that_trains(said, notes):
  tree, _, _ = drive([SEARCH, said, ANSWER], grow=folded('summary', 500, fold_at=0.2))
  copies = [node.text for node in tree.nodes(Role.CONTEXT)]
  assert copies == ([f'<context>{notes}</context>\n'] if notes else []) and tree.answer == 'Ada'
  assert tree.metrics['folds'] == bool(notes)
  tree.prune()
  for node in tree.nodes(Role.POLICY):
    node.advantages, node.sampler_logprobs = 1.0, [-1.0] * len(node.tokens)
  rows = lay_out([tree], 500, pad_id=0)
  assert rows.spans.sum() == tree.count(Role.POLICY)


def test_formats_are_of_turns_and_a_folded_tree_is_saved():
  for method, answer in ((cusearch, ANSWER), (r_search, '<original_evidence>e</original_evidence><answer>Ada</answer>')):
    said = ['<think>x</think><search> a </search>', NOTES, f'<think>x</think>{answer}']
    tree, _, _ = drive(said, grow=folded('summary', 600, fold_at=0.15, grow=method.grow), asked='Ada')
    plain, _, _ = drive([said[0], said[2]], grow=method.grow, asked='Ada')
    assert tree.metrics['folds'] == 1 and method.reward(tree) == method.reward(plain)
  again = Tree.from_json(json.loads(json.dumps(tree.to_json())), tree.tokenizer, tree.question, tree.grammar)
  assert again.to_json() == tree.to_json()


def test_what_was_folded_is_shown_where_it_was():
  tree, _, _ = drive([SEARCH, NOTES, SEARCH, NOTES, ANSWER], grow=folded('summary', 500, fold_at=0.2))
  shown = spans(tree)
  assert [span.get('segment', span['role']) for span in shown] == [
    'prompt', 'policy', 'observation', 'prompt', 'summary', 'context', 'policy', 'observation', 'prompt', 'summary',
    'context', 'policy']
  assert [place for place, span in enumerate(shown) if span.get('folded')] == [*range(1, 10)]
  assert [(place, span['after']) for place, span in enumerate(shown) if 'fold' in span] == [(5, 0), (10, 0)]
  assert not any('parent' in span or 'dropped' in span for span in shown)


def test_a_chat_server_gets_notes_from_the_user_and_its_own_turns_back():
  speech = native.open_grammar(small('hermes'), grammar.SEARCH_R1, {}, grammar='server')
  tree = Tree(speech.tokenizer, QUESTION, grammar=speech)
  prompt = tree.root.append('Q', Role.PROMPT)
  call = speech.said({'content': 'hm', 'tool_calls': [{'function': {'name': 'search', 'arguments': '{"query": "a"}'}}]})
  notes = prompt.append(speech.resume(prompt, 'It is.'), Role.CONTEXT)
  assert chat_policy.messages(notes) == [{'role': 'user', 'content': 'Q<context>It is.</context>'}]
  turn = prompt.append(call, Role.POLICY)
  result = turn.append(speech.observe(turn, [(None, 'r')]), Role.OBSERVATION)
  again = result.append(call, Role.CONTEXT).append('\n<tool_response>\nr\n</tool_response>\n', Role.OBSERVATION)
  assert [message['role'] for message in chat_policy.messages(again)] == ['user', *['assistant', 'tool'] * 2]


def test_no_fold_changes_nothing():
  for settings in ({'fold': 'never'}, {'fold': 'summary', 'fold_at': 0.9}):
    grow = functools.partial(folding, search_r1.grow, **settings)
    tree, requests, _ = drive([SEARCH, ANSWER], grow=grow)
    plain, others, _ = drive([SEARCH, ANSWER])
    assert [node.tokens for node in tree.walk()] == [node.tokens for node in plain.walk()] and len(requests) == len(others)
