"""The rollouts of sampler.py with other samplers; prints one JSON line {"seconds": …}. Run by sampler.py.

  transformers   Hugging Face Qwen2 in torch with its cache kept over the turns (possible because all rollouts are equally
                 long); sampling and log-probabilities in a plain loop: less work a token than `generate`
  loop           our decoder in the shortest loop: one cache a layer, as long as the rollouts and updated in place, no stop
                 strings, no log-probabilities, and nothing on the host
  tunix          google-tunix's own sampler, which prefills the whole context again at each turn
"""

import json
import sys
import time

import numpy as np

VOCAB, WIDTH, FFN, LAYERS, HEADS, KV_HEADS, END = 8192, 512, 1408, 8, 8, 2, 0


def random_ids(rng, rows, size):
  return rng.integers(1, VOCAB, (rows, size))


def with_transformers(turns, rows, prompt, generated, observed):
  import torch
  from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

  torch.manual_seed(0)
  model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=4096)).eval()

  @torch.inference_mode()
  def rollout(seed):
    rng = np.random.default_rng(seed)
    cache, fed, logprobs = DynamicCache(), torch.from_numpy(random_ids(rng, rows, prompt)), []
    for _ in range(turns):
      for _ in range(generated):
        scores = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        scores[:, END] = -torch.inf
        distribution = torch.log_softmax(scores, dim=-1)
        fed = torch.multinomial(distribution.exp(), 1)
        logprobs.append(distribution.gather(1, fed))
      fed = torch.cat([fed, torch.from_numpy(random_ids(rng, rows, observed))], dim=1)

  return rollout


def with_loop(turns, rows, prompt, generated, observed):
  import functools

  import jax
  import jax.numpy as jnp

  from benchmarks.sampler import CONFIG
  from jaxsearch.models.architecture import initial_params
  from jaxsearch.models.attention import attend_to_front
  from jaxsearch.models.decoder import forward_cached, logits, unstack

  params = unstack(initial_params(CONFIG, jax.random.key(0)), LAYERS)
  starts = lambda start: jnp.full(rows, start)

  @functools.partial(jax.jit, donate_argnums=0)
  def prefill(cache, tokens, start):
    return forward_cached(CONFIG, params, tokens, starts(start), cache, attend_to_front)[1]

  @functools.partial(jax.jit, donate_argnums=0)
  def decode(cache, last, start, key):
    def step(i, state):
      cache, last = state
      hidden, cache = forward_cached(CONFIG, params, last[:, None], starts(start + i), cache, attend_to_front)
      scores = logits(params, hidden[:, 0]).at[:, END].set(-jnp.inf)
      return cache, jax.random.categorical(jax.random.fold_in(key, i), scores)

    return jax.lax.fori_loop(0, generated, step, (cache, last))

  def rollout(seed):
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    sizes, length = (rows, CONFIG.num_kv_heads, CONFIG.head_dim, prompt + turns * (generated + observed)), 0
    cache = [(jnp.zeros(sizes), jnp.zeros([sizes[i] for i in (0, 1, 3, 2)])) for _ in range(LAYERS)]
    fed = jnp.asarray(random_ids(rng, rows, prompt), jnp.int32)
    for turn in range(turns):
      cache = prefill(cache, fed[:, :-1], length)
      length += fed.shape[1] - 1
      cache, last = decode(cache, fed[:, -1], length, jax.random.fold_in(key, turn))
      length += generated
      fed = jnp.concatenate([last[:, None], jnp.asarray(random_ids(rng, rows, observed), jnp.int32)], axis=1)
    jax.block_until_ready(fed)

  return rollout


def with_tunix(turns, rows, prompt, generated, observed):
  import jax.numpy as jnp
  from flax import nnx
  from tunix.generate.sampler import CacheConfig, Sampler
  from tunix.models.qwen2 import model as qwen2

  class Digits:
    """Text is the ids in decimal: the samplers are compared, not the tokenizers."""
    encode = staticmethod(lambda text: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids: ' '.join(map(str, ids)))
    bos_id = staticmethod(lambda: None)
    eos_id = pad_id = staticmethod(lambda: END)

  config = qwen2.ModelConfig(
    num_layers=LAYERS, vocab_size=VOCAB, embed_dim=WIDTH, hidden_dim=FFN, num_heads=HEADS, head_dim=WIDTH // HEADS,
    num_kv_heads=KV_HEADS, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True, dtype=jnp.float32)
  size = prompt + turns * (generated + observed)
  sampler = Sampler(qwen2.Qwen2(config, rngs=nnx.Rngs(0)), Digits(),
                    CacheConfig(cache_size=size, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=WIDTH // HEADS))

  def rollout(seed):
    rng = np.random.default_rng(seed)
    context = random_ids(rng, rows, prompt)
    for turn in range(turns):
      found = sampler([Digits.decode(row) for row in context], max_generation_steps=generated,
                      max_prompt_length=context.shape[1], temperature=1.0, top_p=1.0, return_logprobs=True,
                      forbidden_tokens=(END,), seed=seed)
      tokens = np.stack([np.asarray(row)[:generated] for row in found.tokens])
      assert tokens.shape == (rows, generated)
      context = np.concatenate([context, tokens, random_ids(rng, rows, observed)], axis=1)

  return rollout


def main():
  peer, sizes = sys.argv[1], json.loads(sys.argv[2])
  repeats = sizes.pop('repeats')
  rollout = {'transformers': with_transformers, 'loop': with_loop, 'tunix': with_tunix}[peer](**sizes)
  rollout(0)  # compiles, or warms up
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    rollout(0)
    seconds.append(time.perf_counter() - start)
  print(json.dumps({'seconds': min(seconds)}))


if __name__ == '__main__':
  main()
