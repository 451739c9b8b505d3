"""The sampler against a naive loop, against the trainer, and against itself under other schedules."""

import dataclasses
import functools
import random
import time

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxsearch.data.questions import Question
from jaxsearch.methods import folding, search_r1
from jaxsearch.models.architecture import INPUTS
from jaxsearch.models.decoder import hidden_states
from jaxsearch.models.vocabulary import target_logprobs
from jaxsearch.sampler import engine as engine_module
from jaxsearch.sampler.requests import LENGTH, Generate, Score, Search, ToolFailure
from jaxsearch.trees import grammar, grammars
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role, Stop, Tree

PROMPTS = ['Question: what is the capital of France?', 'Question: who?', 'Doc 1: it is a city, but which one is it?']


def chain(tree, prompt, turns=2, tokens=12):
  """A rollout of several turns, each followed by a search."""
  node = tree.root.append(prompt, Role.PROMPT)
  for turn in range(turns):
    node = yield Generate(node, stop=('</search>',), max_tokens=tokens + 5 * (turn % 2))
    if turn < turns - 1:
      found = yield Search(node, f'{prompt} {turn}')
      text = grammar.information([] if isinstance(found, ToolFailure) else found, ())
      node = node.append(text, Role.OBSERVATION)
  tree.stop = Stop.BUDGET


def run(engine, growths, key=0, **settings):
  """Runs growth functions of a tree; returns the trees and the metrics."""
  trees = [Tree(engine.tokenizer) for _ in growths]
  return trees, engine.run([(grow(tree), tree) for grow, tree in zip(growths, trees)], jax.random.key(key), **settings)


def chains(prompts, **settings):
  return [lambda tree, prompt=prompt: chain(tree, prompt, **settings) for prompt in prompts]


def spans(trees):
  return [[(node.tokens, node.sampler_logprobs, node.stop) for node in tree.nodes(Role.POLICY)] for tree in trees]


def tokens_of(trees):
  return [[node.tokens for node in tree.nodes(Role.POLICY)] for tree in trees]


def test_the_cache_is_made_after_load_whose_caller_still_holds_what_it_gave(make_engine, params):
  held = lambda: sum(x.nbytes for x in jax.live_arrays())
  engine = make_engine()
  run(engine, chains(PROMPTS[:1], turns=1))
  engine.unload(cache=True)
  before = held()
  engine.load(params)
  loaded = held()
  engine.start_rollout()
  assert before < loaded < held()


def assert_computed(node, next_logprobs, eos, greedy=False):
  """The log-probabilities are those of a loop that computes everything anew for each token, which chooses these if greedy."""
  path = node.parent.path_tokens()
  for token, logprob in zip(node.tokens, node.sampler_logprobs, strict=True):
    expected = next_logprobs(path)
    assert logprob == pytest.approx(expected[token], abs=1e-4)
    assert token == int(expected.argmax()) or not greedy
    path.append(token)
  assert node.stop == LENGTH or node.tokens[-1] in eos or node.text.endswith('</search>')


def test_greedy_equals_full_recomputation(make_engine, next_logprobs, tokenizer):
  trees, _ = run(make_engine(temperature=0.0), chains(PROMPTS))
  for tree in trees:
    for node in tree.nodes(Role.POLICY):
      assert_computed(node, next_logprobs, tokenizer.eos_ids, greedy=True)


def test_rows_depend_neither_on_batch_mates_nor_on_refill_order(make_engine):
  prompts = PROMPTS * 3
  few, _ = run(make_engine(slots=2), chains(prompts))
  many, _ = run(make_engine(slots=5, enough=1), chains(prompts))
  assert tokens_of(few) == tokens_of(many)
  other_mates, _ = run(make_engine(enough=2), chains(prompts[:4] + ['something else'] * 4))
  assert tokens_of(other_mates)[:4] == tokens_of(few)[:4]
  other_key, _ = run(make_engine(), chains(prompts), key=1)
  assert tokens_of(other_key) != tokens_of(few)
  same_prompt = [tokens for prompt, tokens in zip(prompts, tokens_of(few)) if prompt == PROMPTS[0]]
  assert same_prompt[0] != same_prompt[1]  # two rollouts of one question are different


def test_captured_logprobs_are_those_of_the_trainer(make_engine, config, params):
  """Over the training layout, on a branching tree with a span that was scored and not sampled, at a temperature other than 1."""
  def grow(tree):
    node = tree.root.append(PROMPTS[0], Role.PROMPT)
    _, scored = yield Score(node, ('yes', ' no'))
    node.append(' no', Role.POLICY, sampler_logprobs=scored)
    first, second = yield [Generate(node, max_tokens=9), Generate(node, max_tokens=14)]
    yield Generate(first.append(PROMPTS[2], Role.OBSERVATION), max_tokens=11)
    yield Generate(second.append(PROMPTS[1], Role.OBSERVATION), max_tokens=11)

  trees, _ = run(make_engine(temperature=0.7), [grow] * 5)
  captured, expected = logprobs_of(trees, config, params, temperature=0.7)
  assert len(captured) == sum(tree.count(Role.POLICY) for tree in trees)
  np.testing.assert_allclose(captured, expected, atol=1e-4)


def logprobs_of(trees, config, params, temperature):
  """The log-probabilities of sampled tokens as captured, and by a trainer with these parameters."""
  rows = lay_out(trees, 256, pad_id=0)
  hidden = hidden_states(config, params, rows.tokens, rows.positions, rows.visible_until)
  states = np.take_along_axis(np.asarray(hidden), rows.previous[..., None], axis=1)
  logprobs, _ = target_logprobs(params, states, rows.tokens, temperature=temperature)
  trained = rows.loss_weights > 0
  return rows.sampler_logprobs[trained], np.asarray(logprobs)[trained]


@pytest.mark.parametrize(('weights', 'gap'), [('int8', 0.05), ('fp8', 0.2)])
def test_weights_of_8_bits_are_those_that_sample(make_engine, config, params, weights, gap):
  """Each output has 127 steps of its own on either side of 0, or three bits behind the first."""
  trees, _ = run(make_engine(weights=weights), chains(PROMPTS * 2))
  captured, full = logprobs_of(trees, config, params, temperature=1.0)
  print(np.abs(captured - full).mean(), np.abs(captured - full).max())
  assert 1e-3 < np.abs(captured - full).mean() < gap

  def rounded(name, w):
    inputs = tuple(range(1, 1 + INPUTS[name]))
    scale = np.abs(w).max(inputs, keepdims=True) / (127 if weights == 'int8' else 448)
    return scale * (np.rint(w / scale) if weights == 'int8' else (w / scale).astype(ml_dtypes.float8_e4m3fn))

  layers = {name: rounded(name, np.asarray(w)) if name in INPUTS else w for name, w in params['layers'].items()}
  captured, expected = logprobs_of(trees, config, params | {'layers': layers}, temperature=1.0)
  np.testing.assert_allclose(captured, expected, atol=2e-3)  # a weight between two steps may be rounded to either


def test_on_a_cpu_a_bfloat16_policy_is_sampled_in_float32(make_engine, config, params, monkeypatch):
  monkeypatch.setattr(engine_module, 'dtype_on_cpu', lambda dtype: 'float32')
  rounded = jax.tree.map(lambda x: x.astype('bfloat16').astype('float32'), params)  # as training rounds them
  lower, _ = run(make_engine(config=dataclasses.replace(config, dtype='bfloat16')), chains(PROMPTS))
  same, _ = run(make_engine(params=rounded), chains(PROMPTS))
  assert spans(lower) == spans(same)


def test_where_a_cpu_multiplies_bfloat16_the_sampler_does_too(make_engine, config, params, monkeypatch):
  monkeypatch.setattr(engine_module, 'dtype_on_cpu', lambda dtype: dtype)
  config = dataclasses.replace(config, dtype='bfloat16')
  trees, _ = run(make_engine(config=config), chains(PROMPTS * 2))
  captured, trained = logprobs_of(trees, config, params, temperature=1.0)
  rounded = jax.tree.map(lambda x: x.astype('bfloat16').astype('float32'), params)
  _, exact = logprobs_of(trees, dataclasses.replace(config, dtype='float32'), rounded, temperature=1.0)
  gap = lambda other: np.abs(captured - other).mean()
  print(gap(trained), gap(exact), np.abs(trained - exact).mean())
  assert 1e-4 < gap(exact) < 0.02
  assert gap(trained) < 0.02



def test_fork_and_rewind_continue_as_a_fresh_prefill(make_engine, next_logprobs, tokenizer):
  """Siblings from one node, then on from a sibling, then from an ancestor; nothing cached is computed again."""
  prompt = PROMPTS[2] + ' ' + PROMPTS[0]

  def grow(tree):
    node = tree.root.append(prompt, Role.PROMPT)
    siblings = yield [Generate(node, max_tokens=6 + i) for i in range(3)]
    last = yield Generate(siblings[1].append(PROMPTS[1], Role.OBSERVATION), max_tokens=8)
    again = yield Generate(node.append(PROMPTS[0], Role.OBSERVATION), max_tokens=8)   # forgets all of that
    tree.root.data['spans'] = [last, again]

  trees, metrics = run(make_engine(), [grow])
  for node in trees[0].root.data['spans']:
    assert_computed(node, next_logprobs, tokenizer.eos_ids)
  size = {text: len(tokenizer.encode(text)) for text in (prompt, *PROMPTS)}
  # each extension begins with the token sampled last; a rewind does not even need the last one of the prompt again
  assert metrics['tokens_prefilled'] == (size[prompt] - 1) + size[PROMPTS[1]] + (size[PROMPTS[0]] - 1)
  assert metrics['tokens_reused'] >= 2 * (size[prompt] - 1)
  siblings = trees[0].nodes(Role.PROMPT)[0].children[:3]
  assert len({tuple(node.tokens[:6]) for node in siblings}) == 3     # drawn independently of each other


def test_nothing_compiles_after_compile_all_and_nothing_is_copied_unasked(make_engine, compiled):
  engine = make_engine()
  engine.compile_all(score=True)

  def scored(tree):
    node = tree.root.append(PROMPTS[0], Role.PROMPT)
    yield [Score(node, ('yes', ' no')), Generate(node)]

  growths = chains(PROMPTS * 3, turns=3) + [scored] * 2
  trees = [Tree(engine.tokenizer) for _ in growths]
  key = jax.random.key(3)
  compiled.clear()
  jax.jit(lambda x: x + 3)(1.0)
  assert len(compiled) == 1  # they are heard
  with jax.transfer_guard('disallow'):
    metrics = engine.run([(grow(tree), tree) for grow, tree in zip(growths, trees)], key)
  assert len(compiled) == 1
  assert metrics['tokens_reused'] > 0 and metrics['tokens_decoded'] > 100 and metrics['tool_calls'] == 18


class SlowSearch:
  """Replies after `seconds()`."""

  def __init__(self, backend, seconds):
    self.backend, self.seconds = backend, seconds

  def search(self, queries, topk=3):
    time.sleep(self.seconds())
    return self.backend.search(queries, topk)


def test_random_sleeps_in_the_tool_change_nothing_to_the_bit(make_engine):
  """Not the tokens, not the training rows: and the gradient is a function of those and the parameters."""
  engine = make_engine()
  fast, metrics = run(engine, chains(PROMPTS * 3, turns=3))
  assert metrics['tool_calls'] == 18
  rng = random.Random(0)
  engine.search = SlowSearch(engine.search, lambda: rng.random() * 0.03)
  for _ in range(2):
    slow, _ = run(engine, chains(PROMPTS * 3, turns=3))
    assert spans(slow) == spans(fast)
    one, other = (lay_out(trees, 256, pad_id=0) for trees in (fast, slow))
    assert all(np.array_equal(value, getattr(other, name)) for name, value in vars(one).items() if name != 'places')


def test_an_episode_ends_at_its_deadline(make_engine):
  def grow(tree):
    node = tree.root.append(PROMPTS[0], Role.PROMPT)
    found = yield Search(node, 'x')
    assert isinstance(found, ToolFailure)
    node = yield Generate(node)
    tree.stop = Stop(node.stop)
    assert not node.tokens

  engine = make_engine(deterministic=False, episode_deadline=0.2)
  engine.search = SlowSearch(engine.search, lambda: 3600)
  start = time.monotonic()
  trees, metrics = run(engine, [grow])
  assert trees[0].stop is Stop.DEADLINE and metrics['stop_deadline'] == 1
  assert time.monotonic() - start < 30     # not until the deadline of the tool
  with pytest.raises(ValueError, match='episode_deadline'):
    make_engine(episode_deadline=1.0)


def test_the_context_is_never_exceeded_and_the_question_never_cut(make_engine, tokenizer):
  """A long observation is cut so that an answer still fits; when no room is left the generator is told."""
  question = PROMPTS[2] * 4
  engine = make_engine(max_observation=500, answer_reserve=20, topk=3)

  def grow(tree):
    node = tree.root.append(question, Role.PROMPT)
    node = yield Generate(node, max_tokens=5)
    found = yield Search(node, 'x')
    node = node.append(grammar.information(found, ()), Role.OBSERVATION)
    assert engine.length - 20 - 4 <= node.length <= engine.length - 20     # cut to the character, so to a few tokens
    assert node.text.endswith('</information>\n')
    node = yield Generate(node, max_tokens=100)
    assert node.length == engine.length or node.stop != Stop.CONTEXT_FULL
    tree.root.data['last'] = node
    if node.stop == Stop.CONTEXT_FULL:
      tree.stop = Stop.CONTEXT_FULL
      empty = yield Generate(node)
      assert empty.stop == Stop.CONTEXT_FULL and not empty.tokens
      scored = yield Score(node, ('a',))
      assert scored == [None]

  trees, metrics = run(engine, [grow] * 4)
  assert metrics['stop_context_full'] >= 1
  for tree in trees:
    assert tree.nodes(Role.PROMPT)[0].text == question


def test_scores_are_log_probabilities_of_the_continuations(make_engine, next_logprobs, tokenizer):
  continuations = ('yes', ' no, it is not', tuple(tokenizer.encode(' ' + PROMPTS[0] * 2)), '')

  def grow(tree):
    node = tree.root.append(PROMPTS[0], Role.PROMPT)
    node = yield Generate(node, max_tokens=10)
    tree.root.data['scores'], behind, more = yield [
      Score(node, continuations), Score(node, continuations[:1], cue=PROMPTS[1]), Generate(node, max_tokens=5)]
    tree.root.data['scores'] += behind
    tree.root.data['nodes'] = node, more

  trees, _ = run(make_engine(), [grow] * 3)
  for tree in trees:
    node, more = tree.root.data['nodes']
    cases = [*((given, '') for given in continuations), (continuations[0], PROMPTS[1])]
    for (given, cue), logprobs in zip(cases, tree.root.data['scores'], strict=True):
      path, expected = node.path_tokens() + tokenizer.encode(cue), []
      for token in tokenizer.encode(given) if isinstance(given, str) else given:
        expected.append(next_logprobs(path)[token])
        path.append(token)
      np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert_computed(more, next_logprobs, tokenizer.eos_ids)


def test_the_clock_mode_grows_the_same_tokens(make_engine):
  """Randomness belongs to the row: only rounding, not the schedule, could make a difference."""
  one, _ = run(make_engine(), chains(PROMPTS * 2, turns=3))
  engine = make_engine(deterministic=False)
  engine.search = SlowSearch(engine.search, lambda: 0.01)
  other, metrics = run(engine, chains(PROMPTS * 2, turns=3))
  assert tokens_of(one) == tokens_of(other)
  assert metrics['seconds_tools'] >= 12 * 0.01


class Searching(grammars.Tagged):
  """Reads every span as a search: a random policy writes none."""

  def read(self, node):
    return grammars.Reading('', [grammars.Called('search', {'query': 'who'})], None)


@pytest.mark.parametrize('fold', ['oldest', 'summary'])
def test_a_folded_chain_is_sampled_and_trained_on_the_same_views(make_engine, config, params, fold, monkeypatch):
  """Of two questions with two trees each."""
  monkeypatch.setattr(folding, 'REQUEST', 'who is it: ')

  def grow(tree, number):
    tree.length, tree.grammar = 176, Searching(tree.tokenizer)
    tree.question = Question(str(number // 2), '?', ('nobody at all',))
    start = tree.root.append(PROMPTS[0], Role.PROMPT)
    chain = lambda question, tree: search_r1.act(tree, start, turns=6, max_tokens=9)
    yield from folding.folding(chain, tree.question, tree, fold=fold, fold_at=0.6, fold_tokens=12)

  trees, _ = run(make_engine(), [functools.partial(grow, number=number) for number in range(4)])
  for tree in trees:
    tree.prune()
    assert tree.metrics['folds'] > 1 and max(leaf.length for leaf in tree.leaves()) <= 176
  captured, expected = logprobs_of(trees, config, params, temperature=1.0)
  np.testing.assert_allclose(captured, expected, atol=1e-4)
  assert len(captured) == sum(tree.count(Role.POLICY) for tree in trees)


@pytest.mark.parametrize('forgets', [False, True])
def test_pages_of_what_is_forgotten_go_first(make_engine, forgets):
  def grow(tree):
    node = tree.root.append(PROMPTS[0], Role.PROMPT)
    for turn in range(4):
      yield Generate(node.append(f'{turn} {PROMPTS[2] * 4}', Role.OBSERVATION), max_tokens=9, forgets=forgets)

  _, metrics = run(make_engine(pages=8), [grow])
  assert (metrics['pages_evicted'] == 0) is forgets
