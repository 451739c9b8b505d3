"""A small random policy, its tokenizer, and engines over them that keep to few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxsearch.data.corpus import Document
from jaxsearch.models.architecture import DecoderConfig, initial_params
from jaxsearch.models.decoder import hidden_states, logits
from jaxsearch.models.tokenizer import Tokenizer
from tests.engines import Equipped

TEXT = ['<think> who is it </think><search> capital of France </search>', '<answer> Paris </answer>',
        'Question: what is the capital of France?', '<information>Doc 1(Title: Paris) Paris is a city.</information>']


class OnePassage:
  """A search back end that finds the same passage for everything."""

  def search(self, queries, topk=3):
    return [[Document(str(i), f'Title {i}', f'What is known about {query}: nothing much. ' * 3) for i in range(topk)]
            for query in queries]


@pytest.fixture
def compiled():
  """Returns a list that grows with each compilation."""
  events = []
  listen = lambda event, seconds, **_: events.append(event) if 'backend_compile' in event else None
  jax.monitoring.register_event_duration_secs_listener(listen)
  yield events
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope='session')
def tokenizer():
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.train_from_iterator(TEXT * 4, trainers.BpeTrainer(
    vocab_size=310, special_tokens=['<|endoftext|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False))
  return Tokenizer(backend, eos_ids=(0,))


@pytest.fixture(scope='session')
def config(tokenizer):
  return DecoderConfig(vocab_size=tokenizer.vocab_size + 6, hidden_size=32, intermediate_size=64, num_layers=2,
                       num_heads=8, num_kv_heads=2, head_dim=8, qkv_bias=True, tie_embeddings=True, rope_theta=1e4)


@pytest.fixture(scope='session')
def params(config):
  """Random, with large enough weights that the context decides what comes next."""
  params = initial_params(config, jax.random.key(0))
  return jax.tree.map(lambda p: p * 8 if p.ndim > 2 else p, params) | {'embedding': params['embedding'] * 2.5}


@pytest.fixture(scope='session')
def make_engine(config, tokenizer, params):
  """make_engine(slots=…, …) -> an engine with parameters and a search back end. Compiling is what takes time here: tests
  should keep to one length and to three slots."""
  def make(**settings):
    load = settings.pop('params', params)
    defaults = dict(slots=3, length=176, prefill_lengths=(16, 64), prefill_tokens=64, segment_steps=16,
                    search=OnePassage(), topk=1, max_observation=64, answer_reserve=8)
    engine = Equipped(settings.pop('config', config), settings.pop('tokenizer', tokenizer), **defaults | settings)
    engine.load(load)
    return engine

  return make


@pytest.fixture(scope='session')
def next_logprobs(config, params):
  """next_logprobs(path, temperature=1) -> [V] log-probabilities of the next token by a full forward pass."""
  @jax.jit
  def forward(tokens, size):
    return logits(params, hidden_states(config, params, tokens)[0, size - 1])

  def compute(path, temperature=1.0):
    padded = np.zeros((1, 256), np.int32)
    padded[0, :len(path)] = path
    scores = np.array(forward(jnp.asarray(padded), len(path)), np.float64) / temperature
    return scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())

  return compute
