"""transformers is the judge: of what is loaded, and of what is saved."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxsearch import models, registry
from jaxsearch.models import hub
from jaxsearch.models.architecture import parameter_axes, parameter_shapes
from jaxsearch.models.decoder import Decoder, hidden_states
from jaxsearch.parallel import transfer
from jaxsearch.parallel.mesh import make_mesh, shardings
from tests.trees import speaking

SIZES = dict(
  vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
  num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
LLAMA3_ROPE = dict(
  rope_type='llama3', rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=16)  # fmt: skip
FAMILIES = {
  'qwen2': dict(rope_parameters=dict(rope_type='default', rope_theta=1e4)),
  'qwen2-tied': dict(tie_word_embeddings=True),
  'qwen3': dict(head_dim=16, tie_word_embeddings=True),  # 4 x 16 is not 32
  'llama': dict(rope_parameters=LLAMA3_ROPE, num_key_value_heads=1),
}
TOKENS = np.random.default_rng(0).integers(0, 100, (2, 48))  # longer than the original context of LLAMA3_ROPE


@pytest.fixture(scope='session')
def make_checkpoint(tmp_path_factory):
  """(family, **options of save_pretrained) -> (folder, the transformers model in it)."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  classes = {
    'qwen2': (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    'qwen3': (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    'llama': (transformers.LlamaConfig, transformers.LlamaForCausalLM),
  }

  def make(family, dtype='float32', **options):
    config_class, model_class = classes[family.split('-')[0]]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES | FAMILIES[family]))
    with torch.no_grad():
      for parameter in model.parameters():  # biases start at 0 and norms at 1: mistakes would not show
        parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(getattr(torch, dtype))
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder, **options)
    return folder, model

  return make


@pytest.fixture(scope='session')
def torch_logits():
  """transformers model -> its logits [2,48,100] of TOKENS."""
  torch = pytest.importorskip('torch')

  def logits(model, tokens=TOKENS):
    with torch.no_grad():
      return model(torch.tensor(np.asarray(tokens))).logits.float().numpy()

  return logits


@pytest.fixture
def edit_config():
  """(folder, **changes): sets keys of config.json; None removes one."""
  def edit(folder, **changes):
    config = json.loads((folder / 'config.json').read_text()) | changes
    (folder / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

  return edit


def relative_error(ours, theirs):
  return np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_transformers(family, make_checkpoint, torch_logits):
  folder, theirs = make_checkpoint(family)
  assert relative_error(models.load(folder)(TOKENS), torch_logits(theirs)) < 1e-5


def test_bfloat16_on_disk_is_read_exactly(make_checkpoint, torch_logits):
  from transformers import AutoModelForCausalLM
  folder, _ = make_checkpoint('qwen3', dtype='bfloat16')
  theirs = AutoModelForCausalLM.from_pretrained(folder, dtype='float32')
  assert relative_error(models.load(folder)(TOKENS), torch_logits(theirs)) < 1e-5
  model = models.load(folder, dtype='bfloat16')
  assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype('bfloat16')}
  np.testing.assert_array_equal(
    model.params['embedding'].astype(jnp.float32), theirs.model.embed_tokens.weight.detach().numpy())
  apart = models.load(folder, dtype='bfloat16', param_dtype='float32')
  assert {leaf.dtype for leaf in jax.tree.leaves(apart.params)} == {jnp.dtype('float32')}
  assert hidden_states(apart.config, apart.params, TOKENS).dtype == jnp.bfloat16


# --- straight into a sharding ---


@pytest.mark.parametrize('family, sizes', [
  ('qwen2', dict(data=2, fsdp=2, tensor=2)), ('qwen3', dict(fsdp=8)), ('llama', dict(fsdp=4, tensor=2))])
def test_loads_into_a_mesh(family, sizes, make_checkpoint):
  folder, _ = make_checkpoint(family)
  mesh, whole = make_mesh(**sizes), models.load(folder).params
  model = models.load(folder, mesh=mesh)
  wanted = shardings(parameter_axes(model.config), parameter_shapes(model.config), mesh)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), model.params, whole)
  assert jax.tree.map(lambda value: value.sharding, model.params) == wanted
  assert relative_error(model(TOKENS), np.asarray(models.load(folder)(TOKENS))) < 1e-5


# --- what is wrong with a checkpoint is named ---


def rewrite(folder, change):
  """Applies `change` to the tensors of a folder with a single file."""
  tensors = load_file(folder / 'model.safetensors')
  change(tensors)
  save_file(tensors, folder / 'model.safetensors')


def test_tensor_of_integers(make_checkpoint):
  folder, _ = make_checkpoint('llama')
  rewrite(folder, lambda tensors: tensors.update({'model.norm.weight': np.ones(32, np.int8)}))
  with pytest.raises(ValueError, match=r'model\.norm\.weight has the unsupported dtype I8'):
    models.load(folder)


def test_harmless_extras_are_let_through(make_checkpoint, torch_logits):
  folder, theirs = make_checkpoint('qwen2-tied')
  extra = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32),
           'lm_head.weight': theirs.model.embed_tokens.weight.detach().numpy()}
  rewrite(folder, lambda tensors: tensors.update(extra))
  assert relative_error(models.load(folder)(TOKENS), torch_logits(theirs)) < 1e-5
  rewrite(folder, lambda tensors: tensors.update({'lm_head.weight': -extra['lm_head.weight']}))
  with pytest.raises(ValueError, match='tie_word_embeddings is true, but lm_head.weight is another'):
    models.load(folder)
  rewrite(folder, lambda tensors: tensors.pop('model.embed_tokens.weight'))
  with pytest.raises(ValueError, match='1 missing tensor: model.embed_tokens.weight'):
    models.load(folder)


# --- saving ---


@pytest.mark.parametrize('family', FAMILIES)
def test_transformers_reads_what_we_save(family, make_checkpoint, torch_logits, tmp_path):
  from transformers import AutoModelForCausalLM
  folder, theirs = make_checkpoint(family)
  models.save(models.load(folder), tmp_path / 'out')
  again = AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
  assert type(again) is type(theirs)
  np.testing.assert_array_equal(torch_logits(again), torch_logits(theirs))


def test_saves_several_files_from_a_mesh_in_bfloat16(make_checkpoint, tmp_path):
  from transformers import AutoModelForCausalLM
  folder, theirs = make_checkpoint('qwen2')
  tmp_path.joinpath('model.safetensors').write_text('an older checkpoint')
  model = models.load(folder, mesh=make_mesh(fsdp=4, tensor=2))
  models.save(model, tmp_path, dtype='bfloat16', shard_bytes=10_000)
  assert not (tmp_path / 'model.safetensors').exists()
  assert all(file.stat().st_size < 20_000 for file in tmp_path.glob('*.safetensors'))
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == 2 * sum(value.size for value in jax.tree.leaves(model.params))
  again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype='auto')
  rounded = theirs.bfloat16().state_dict()
  assert again.state_dict().keys() == rounded.keys()
  assert all(value.dtype == rounded[name].dtype and value.equal(rounded[name])
             for name, value in again.state_dict().items())  # fmt: skip


def test_the_run_of_saved_weights_is_read_back_and_goes_with_them(make_checkpoint, tmp_path):
  decoder = models.load(make_checkpoint('qwen2')[0])
  assert hub.read_run(tmp_path) is None
  hub.save(decoder, tmp_path, run={'step': 3, 'config': {'method': 'carl'}})
  assert hub.read_run(tmp_path) == {'step': 3, 'config': {'method': 'carl'}}
  hub.save(decoder, tmp_path)
  (tmp_path / 'adapter.safetensors').touch()
  hub.save(decoder, tmp_path)
  assert not hub.is_adapter(tmp_path)
  assert hub.read_run(tmp_path) is None and hub.read_run(tmp_path / 'model.safetensors') is None


def test_what_is_not_finite_is_not_saved(make_checkpoint, tmp_path):
  model = models.load(make_checkpoint('qwen3')[0])
  layers = model.params['layers'] | {'gate': model.params['layers']['gate'].at[1, 2, 3].set(jnp.nan)}
  model = Decoder(model.config, params=model.params | {'layers': layers})
  with pytest.raises(transfer.NotFinite, match=r'out: layers/gate has values that are not finite$'):
    models.save(model, tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_an_adapter_is_saved_whatever_the_order_of_its_axes(tmp_path):
  _, adapter, run = hub.load_adapter(registry.POLICIES['smollm2-wiki'])
  hub.save_adapter(jax.tree.map(np.asfortranarray, adapter), tmp_path, run)  # as TPUs lay out what is narrow
  jax.tree.map(np.testing.assert_array_equal, hub.load_adapter(tmp_path)[1], adapter)


@pytest.mark.parametrize(('group', 'field', 'value'), [('lora', 'rank', 'x'), ('decoder', 'rope_scaling', 3)])
def test_a_note_that_is_not_of_an_adapter_is_one_line(group, field, value, tmp_path):
  run = json.loads((registry.POLICIES['smollm2-wiki'] / 'jaxsearch.json').read_text())
  (run if group == 'decoder' else run['config'])[group][field] = value
  (tmp_path / 'jaxsearch.json').write_text(json.dumps(run))
  (tmp_path / 'adapter.safetensors').symlink_to(registry.POLICIES['smollm2-wiki'] / 'adapter.safetensors')
  with pytest.raises(ValueError, match='jaxsearch.json does not say what adapter.safetensors is an adapter of'):
    hub.load_adapter(tmp_path)


# --- GGUF ---


def write_gguf(folder, path, config, quantise=gguf.GGMLQuantizationType.F32, rope_freqs=None):
  """A Hugging Face folder as the GGUF file that llama.cpp's convert_hf_to_gguf.py would make of it."""
  family = json.loads((folder / 'config.json').read_text())['model_type']
  writer = gguf.GGUFWriter(path, family)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_layers)
  for name, value in load_file(folder / 'model.safetensors').items():
    heads = {'q_proj': config.num_heads, 'k_proj': config.num_kv_heads}.get(name.split('.')[-2])
    if family == 'llama' and heads:
      value = value.reshape(heads, 2, value.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
    kind = quantise if value.ndim == 2 else gguf.GGMLQuantizationType.F32
    stored = np.ascontiguousarray(gguf.quants.quantize(np.ascontiguousarray(value), kind))
    writer.add_tensor(names.get_name(name, try_suffixes=('.weight', '.bias')), stored, raw_dtype=kind)
  if rope_freqs is not None:
    writer.add_tensor('rope_freqs.weight', rope_freqs)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize('family', ['qwen2-tied', 'qwen3', 'llama'])
def test_gguf_equals_the_folder(family, make_checkpoint, edit_config, tmp_path):
  folder, _ = make_checkpoint(family)
  if family == 'llama':
    edit_config(folder, rope_parameters=dict(rope_type='default', rope_theta=1e4))
  model = models.load(folder)
  write_gguf(folder, tmp_path / 'model.gguf', model.config)
  for path in (tmp_path, tmp_path / 'model.gguf', tmp_path):
    again = models.load(path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')  # as some repositories have it


@pytest.mark.parametrize('kind, tolerance', [('BF16', 1e-2), ('Q4_1', 0.12)])
def test_gguf_is_dequantised(kind, tolerance, make_checkpoint, tmp_path):
  folder, _ = make_checkpoint('qwen2')
  model = models.load(folder)
  write_gguf(folder, tmp_path / 'model.gguf', model.config, getattr(gguf.GGMLQuantizationType, kind))
  again = models.load(tmp_path / 'model.gguf')
  error = max(jax.tree.leaves(jax.tree.map(relative_error, again.params, jax.tree.map(np.array, model.params))))
  assert 0 < error < tolerance


def test_gguf_llama3_scaling(make_checkpoint, edit_config, tmp_path):
  folder, _ = make_checkpoint('llama')
  rope = dict(rope_theta=1e6, original_max_position_embeddings=8192, factor=32.0)
  edit_config(folder, rope_parameters=LLAMA3_ROPE | rope, max_position_embeddings=131072)
  model = models.load(folder)
  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoConfig.from_pretrained(folder)
  scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS['llama3'](theirs, 'cpu')
  plain = 1e6 ** (-np.arange(0, model.config.head_dim, 2) / model.config.head_dim)
  divisors = (plain / scaled.numpy()).round(4).astype(np.float32)
  write_gguf(folder, tmp_path / 'model.gguf', model.config, rope_freqs=divisors)
  assert models.load(tmp_path).config.rope_scaling == model.config.rope_scaling
  other = tmp_path / 'other.gguf'
  write_gguf(folder, other, model.config, rope_freqs=np.linspace(1, 32, len(divisors), dtype=np.float32))
  with pytest.raises(ValueError, match=r'other\.gguf: rope_freqs\.weight'):
    models.load(other)


# --- published weights ---


@pytest.mark.needs_weights
def test_smollm2_equals_transformers(torch_logits, tmp_path):
  file = speaking.smollm2()
  pytest.importorskip('accelerate', reason='transformers needs it to read GGUF')
  from transformers import AutoModelForCausalLM
  tokenizer, model = models.Tokenizer.load(file.parent), models.load(file.parent)
  assert model.config == models.preset('smollm2-135m')
  tokens = [tokenizer.encode('The capital of France is Paris, and the capital of Italy is')]
  ours = model(np.array(tokens))
  assert tokenizer.decode([int(ours[0, -1].argmax())]) == ' Rome'
  theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype='float32')
  assert relative_error(ours, torch_logits(theirs, tokens)) < 1e-4
