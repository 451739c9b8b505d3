"""The rollouts of sampler.py with other samplers; prints one JSON line {"seconds": …}. Run by sampler.py.

`model` has the fields of a DecoderConfig.

  transformers   Hugging Face Qwen2 in torch with its cache kept over the turns (possible because all rollouts are equally
                 long); sampling and log-probabilities in a plain loop: less work a token than `generate`
  loop           our decoder in the shortest loop: one cache a layer, as long as the rollouts and updated in place, no stop
                 strings, no log-probabilities, and nothing on the host
  tunix          google-tunix's own sampler, which prefills the whole context again at each turn
  llama_cpp      llama.cpp's server (xllamacpp) with a slot a rollout, each asked by a thread of its own for token ids with
                 log-probabilities; it keeps the context of its slot. Weights: those of the GGUF file
"""

import concurrent.futures
import json
import sys
import time

import numpy as np

END, IDS = 0, 4096  # forbidden; of the random tokens


def random_ids(rng, rows, size):
  return rng.integers(1, IDS, (rows, size))


def with_transformers(model, turns, rows, prompt, generated, observed, dtype='float32'):
  import torch
  import transformers
  from transformers import DynamicCache

  torch.manual_seed(0)
  family = 'Qwen2' if model['qkv_bias'] else 'Llama'
  config = getattr(transformers, f'{family}Config')(
    vocab_size=model['vocab_size'], hidden_size=model['hidden_size'], intermediate_size=model['intermediate_size'],
    num_hidden_layers=model['num_layers'], num_attention_heads=model['num_heads'], num_key_value_heads=model['num_kv_heads'],
    tie_word_embeddings=True, rope_theta=model['rope_theta'], max_position_embeddings=4096)
  model = getattr(transformers, f'{family}ForCausalLM')(config).eval().to(getattr(torch, dtype))

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


def with_loop(model, turns, rows, prompt, generated, observed):
  import functools

  import jax
  import jax.numpy as jnp

  from jaxsearch.models.architecture import DecoderConfig, initial_params
  from jaxsearch.models.attention import attend_to_front
  from jaxsearch.models.decoder import forward_cached, logits, unstack

  config = DecoderConfig(**model)
  params = unstack(initial_params(config, jax.random.key(0)), config.num_layers)
  starts = lambda start: jnp.full(rows, start)

  @functools.partial(jax.jit, donate_argnums=0)
  def prefill(cache, tokens, start):
    return forward_cached(config, params, tokens, starts(start), cache, attend_to_front)[1]

  @functools.partial(jax.jit, donate_argnums=0)
  def decode(cache, last, start, key):
    def step(i, state):
      cache, last = state
      hidden, cache = forward_cached(config, params, last[:, None], starts(start + i), cache, attend_to_front)
      scores = logits(params, hidden[:, 0]).at[:, END].set(-jnp.inf)
      return cache, jax.random.categorical(jax.random.fold_in(key, i), scores)

    return jax.lax.fori_loop(0, generated, step, (cache, last))

  def rollout(seed):
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    sizes, length = (rows, config.num_kv_heads, config.head_dim, prompt + turns * (generated + observed)), 0
    cache = [(jnp.zeros(sizes), jnp.zeros([sizes[i] for i in (0, 1, 3, 2)])) for _ in range(config.num_layers)]
    fed = jnp.asarray(random_ids(rng, rows, prompt), jnp.int32)
    for turn in range(turns):
      cache = prefill(cache, fed[:, :-1], length)
      length += fed.shape[1] - 1
      cache, last = decode(cache, fed[:, -1], length, jax.random.fold_in(key, turn))
      length += generated
      fed = jnp.concatenate([last[:, None], jnp.asarray(random_ids(rng, rows, observed), jnp.int32)], axis=1)
    jax.block_until_ready(fed)

  return rollout


def with_tunix(model, turns, rows, prompt, generated, observed):
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

  sizes = dict(num_layers=model['num_layers'], num_kv_heads=model['num_kv_heads'], head_dim=model['head_dim'])
  config = qwen2.ModelConfig(
    **sizes, vocab_size=model['vocab_size'], embed_dim=model['hidden_size'], hidden_dim=model['intermediate_size'],
    num_heads=model['num_heads'], rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True, dtype=jnp.float32)
  size = prompt + turns * (generated + observed)
  sampler = Sampler(qwen2.Qwen2(config, rngs=nnx.Rngs(0)), Digits(),
                    CacheConfig(cache_size=size, **sizes))

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


def with_llama_cpp(model, turns, rows, prompt, generated, observed, gguf):
  import urllib.request

  import xllamacpp

  params = xllamacpp.CommonParams()
  params.model.path, params.port, params.verbosity = gguf, 0, -1
  params.n_parallel, params.n_ctx = rows, rows * (prompt + turns * (generated + observed))
  server = xllamacpp.Server(params)

  def complete(ids, slot):
    body = {'prompt': ids, 'n_predict': generated, 'ignore_eos': True, 'n_probs': 1, 'return_tokens': True, 'id_slot': slot,
            'temperature': 1.0, 'samplers': ['temperature']}
    request = urllib.request.Request(server.listening_address + '/completion', json.dumps(body).encode(),
                                     {'Content-Type': 'application/json'})
    reply = json.load(urllib.request.urlopen(request))
    assert len(reply['tokens']) == generated, (len(reply['tokens']), reply['stop_type'])
    return reply['tokens']

  def chain(slot, seed):
    rng = np.random.default_rng([seed, slot])
    ids = random_ids(rng, 1, prompt)[0].tolist()
    for _ in range(turns):
      ids = ids + complete(ids, slot) + random_ids(rng, 1, observed)[0].tolist()

  def rollout(seed):
    with concurrent.futures.ThreadPoolExecutor(rows) as pool:
      list(pool.map(chain, range(rows), [seed] * rows))

  return rollout


def main():
  peer, sizes = sys.argv[1], json.loads(sys.argv[2])
  repeats, rollouts = sizes.pop('repeats'), {'transformers': with_transformers, 'loop': with_loop, 'tunix': with_tunix,
                                             'llama_cpp': with_llama_cpp}
  rollout = rollouts[peer](**sizes)
  rollout(0)  # compiles, or warms up
  seconds = []
  for seed in range(1, 1 + repeats):  # new prompts: a server may have cached the last ones
    start = time.perf_counter()
    rollout(seed)
    seconds.append(time.perf_counter() - start)
  print(json.dumps({'seconds': min(seconds)}))


if __name__ == '__main__':
  main()
