"""A run small enough to be killed often: tiny random policy, tiny questions, real sampler and search.

usage: child.py COMMAND FOLDER OUT [field=value ...]

COMMAND is train, sft or critic-warmup; FOLDER is made by `make_inputs`.

Or `configs FOLDER OUT '["NAME", "field=value", …]' … [field=value ...]`: trains shipped configs one after the
other, the first in OUT/0, see `shipped_config`.
"""

import importlib
import json
import os
import pathlib
import sys
import types
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from configs import base
from configs.carl import critic_warmup as warmup_settings
from jaxsearch.commands import COMMANDS
from jaxsearch.methods import search_r1
from jaxsearch.models import hub
from jaxsearch.models.architecture import DecoderConfig, initial_params
from jaxsearch.models.decoder import Decoder
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.requests import Generate, Search
from jaxsearch.training import critic_warmup
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role
from jaxsearch.world import files as world

NUMBERS = DecoderConfig(vocab_size=4096, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
                        num_kv_heads=1, head_dim=8, qkv_bias=True, tie_embeddings=True, max_position=512)
WORDS = 'red blue green north south river town lake king year bridge stone'.split()


def make_inputs(folder: pathlib.Path) -> None:
  """A random policy as a Hugging Face folder, questions, passages and demonstrations."""
  tokenizer = Tokenizer.load(world.folder())
  hub.save(Decoder(NUMBERS, params=initial_params(NUMBERS, jax.random.key(0))), folder / 'model', tokenizer)

  def write(name, records):
    (folder / name).write_text(''.join(json.dumps(record) + '\n' for record in records))

  write('questions.jsonl', [{'id': str(i), 'question': f'Which {word}?', 'golden_answers': [word]}
                            for i, word in enumerate(WORDS)])
  write('corpus.jsonl', [{'id': str(i), 'contents': f'"{word}"\nThe {word} of the {WORDS[i - 1]}.'}
                         for i, word in enumerate(WORDS)])
  write('demonstrations.jsonl', [{'spans': [{'role': 'prompt', 'text': f'Which {word}?'},
                                            {'role': 'policy', 'text': f' The {word}.'}]} for word in WORDS])


def toy_method() -> types.ModuleType:
  """Two spans with a search between them, whatever is generated; a reward that differs inside groups."""
  method = types.ModuleType('jaxsearch.methods.toy')

  def grow(question, tree, *, max_tokens):
    node = tree.root.append(f'{question.question} ', Role.PROMPT)
    node = yield Generate(node, max_tokens=max_tokens)
    documents = yield Search(node, question.question)
    shown = documents if isinstance(documents, list) else []
    text = grammar.information(shown, tree.tokenizer.special_tokens)
    node = node.append(text, Role.OBSERVATION)
    node = yield Generate(node, max_tokens=max_tokens)
    tree.answer = node.text
    tree.metrics.update(searches=1, drawn=tree.rng.random())

  def reward(tree):
    return zlib.crc32(str(tree.leaves()[0].path_tokens()).encode()) % 3 / 2

  def credit(groups, context, *, normalize_std):
    context.memory['steps'] = context.memory.get('steps', 0) + 1
    for tree in (tree for group in groups for tree in group):
      tree.reward = method.reward(tree)
    search_r1.credit_relative(groups, normalize_std=normalize_std)
    context.metrics['memory'] = context.memory['steps']
    for node in (node for group in groups for tree in group for node in tree.nodes(Role.POLICY)):
      if node.values is not None:
        node.returns = 0.9 * node.values + 0.1 * node.tree.reward

  method.grow, method.reward, method.credit = grow, reward, credit
  return method


def halves_method() -> types.ModuleType:
  """A policy is right closed-book on every second question, and with tools on two of three."""
  method = types.ModuleType('jaxsearch.methods.halves')

  def grow(question, tree, *, max_tokens, tools=True):
    node = tree.root.append(f'{question.question} {"tools" if tools else "closed"} ', Role.PROMPT)
    for _ in range(2):
      node = yield Generate(node, max_tokens=max_tokens)
    tree.answer = question.golden_answers[0] if int(question.id) % (3 if tools else 2) else None
    tree.metrics['searches'] = 1

  def credit(groups, context, *, normalize_std):
    for tree in (tree for group in groups for tree in group):
      tree.reward = method.reward(tree)
      for node in tree.nodes(Role.POLICY):
        node.returns = np.full(len(node.tokens), tree.reward, np.float32)
    search_r1.credit_relative(groups, normalize_std=normalize_std)

  method.grow, method.credit = grow, credit
  method.reward = lambda tree: tree.question.score(tree.answer)
  return method


def get_config(folder: pathlib.Path, out: str):
  config = base.get_config().unlock()
  config.out, config.progress, config.method, config.model = out, False, 'toy', str(folder / 'model')
  config.data.questions, config.data.corpus = str(folder / 'questions.jsonl'), str(folder / 'corpus.jsonl')
  config.eval.questions, config.eval.number = str(folder / 'questions.jsonl'), 6
  config.sft.demonstrations, config.sft.per_step = str(folder / 'demonstrations.jsonl'), 5
  config.steps, config.questions_per_step, config.group_size = 6, 5, 2
  config.grow = dict(max_tokens=5)
  config.sampler.update(slots=4, length=128)
  config.train.update(row_length=128, micro_rows=2, chunk=64, mini_batch=5, epochs=2)
  config.loss.update(kl_coef=0.1, entropy_coef=0.01)
  config.optim.update(learning_rate=1e-2, lr_warmup_updates=5, weight_decay=0.1)
  config.checkpoint_every = 2
  config.critic.update(enabled=True, learning_rate=1e-2)
  config.mesh.update(data=1, fsdp=1, tensor=1)
  return config


def warmup_config(config):
  """The same with `halves_method` and a critic on the backbone of the policy, which is warmed up."""
  config.method = 'halves'
  config.train.update(epochs=1, mini_batch=0, aggregate='step-mean')
  config.steps, config.checkpoint_every = 2, 1
  config.critic.shared = True
  config.critic_warmup = warmup_settings(
    closed_book={'tools': False}, tool_required={}, second_search={'topk': 1})
  config.critic_warmup.update(
    questions=12, tier_rollouts=2, trajectories=12, tier_2_share=0.5, clusters=3, trees=8, min_updates=4,
    max_updates=8, check_every=4, held_out=0.9, head_rate=3e-2, backbone_rate=3e-3)
  config.critic_warmup.gate.update(auc=0.0, sign=0.0, explained=-100.0)
  return config


def shipped_config(name: str, out: str):
  """A config of configs/ as it is, but for two small steps. Questions come back in the second."""
  config = importlib.import_module(f'configs.{name}').get_config().unlock()
  config.out, config.progress, config.steps, config.checkpoint_every, config.eval.every = out, False, 2, 2, 0
  config.questions_per_step, config.group_size, config.data.number = 3, min(config.group_size, 3), 3
  config.sampler.slots = 8
  config.train.update(
    micro_rows=4, epochs=min(config.train.epochs, 2), mini_batch=5 if config.train.mini_batch else 0)
  config.optim.eps = 1e-4  # next to no gradient gives no step of full size with the sign of a rounding error
  if config.method == 'cusearch':
    config.credit.keep = 5
  return config


def change_fields(config, changes: Sequence[str]) -> None:
  for change in changes:
    name, value = change.split('=', 1)
    group, _, field = name.rpartition('.')
    (config[group] if group else config)[field] = json.loads(value)


def main(command: str, folder: str, out: str, *changes: str) -> None:
  for method in (toy_method(), halves_method()):
    sys.modules[method.__name__] = method
  config = get_config(pathlib.Path(folder), out)
  if command == 'configs':
    own = [change for change in changes if not change.startswith('[')]
    for number, one in enumerate(json.loads(change) for change in changes if change.startswith('[')):
      config = shipped_config(one[0], f'{out}/{number}')
      change_fields(config, [*one[1:], *own])
      if number == 0:
        meshes.start_distributed(**config.distributed)
      config.distributed.enabled = False  # it was joined
      COMMANDS['train'].get_default('run')(config, None)
    return
  if command == 'critic-warmup':
    config, critic_warmup.CHUNK = warmup_config(config), 8
  change_fields(config, changes)
  COMMANDS[command].get_default('run')(config, None)


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', int(os.environ.get('CHILD_DEVICES', '1')))
  main(*sys.argv[1:])
