"""Stop strings: the flags against brute force, and where a policy that says exactly what we want it to say stops."""

import itertools

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxsearch.models.decoder import DecoderConfig, initial_params
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.engine import found_stop, stop_flags
from jaxsearch.sampler.requests import END, LENGTH, Generate
from jaxsearch.trees.tree import Role, Tree

STOPS = ('</search>', '</answer>')


def test_flags_mark_exactly_the_tokens_that_can_complete_a_stop_string():
  alphabet = [b'a', b'b', b'<', b'\xc3\xa9']
  pieces = [b''.join(letters) for n in range(5) for letters in itertools.product(alphabet, repeat=n)]
  for stop in ('ab', 'aba', 'b', 'aab<', 'éa'):
    encoded = stop.encode()
    for piece, flag in zip(pieces, stop_flags(pieces, [stop])):
      # a prefix of the stop string stands before the piece; the stop string then ends inside the piece
      texts = [(encoded[:n], encoded[:n] + piece) for n in range(len(encoded))]
      assert flag == any(text.find(encoded) + len(encoded) > len(before)
                         for before, text in texts if encoded in text), (piece, stop)


def test_found_wants_the_stop_string_in_the_last_token_and_inside_the_span():
  pieces = [b'</se', b'arch', b'>', b' x', b'h>', b'</search></answer>']
  assert found_stop(pieces, [0, 1, 2], STOPS) == '</search>'
  assert found_stop(pieces, [0, 1, 2, 3], STOPS) is None     # it was complete before the last token
  assert found_stop(pieces, [1, 2], STOPS) is None     # its beginning is in the prompt
  assert found_stop(pieces, [3, 5], STOPS) == '</search>'     # the one that ends first
  assert found_stop(pieces, [], STOPS) is None
  assert found_stop(pieces, [0, 1, 2], ()) is None


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
    (['a>', '</s', 'ear', '>', ' and', 'ch>'], LENGTH, 6),     # false alarms at '>' and at 'ch>'
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
