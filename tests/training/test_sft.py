"""Demonstrations: reading, masking, order, and a model that learns them."""

import json
import pathlib

import jax
import numpy as np
import pytest

from configs import sft_gold
from jaxsearch import cli, registry, setup
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation import agents
from jaxsearch.models import hub
from jaxsearch.models.architecture import initial_params
from jaxsearch.models.decoder import Decoder
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards import formats
from jaxsearch.tools.bm25 import BM25
from jaxsearch.training import RunStopped, batch as batches, checkpoint, row_files, saved_policies, sft
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role
from jaxsearch.world import files as world
from tests.training import child


def test_only_policy_spans_are_learned(tmp_path):
  tokenizer = Tokenizer.load(world.folder())
  path = tmp_path / 'demonstrations.jsonl'
  path.write_text('{"spans": [{"role": "prompt", "text": "Who? "}, {"role": "policy", "text": "It is"}, '
                  '{"role": "observation", "text": " (a fact) "}, {"role": "policy", "text": "so."}]}\n')
  [tree] = sft.read_demonstrations(path, tokenizer)
  rows = lay_out([tree], 64, pad_id=0)
  learned = rows.tokens[rows.loss_weights > 0].tolist()
  assert learned == tokenizer.encode('It is') + tokenizer.encode('so.')
  assert tokenizer.decode(rows.tokens[rows.real].tolist()) == 'Who? It is (a fact) so.'


def test_a_demonstration_longer_than_a_row_is_named(tmp_path):
  line = '{"spans": [{"role": "prompt", "text": "a"}, {"role": "policy", "text": "b c d"}]}\n'
  (tmp_path / 'd.jsonl').write_text(line)
  tokenizer = Tokenizer.load(world.folder())
  size = len(tokenizer.encode('a') + tokenizer.encode('b c d'))
  assert sft.read_demonstrations(tmp_path / 'd.jsonl', tokenizer, size)
  with pytest.raises(DataError, match=f'd.jsonl:1: {size} tokens, more than train.row_length={size - 1}'):
    sft.read_demonstrations(tmp_path / 'd.jsonl', tokenizer, size - 1)


def test_every_epoch_has_each_example_once_in_its_own_order():
  line = [index for step in range(9) for index in sft.shuffled(7, 5, step, seed=3)]
  epochs = [line[start:start + 7] for start in range(0, 42, 7)]
  assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 3
  assert sft.shuffled(7, 5, 4, seed=3) == line[20:25]
  assert sft.shuffled(7, 5, 4, seed=4) != line[20:25]


def test_gold_chains_of_the_world_search_every_step_and_answer_right():
  config = sft_gold.get_config()
  config.data.update(hops=(2,), arithmetic=False)
  tokenizer = Tokenizer.load(world.folder())
  number, demonstration = sft.open_demonstrations(config, tokenizer)
  questions, searched = load_questions('world:rl', hops=(2,), arithmetic=False), BM25(world.corpus())
  assert number == len(questions)
  for question, tree in zip(questions[:5], map(demonstration, range(5))):
    learned = [node.text for node in tree.nodes(Role.POLICY)]
    assert formats.chain_format(learned) == 1.0
    queries = [step['query'] for step in question.metadata['steps']]
    assert [grammar.search_query(span) for span in learned[:-1]] == queries
    assert grammar.answer(learned[-1]) == question.golden_answers[0]
    shown = ''.join(node.text for node in tree.nodes(Role.OBSERVATION))
    assert shown.startswith(templates.prompt(question.question, 'world'))
    found = searched.search(queries[:1], config.search.topk)[0]
    assert grammar.information(found, tokenizer.special_tokens) in shown
    assert tree.count() <= config.train.row_length


@pytest.fixture
def adapter_config(config):
  config.checkpoint_every, config.critic.enabled, config.optim.lr_warmup_updates = 1, False, 0
  config.method = 'search_r1'
  config.lora.update(rank=2, alpha=8.0)
  return config


def same(params, others, atol=0.0):
  for array, other in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
    np.testing.assert_allclose(array, other, rtol=0, atol=atol)


def test_an_adapter_learns_resumes_and_is_exported_without_its_base(adapter_config, tmp_path):
  config, folder = adapter_config, tmp_path / 'adapter'
  for config.steps in (1, 3):
    sft.train(config)
  rows, base = row_files.read(f'{config.out}/metrics.jsonl'), hub.load(config.model).params
  decoder, merged, host = saved_policies.load_params(config.out)
  assert host['step'] == 3 and not np.array_equal(merged['layers']['q'], base['layers']['q'])
  np.testing.assert_array_equal(merged['embedding'], base['embedding'])
  jax.tree.map(np.testing.assert_array_equal, merged, saved_policies.load_params(config.out, dtype='bfloat16')[1])

  # The loss of the last step's demonstrations, one of which comes twice, with the parameters of the step before.
  _, before, _ = saved_policies.load_params(f'{config.out}/checkpoints/2')
  number, demonstration = sft.open_demonstrations(config, Tokenizer.load(config.model))
  logprobs = []
  indices = sft.shuffled(number, config.sft.per_step, 2, config.seed)
  assert len(set(indices)) < len(indices)
  for index in indices:
    prompt, written = (node.tokens for node in demonstration(index).walk() if node.tokens)
    logits = jax.nn.log_softmax(Decoder(decoder, params=before)(np.array([prompt + written]))[0])
    logprobs += [logits[len(prompt) + place - 1, token] for place, token in enumerate(written)]
  assert rows[-1]['loss'] == pytest.approx(-np.mean(logprobs), rel=1e-4) and rows[-1]['loss'] < rows[0]['loss']

  export = ['export', f'--checkpoint={config.out}', f'--out={folder}', '--adapter']
  for dtype, most, atol in (('float32', 20_000, 0.0), ('bfloat16', 10_000, 1e-3)):
    assert cli.main([*export, f'--dtype={dtype}']) == 0
    assert sorted(path.name for path in folder.iterdir()) == ['adapter.safetensors', 'jaxsearch.json']
    assert (folder / 'adapter.safetensors').stat().st_size < most
    policy = agents.load_policy(config, str(folder))
    assert policy.step == 3 and policy.tokenizer.vocab_size == Tokenizer.load(config.model).vocab_size
    same(policy.params, merged, atol)
  (folder / 'adapter.safetensors').write_bytes((folder / 'adapter.safetensors').read_bytes()[:-40])
  with pytest.raises(ValueError, match='adapter.safetensors cannot be read'):
    agents.load_policy(config, str(folder))

  config.steps, demonstrations = 4, pathlib.Path(config.sft.demonstrations)
  written = demonstrations.read_text()
  demonstrations.write_text(written + written)
  with pytest.raises(ValueError, match='sft.demonstrations=.* has changed since this run began'):
    sft.train(config)
  demonstrations.write_text(written)
  hub.save(Decoder(child.NUMBERS, params=initial_params(child.NUMBERS, jax.random.key(7))), config.model)
  with pytest.raises(ValueError, match='has changed since this run began'):
    sft.train(config)


def test_a_tokenizer_of_a_larger_model_is_refused(config, monkeypatch):
  monkeypatch.setattr(Tokenizer, 'vocab_size', child.NUMBERS.vocab_size + 1)
  with pytest.raises(ValueError, match='4097 tokens, but the model 4096 embeddings: it is that of another model'):
    sft.train(config)


def test_an_adapter_is_a_model_to_train_on(adapter_config, tmp_path, capsys, monkeypatch):
  config, folders = adapter_config, [tmp_path / name for name in ('first', 'second')]
  monkeypatch.setitem(registry.POLICIES, 'a-base', config.model)
  config.steps, base, config.model = 1, config.model, 'a-base'
  sft.train(config)
  _, first, _ = saved_policies.load_params(config.out)
  assert cli.main(['export', f'--checkpoint={config.out}', f'--out={folders[0]}', '--adapter']) == 0
  monkeypatch.setitem(registry.POLICIES, 'a-policy', folders[0])
  for config.model in ('a-policy', str(folders[0])):
    policy = agents.load_policy(config)
    same(policy.params, first)
    assert setup.architecture(config) == policy.config
  config.out = str(tmp_path / 'again')
  sft.train(config)
  _, second, host = saved_policies.load_params(config.out)
  assert host['reference'] == pytest.approx(hub.fingerprint(first), rel=1e-5)
  assert cli.main(['export', f'--checkpoint={config.out}', f'--out={folders[0]}', '--adapter']) == 2
  assert f'{folders[0]} holds the base of this adapter: choose another folder' in capsys.readouterr().err
  # an adapter on an adapter on a base
  assert cli.main(['export', f'--checkpoint={config.out}', f'--out={folders[1]}', '--adapter']) == 0
  policy = agents.load_policy(config, str(folders[1]))
  same(policy.params, second)
  assert policy.tokenizer.vocab_size == Tokenizer.load(base).vocab_size
  # what an adapter names as its base is not opened, be it itself
  about = json.loads((folders[1] / 'jaxsearch.json').read_text())
  config.model = str(folders[1])
  for about['config']['model'] in (base, str(folders[1])):
    (folders[1] / 'jaxsearch.json').write_text(json.dumps(about))
    for load in (agents.load_policy, setup.load_tokenizer):
      with pytest.raises(ValueError, match='a checkpoint does not say what is opened here'):
        load(config)
  config.model = str(folders[0])
  (folders[0] / 'jaxsearch.json').unlink()
  with pytest.raises(FileNotFoundError, match='jaxsearch.json: missing'):
    agents.load_policy(config, str(folders[1]))


def test_a_run_out_of_memory_stops_and_resumes_with_less(config, tmp_path, monkeypatch, capfd):
  config.steps, config.checkpoint_every, place, placed = 2, 1, batches.place, []
  config.critic.update(enabled=True, shared=True)  # as in CARL's configs: values are learned later

  def place_once(*args):
    placed.append(args)
    if len(placed) == 2:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB')
    return place(*args)

  monkeypatch.setattr(batches, 'place', place_once)
  with pytest.raises(RunStopped) as error:
    sft.train(config)
  assert str(error.value) == (
    'out of memory while updating the policy (16.00GiB asked for): lower train.micro_rows, train.chunk or '
    'train.row_length, or set remat=full; the last checkpoint is that of step 1; rerun the same command with less '
    'to resume (length, row_length, dtype, optim, loss and lora: in another out)')
  config.train.chunk, config.sampler.slots = config.train.chunk // 2, config.sampler.slots // 2
  sft.train(config)
  read = checkpoint.restore_host
  monkeypatch.setattr(checkpoint, 'restore_host', lambda *where: read(*where) | {'memory': {}})
  with pytest.raises(ValueError, match='holds a run of `jaxsearch train`: set another out'):
    sft.train(config)
  assert 'resuming at step 2' in capfd.readouterr().err
  assert [row['step'] for row in row_files.read(f'{config.out}/metrics.jsonl')] == [1, 2]
  assert saved_policies.load_params(config.out)[2]['step'] == 2 and config.critic.enabled
  assert cli.main(['export', f'--checkpoint={config.out}', f'--out={tmp_path / "adapter"}', '--adapter']) == 2
  assert 'this run has no adapter (lora.rank=0)' in capfd.readouterr().err
