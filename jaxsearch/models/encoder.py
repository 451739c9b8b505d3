"""BERT encoders (E5, MiniLM, BGE): token ids in, hidden states out; and `TextEncoder`: texts in, vectors out.

Written like decoder.py: a pure function of (config, params), and a Flax container of the parameters. Letters:
B texts, T tokens, D width, H heads, h head width, F feed-forward width, L layers.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsearch.files import read_json
from jaxsearch.models import tensor_files
from jaxsearch.models.attention import matmul
from jaxsearch.models.decoder import Parameters
from jaxsearch.models.families import parse_config
from jaxsearch.models.hub import read_params
from jaxsearch.models.tensor_files import InFile
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel.mesh import ambient
from jaxsearch.parallel.transfer import issuing


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The sizes of one encoder, and the dtype that it computes in."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  max_position: int
  num_types: int = 2
  norm_eps: float = 1e-12
  dtype: str = 'float32'


class Encoder(Parameters):
  def __call__(self, tokens, mask=None):
    """Returns hidden states [B,T,D] of tokens [B,T] int; those where `mask` [B,T] is 0 are garbage."""
    if tokens.shape[1] > self.config.max_position:
      raise ValueError(f'{tokens.shape[1]} tokens, but the encoder has {self.config.max_position} positions')
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    return encode(self.config, self.params, jnp.asarray(tokens), mask)


@functools.partial(jax.jit, static_argnums=0)
def encode(config: EncoderConfig, params: dict, tokens, mask):
  """Runs the encoder (Devlin et al. 2018, post-norm). tokens: [B,T] int; mask: [B,T] bool -> [B,T,D]."""
  x = params['embedding'][tokens] + params['position'][: tokens.shape[1]] + params['type'][0]
  x = layer_norm(x.astype(config.dtype), params['norm_scale'], params['norm_bias'], config.norm_eps)

  def layer(x, w):
    w = {name: value if 'norm' in name else value.astype(x.dtype) for name, value in w.items()}
    heads = (*x.shape[:2], config.num_heads, -1)
    q, k, v = ((matmul(x, w[name]) + w[f'{name}_bias']).reshape(heads) for name in 'qkv')
    attended = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None]).reshape(x.shape)
    x = x + matmul(attended, w['o']) + w['o_bias']
    x = layer_norm(x, w['attn_norm_scale'], w['attn_norm_bias'], config.norm_eps)
    y = jax.nn.gelu(matmul(x, w['up']) + w['up_bias'], approximate=False)
    x = x + matmul(y, w['down']) + w['down_bias']
    return layer_norm(x, w['mlp_norm_scale'], w['mlp_norm_bias'], config.norm_eps), None

  return jax.lax.scan(layer, x, params['layers'])[0]


def layer_norm(x, scale, bias, eps):
  """Computes LayerNorm in float32, with a result in the dtype of `x`."""
  y = x.astype(jnp.float32)
  y = y - y.mean(axis=-1, keepdims=True)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


# the pooler and the heads of pretraining lie above the hidden states; position_ids are 0, 1, 2, …
_HARMLESS = [r'(bert\.)?embeddings\.position_ids', r'(bert\.)?pooler\..*', r'cls\..*']
_KEYS = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
         'max_position_embeddings', 'type_vocab_size')  # in the order of `EncoderConfig`
_ONLY = {'hidden_act': 'gelu', 'position_embedding_type': 'absolute', 'is_decoder': False}
_MATRICES = {'q': 'attention.self.query', 'k': 'attention.self.key', 'v': 'attention.self.value',
             'o': 'attention.output.dense', 'up': 'intermediate.dense', 'down': 'output.dense'}
_NORMS = {'norm': 'embeddings', 'attn_norm': 'encoder.layer.{}.attention.output',
          'mlp_norm': 'encoder.layer.{}.output'}
_TENSORS = {
  'embedding': 'embeddings.word_embeddings.weight', 'position': 'embeddings.position_embeddings.weight',
  'type': 'embeddings.token_type_embeddings.weight',
  **{f'{key}_scale': f'{module}.LayerNorm.weight' for key, module in _NORMS.items()},
  **{f'{key}_bias': f'{module}.LayerNorm.bias' for key, module in _NORMS.items()},
  **{key: f'encoder.layer.{{}}.{module}.weight' for key, module in _MATRICES.items()},
  **{f'{key}_bias': f'encoder.layer.{{}}.{module}.bias' for key, module in _MATRICES.items()},
}  # fmt: skip


def load_encoder(folder: str | pathlib.Path, dtype: str = 'float32') -> Encoder:
  """Reads the encoder of a Hugging Face folder: a BertModel's, or one inside a model (`bert.` in names).

  Raises FileNotFoundError or ValueError that names the file and the key or tensor.
  """
  path = pathlib.Path(folder) / 'config.json'
  theirs = parse_config({'model_type': 'bert'} | read_json(path), path, ['bert'], _KEYS, _ONLY)
  sizes = (getattr(theirs, key) for key in _KEYS)
  config = EncoderConfig(*sizes, norm_eps=theirs.layer_norm_eps, dtype=dtype)
  tensors = tensor_files.open_folder(folder)
  prefix = 'bert.' if any(name.startswith('bert.') for name in tensors.shapes) else ''
  files = {key: InFile(prefix + name, 1 if key in _MATRICES else None)
           for key, name in _TENSORS.items()}
  return Encoder(config, read_params(tensors, files, _shapes(config), jnp.dtype(dtype), _HARMLESS))


def _shapes(config: EncoderConfig) -> dict:
  L, D, F = config.num_layers, config.hidden_size, config.intermediate_size
  layers = dict.fromkeys('qkvo', (L, D, D)) | {'up': (L, D, F), 'down': (L, F, D)}
  layers |= {f'{key}_bias': (L, layers[key][-1]) for key in _MATRICES}
  norms = ('attn_norm_scale', 'attn_norm_bias', 'mlp_norm_scale', 'mlp_norm_bias')
  return {'embedding': (config.vocab_size, D), 'position': (config.max_position, D),
          'type': (config.num_types, D), 'norm_scale': (D,), 'norm_bias': (D,),
          'layers': layers | dict.fromkeys(norms, (L, D))}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The way an encoder was trained to turn texts into vectors; all of them are scaled to length 1."""
  query_prefix: str = ''
  passage_prefix: str = ''
  pooling: str = 'mean'   # 'mean' of the hidden states, or 'cls': that of the first token
  max_length: int = 512   # tokens, [CLS] and [SEP] included; what a text has beyond them is cut


# From the model cards of intfloat/e5-*-v2, BAAI/bge-*-en-v1.5 and sentence-transformers/all-MiniLM-L6-v2.
RECIPES = {
  'e5': Recipe('query: ', 'passage: '),
  'bge': Recipe('Represent this sentence for searching relevant passages: ', pooling='cls'),
  'minilm': Recipe(max_length=256),
}  # fmt: skip
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of a batch: few programs, little padding


class TextEncoder:
  """Turns texts into float32 vectors of length 1, in batches of similar length over this process's devices.

  Args:
    folder: of an encoder, with its tokenizer.json.
    recipe: a name in RECIPES.
    dtype: of the forward pass.
    batch_tokens: of a batch, on each device.
  """

  def __init__(self, folder: str | pathlib.Path, recipe: str, dtype: str = 'float32',
               batch_tokens: int = 8192):
    if recipe not in RECIPES:
      raise ValueError(f'no recipe {recipe!r} of an encoder; known: {", ".join(RECIPES)}')
    self.recipe, self._encoder = RECIPES[recipe], load_encoder(folder, dtype)
    self.width, self._batch_tokens = self._encoder.config.hidden_size, batch_tokens
    self._tokenizer, devices = Tokenizer.load(folder), jax.local_devices()
    self._max_length = min(self.recipe.max_length, self._encoder.config.max_position)
    self._tokenizer.backend.enable_truncation(self._max_length)
    self._split = NamedSharding(Mesh(devices, ('texts',)), PartitionSpec('texts'))
    self._params = jax.device_put(self._encoder.params, NamedSharding(self._split.mesh, PartitionSpec()))
    self.identity = {'folder': str(pathlib.Path(folder).resolve()), 'hash': hash_of(folder), 'recipe': recipe,
                     **dataclasses.asdict(self.recipe), 'max_length': self._max_length}

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    """Returns [number, D] float32 of what is searched for."""
    return self._vectors([self.recipe.query_prefix + text for text in texts])

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns [number, D] float32 of what is searched in."""
    return self._vectors([self.recipe.passage_prefix + text for text in texts])

  def _vectors(self, texts: list[str]) -> np.ndarray:
    ids = [encoding.ids for encoding in self._tokenizer.backend.encode_batch(texts)]
    short = [length for length in LENGTHS if length < self._max_length]
    lengths = [next((length for length in short if length >= len(one)), self._max_length) for one in ids]
    devices, result = self._split.mesh.size, np.zeros((len(texts), self.width), np.float32)
    waiting = []  # the host packs the next batch meanwhile
    for length in sorted(set(lengths)):
      group = [number for number in range(len(ids)) if lengths[number] == length]
      most = max(self._batch_tokens // length, 1) * devices
      for start in range(0, len(group), most):
        batch = group[start:start + most]
        per_device = 2 ** max(0, -(-len(batch) // devices) - 1).bit_length()  # few numbers: few programs
        rows = min(most, devices * per_device)
        tokens, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
        for row, number in enumerate(batch):
          tokens[row, :len(ids[number])], mask[row, :len(ids[number])] = ids[number], True
        mask[len(batch):, 0] = True
        placed = jax.device_put((tokens, mask), self._split)
        with issuing(), ambient(self._split.mesh):
          waiting.append((batch, pooled(self._encoder.config, self.recipe.pooling, self._params, *placed)))
    for batch, vectors in waiting:
      result[batch] = np.asarray(vectors)[:len(batch)]
    return result


@functools.partial(jax.jit, static_argnums=(0, 1))
def pooled(config: EncoderConfig, pooling: str, params: dict, tokens, mask):
  """Returns [B,D] float32 of length 1, by `Recipe.pooling`. tokens: [B,T] int; mask: [B,T] bool."""
  hidden = encode(config, params, tokens, mask).astype(jnp.float32)
  if pooling == 'cls':
    vector = hidden[:, 0]
  else:
    vector = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
  return vector / jnp.maximum(jnp.linalg.norm(vector, axis=1, keepdims=True), 1e-12)


def hash_of(folder: str | pathlib.Path) -> str:
  """Returns the SHA-256 of the weights, the config and the tokenizer in a folder."""
  digest = hashlib.sha256()
  for file in sorted(pathlib.Path(folder).iterdir()):
    if file.suffix == '.safetensors' or file.name in ('config.json', 'tokenizer.json'):
      with file.open('rb') as content:
        digest.update(hashlib.file_digest(content, 'sha256').digest())
  return digest.hexdigest()


def recipe_of(folder: str | pathlib.Path) -> str:
  """Returns the name in RECIPES that stands in the folder's name or its config.json, or raises ValueError."""
  path = pathlib.Path(folder).resolve()
  config = read_json(path / 'config.json')
  is_snapshot = path.parent.name == 'snapshots'  # models--ORG--NAME/snapshots/HASH
  for text in (path.parents[1].name if is_snapshot else path.name, str(config.get('_name_or_path', ''))):
    named = [name for name in RECIPES if name in text.lower()]
    if len(named) == 1:
      return named[0]
  raise ValueError(f'{folder}: neither its name nor its config.json says which encoder it is; '
                   f'known: {", ".join(RECIPES)}')
