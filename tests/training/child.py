"""A run small enough to be killed often: tiny random policy, tiny questions, real sampler and search.

usage: child.py COMMAND FOLDER OUT [field=value ...]      (COMMAND: train or sft; FOLDER: made by `make_inputs`)
"""

import json
import os
import pathlib
import sys
import types
import zlib

import jax

from configs import base
from jaxsearch.models import hub
from jaxsearch.models.decoder import Decoder, DecoderConfig, initial_params
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.requests import Generate, Search
from jaxsearch.training import loop, sft
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
    shown, special = isinstance(documents, list), tree.tokenizer.special_tokens
    node = node.append(
      grammar.information(documents, special) if shown else grammar.failure(documents.reason, special), Role.OBSERVATION)
    node = yield Generate(node, max_tokens=max_tokens)
    tree.answer = node.text
    tree.metrics['searches'] = 1

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

  from jaxsearch.methods import search_r1
  method.grow, method.reward, method.credit = grow, reward, credit
  return method


def get_config(folder: pathlib.Path, out: str):
  config = base.get_config()
  config.unlock()
  config.out, config.progress, config.method, config.model = out, False, 'toy', str(folder / 'model')
  config.data.questions, config.data.corpus = str(folder / 'questions.jsonl'), str(folder / 'corpus.jsonl')
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


def main(command: str, folder: str, out: str, *changes: str) -> None:
  sys.modules['jaxsearch.methods.toy'] = toy_method()
  config = get_config(pathlib.Path(folder), out)
  for change in changes:
    name, value = change.split('=')
    group, _, field = name.rpartition('.')
    (config[group] if group else config)[field] = json.loads(value)
  {'train': loop.train, 'sft': sft.train}[command](config)


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', int(os.environ.get('CHILD_DEVICES', '1')))
  main(*sys.argv[1:])
