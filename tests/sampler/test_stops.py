"""Stop strings: the automaton against the rule over the bytes of a span, and where a policy that says what we want stops."""

import itertools

import hypothesis
import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxsearch.models.architecture import DecoderConfig, initial_params
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.requests import END, LENGTH, Generate
from jaxsearch.sampler.stops import ENDED, automaton
from jaxsearch.trees.tree import Role, Tree

STOPS = ('</search>', '</answer>')


def found_stop(pieces, tokens, stops):
  """The stop string that ends in the last of `tokens` and lies within them, the one that ends first if several do."""
  if not stops or not tokens:
    return None
  text, encoded = b''.join(pieces[token] for token in tokens), {stop: stop.encode() for stop in stops}
  before = len(text) - len(pieces[tokens[-1]])
  starts = {stop: text.find(code, max(0, before - len(code) + 1)) for stop, code in encoded.items()}
  found = [stop for stop in stops if starts[stop] >= 0]
  return min(found, key=lambda stop: starts[stop] + len(encoded[stop]), default=None)


def assert_same_stops(table, pieces, stops, tokens):
  """Token by token, up to the first stop."""
  state = 0
  for count, token in enumerate(tokens, 1):
    state, expected = int(table[state, token]), found_stop(pieces, tokens[:count], stops)
    assert (stops[ENDED - 1 - state] if state < ENDED else None) == expected, (tokens[:count], state)
    if expected:
      return


letters = st.text('ab<é', min_size=1, max_size=4)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.one_of(st.just(b''), letters.map(str.encode), st.just(b'\xc3')), min_size=1, max_size=8),
                  st.lists(letters, unique=True, max_size=3), st.data())
def test_the_automaton_stops_where_the_rule_does(pieces, stops, data):
  stops = tuple(stops)
  tokens = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=12))
  assert_same_stops(automaton(pieces, stops), pieces, stops, tokens)


def test_end_tokens_come_before_stop_strings():
  table = automaton([b'a', b'b', b''], ('ab',), ends=(1,))
  assert table.dtype == np.int16 and table[0, 0] > 0
  assert (table[:, 1] == ENDED).all() and (table[:, 2] == np.arange(len(table))).all()


WORDS = ['go', '</s', 'ear', 'ch>', 'ch>x', '</search>', 'a>', '>', 'arch', 'q</search>y</answer>', '</an', 'swer', ' and']


@pytest.fixture(scope='module')
def words():
  """A byte-level tokenizer with these words as tokens of their own, ids in the order of the list."""
  backend = tokenizers.Tokenizer(models.BPE(vocab={'Ġ': 0}, merges=[]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_tokens([*WORDS, '<end>'])
  end = backend.token_to_id('<end>')
  return Tokenizer(backend, eos_ids=(end,), pad_id=end)


def speaker(script, tokenizer):
  """A policy that greedily says the ids of `script` one after the other: its layers do nothing, so that the next token
  is a function of the last one, looked up through one-hot embeddings."""
  size = tokenizer.vocab_size
  config = DecoderConfig(vocab_size=size, hidden_size=32, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
                         head_dim=16)
  params = jax.tree.map(np.zeros_like, initial_params(config, jax.random.key(0)))
  params['final_norm'] += 1
  params['embedding'][np.arange(size), np.arange(size)] = 1
  for now, then in itertools.pairwise(script):
    params['unembedding'][then, now] = 5
  return config, params


@pytest.mark.parametrize('said, stop, count', [
    (['</s', 'ear', 'ch>', ' and'], '</search>', 3),     # over several tokens
    (['</s', 'ear', 'ch>x', ' and'], '</search>', 3),     # ends in the middle of a token, which stays whole
    (['</search>', ' and'], '</search>', 1),
    (['q</search>y</answer>', ' and'], '</search>', 1),
    (['a>', '</s', 'ear', '>', ' and', 'ch>'], LENGTH, 6),     # none of it at '>' and at 'ch>'
    (['>', '</an', 'swer', 'a>', 'arch'], LENGTH, 6),
    (['</an', 'swer', '>', ' and'], '</answer>', 3),
    (['</s', 'ear', '<end>', 'ch>'], END, 3),     # the end token belongs to the span
])
def test_a_span_stops_at_the_right_token(make_engine, words, said, stop, count):
  ids = [words.encode(word)[0] for word in ('go', *said)]
  config, params = speaker(ids, words)
  engine = make_engine(config=config, params=params, tokenizer=words, temperature=0.0, segment_steps=4)
  tree = Tree(words)

  def grow():
    node = yield Generate(tree.root.append('go', Role.PROMPT), stop=STOPS, max_tokens=6)
    tree.root.data['node'] = node

  engine.run([(grow(), tree)], jax.random.key(0))
  node = tree.root.data['node']
  assert node.stop == stop and len(node.tokens) == count
  assert node.tokens[:len(said)] == ids[1:count + 1]


def test_requests_with_other_stop_strings_and_limits_are_decoded_together(make_engine, words):
  """A slot pauses where its own stop string has ended, and nowhere else: one segment, though every other token ends in '>'."""
  said = ['a>', '</s', 'ear', 'ch>x', 'ch>', '</search>', '</an', 'swer', '>', 'arch']
  config, params = speaker([words.encode(word)[0] for word in ('go', *said)], words)
  engine = make_engine(config=config, params=params, tokenizer=words, temperature=0.0, slots=6, segment_steps=32, enough=6)
  asked = {STOPS: (32, '</search>', 4), ('</answer>',): (32, '</answer>', 9), (): (3, LENGTH, 3),
           ('>', '</search>'): (32, '>', 1), ('</nothing>',): (10, LENGTH, 10)}
  tree = Tree(words)

  def grow():
    node = tree.root.append('go', Role.PROMPT)
    tree.answer = yield [Generate(node, stop=stop, max_tokens=limit) for stop, (limit, *_) in asked.items()]

  metrics = engine.run([(grow(), tree)], jax.random.key(0))
  assert [(node.stop, len(node.tokens)) for node in tree.answer] == [(stop, count) for _, stop, count in asked.values()]
  assert metrics['segments'] == 1 and metrics['steps'] == 10
