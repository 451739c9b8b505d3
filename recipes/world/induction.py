"""Plants induction heads into a random decoder, so that a small one learns to copy names in minutes.

Search agents copy: a name from the question into the query, a fact from a document into the answer. The
circuit for it, a previous-token head followed by an induction head (Olsson et al. 2022, arXiv 2209.11895),
appears in training only after many more tokens than a laptop recipe has. Here it stands at the start,
roughly, and training sharpens it:

  layer 0   one query head of each key/value head looks one token back, whatever is there: with RoPE, constant
            key and query biases b and R(-1) b give a score that depends on the distance alone and peaks at 1.
            It writes a projection A of that token to a place of its own in the residual stream.
  layer 1   one query head of each compares A of the current token with what layer 0 wrote at every earlier
            one, using only the slowly rotating RoPE dimensions, and adds a projection of the token it finds
            to the stream.

Needs two layers and tied embeddings to turn what is found into a logit. Where the architecture has no query
and key biases (Llama), every embedding gets the same component along one direction, which the matrices of
layer 0 turn into the biases; it adds the same to all logits, so it changes no distribution.
"""

import jax.numpy as jnp
import numpy as np

from jaxsearch.models.architecture import DecoderConfig

FAST = 8           # RoPE frequencies that tell distance 1 from its neighbours
SLOW = 0.02        # radians a token: slower frequencies hardly turn within a row of a few hundred tokens
BIAS = 5.0         # size of the positional biases; the previous token gets nearly all the attention
SHARPNESS = 12.0   # score of a match in layer 1, before training
CONSTANT = 0.5     # size of the common component of embeddings without biases, in norms of an embedding
WRITTEN = 3.0      # size of what layer 0 writes, in units of an embedding


def plant_induction(config: DecoderConfig, params: dict, seed: int = 0) -> dict:
  """`params` with the heads planted into layers 0 and 1; ValueError if the architecture lacks what they
  need."""
  if config.qk_norm or not config.tie_embeddings or config.num_layers < 2:
    raise ValueError('induction heads are planted into decoders with tied embeddings, two layers or more and '
                     'no QK norm')
  D, h = config.hidden_size, config.head_dim
  frequency = config.rope_theta ** (-np.arange(0, h, 2) / h)
  slow = np.flatnonzero(frequency < SLOW)
  slow = np.concatenate([slow, slow + h // 2])  # both halves of a rotated pair
  m, onto_slow = len(slow), np.eye(h)[slow]  # [m, h]
  if m == 0 or config.num_kv_heads * m >= D:
    raise ValueError(f'no room for induction heads: {m} slow dimensions of {h}, hidden size {D}')
  rng = np.random.default_rng(seed)
  layers = {name: np.array(value) for name, value in params['layers'].items()}
  unit = float(np.std(params['embedding']))  # of one entry of an embedding
  places, _ = np.linalg.qr(rng.normal(size=(D, D)))
  common = places[:, -1]  # the direction of the common component, which plays no part in matching and copying
  content = np.eye(D) - np.outer(common, common)
  along = CONSTANT / np.sqrt(1 + CONSTANT**2) * np.sqrt(D)  # the component after the norm of layer 0
  key = BIAS * np.tile(np.arange(h // 2) < FAST, 2)
  scale = np.sqrt(SHARPNESS * np.sqrt(h) / m)
  for kv in range(config.num_kv_heads):
    head = kv * (config.num_heads // config.num_kv_heads)
    compare = content @ rng.normal(size=(D, m)) / np.sqrt(D)  # A
    place = places[:, kv * m:(kv + 1) * m]             # where A of the previous token is kept
    copy = content @ rng.normal(size=(D, h)) / np.sqrt(D)     # what is copied of a token

    layers['k'][0, :, kv] *= 0.1
    layers['q'][0, :, head] *= 0.1
    query = _turned(key, -frequency)
    if config.qkv_bias:
      layers['k_bias'][0, kv], layers['q_bias'][0, head] = key, query
    else:
      layers['k'][0, :, kv] += np.outer(common, key) / along
      layers['q'][0, :, head] += np.outer(common, query) / along
    layers['v'][0, :, kv] = np.pad(compare, ((0, 0), (0, h - m)))
    layers['o'][0, head] = np.pad(place.T * unit * WRITTEN, ((0, h - m), (0, 0)))

    layers['q'][1, :, head] = scale * compare @ onto_slow
    layers['k'][1, :, kv] = scale * place / WRITTEN @ onto_slow
    layers['v'][1, :, kv] = copy
    layers['o'][1, head] = copy.T * unit * D / h
  if not config.qkv_bias:
    embedding = np.asarray(params['embedding']) @ content + CONSTANT * unit * np.sqrt(D) * common
    params = params | {'embedding': jnp.asarray(embedding, params['embedding'].dtype)}
  layers = {name: jnp.asarray(value, params['layers'][name].dtype) for name, value in layers.items()}
  return params | {'layers': layers}


def _turned(x, angles):
  """RoPE of one vector [h] by `angles` [h/2], in the half-split form."""
  a, b = np.split(x, 2)
  return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])
