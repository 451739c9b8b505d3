"""From questions to credited trees: grow on the sampler, share between processes, reward, and count what happened."""

import pickle
import types
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np

from jaxsearch.data.questions import Question
from jaxsearch.data.sources import load_corpus
from jaxsearch.models.decoder import DecoderConfig
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.engine import Engine
from jaxsearch.tools import SearchBackend, open_search
from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.python_sandbox import PythonSandbox
from jaxsearch.tools.simulated import ModelWriter
from jaxsearch.training import policy
from jaxsearch.trees.tree import Role, Stop, Tree

Groups = list[list[Tree]]  # the trees of each question


def open_engine(config: ml_collections.ConfigDict, model_config: DecoderConfig, tokenizer: Tokenizer,
                mesh: jax.sharding.Mesh | None = None, corpus: str = '') -> Engine:
  """The sampler of a config with its search back end; `corpus` takes the place of `config.data.corpus`."""
  backend = open_backend(config, corpus or config.data.corpus, mesh)
  return Engine(model_config, tokenizer, search=backend, topk=config.search.topk, python=PythonSandbox(**config.python), mesh=mesh,
                **config.sampler)


def open_backend(config: ml_collections.ConfigDict, corpus: str, mesh: jax.sharding.Mesh | None = None) -> SearchBackend:
  """What `config.search` names: the other fields there are arguments of `open_search`."""
  settings = dict(config.search)
  kind, _ = settings.pop('backend'), settings.pop('topk')
  if kind == 'simulated' and settings['writer'] == 'model':
    settings['writer'] = _model_writer(settings['writer_model'], config.dtype, mesh)
  passages = load_corpus(corpus) if kind == 'bm25' or (kind, settings['writer']) == ('simulated', 'world') else None
  return open_search(kind, corpus=passages, seed=config.seed, **settings)


def _model_writer(path: str, dtype: str, mesh: jax.sharding.Mesh | None) -> ModelWriter:
  if not path:
    raise ValueError("search.writer 'model' needs a search.writer_model")
  assistant = policy.load_assistant(ml_collections.ConfigDict(dict(
    model=path, slots=16, length=1024, max_tokens=512, stop=(), chat=True)), dtype, mesh)
  if assistant.engine.tokenizer.chat_template is None:
    raise ValueError(f"{path} cannot be search.writer 'model': without a chat template it follows no instruction")
  return ModelWriter(DynamicBatcher(assistant))


def grow(engine: Engine, method: types.ModuleType, questions: Sequence[Question], sizes: Sequence[int], key,
         **settings) -> tuple[Groups, dict[str, float]]:
  """Grows so many trees for each question; returns them and the sampler's metrics.

  With several processes each grows the trees of its own questions, and all get the trees of all.
  """
  tokenizer = engine.tokenizer
  trees = [Tree(tokenizer, question) for question, size in zip(questions, sizes, strict=True) for _ in range(size)]
  seed_trees(trees, key)
  metrics = engine.run([(method.grow(tree.question, tree, **settings), tree) for tree in trees], key)
  ends = np.cumsum(sizes)
  groups = [trees[end - size:end] for size, end in zip(sizes, ends)]
  return share(groups, tokenizer), metrics


def seed_trees(trees: Sequence[Tree], key) -> None:
  """Gives every tree random numbers of its own, a function of the key and its place."""
  words = np.asarray(jax.random.key_data(key)).ravel().tolist()
  for index, tree in enumerate(trees):
    tree.rng = np.random.default_rng([*words, index])


def share(groups: Groups, tokenizer) -> Groups:
  """The groups of all processes, in the order of the global batch (each process has every n-th question of it)."""
  if jax.process_count() == 1:
    return groups
  for tree in (tree for group in groups for tree in group):
    tree.tokenizer = None  # every process has its own
  everyone = [pickle.loads(own) for own in meshes.gather_bytes(pickle.dumps(groups))]
  groups = [group for turn in zip(*everyone, strict=True) for group in turn]
  for tree in (tree for group in groups for tree in group):
    tree.tokenizer = tokenizer
  return groups


def agreed(trees: Sequence[Tree], tokenizer) -> list[Tree]:
  """The trees of the first process on all: what each grew for the same questions may differ where the clock decides."""
  if jax.process_count() == 1:
    return list(trees)
  for tree in trees:
    tree.tokenizer = None
  trees = pickle.loads(meshes.gather_bytes(pickle.dumps(list(trees)) if jax.process_index() == 0 else b'')[0])
  for tree in trees:
    tree.tokenizer = tokenizer
  return trees


def pruned(groups: Groups) -> list[Tree]:
  """The trees of all groups, cut down to what is trained and what leads to it."""
  trees = [tree for group in groups for tree in group]
  for tree in trees:
    tree.prune()
  return trees


def credited(trees: Sequence[Tree]) -> list[Tree]:
  """Those of the trees that the method gave credit: what training rows hold."""
  return [tree for tree in trees if any(node.trained and node.advantages is not None for node in tree.walk())]


def summary(groups: Groups) -> dict[str, float]:
  """What came of the trees: means of reward, exact match and the method's notes (`searches` …), shares of stop reasons."""
  trees = [tree for group in groups for tree in group]
  names = sorted({name for tree in trees for name in tree.metrics})
  noted = {name: float(np.mean([tree.metrics[name] for tree in trees if name in tree.metrics])) for name in names}
  stops = {f'stop_{reason}': float(np.mean([tree.stop == reason for tree in trees])) for reason in Stop}
  rewards = [found for group in groups if (found := [tree.reward for tree in group if tree.reward is not None])]
  return noted | stops | {
    'reward': float(np.mean(np.concatenate(rewards))) if rewards else 0.0,
    'groups_alike': float(np.mean([len(set(found)) == 1 for found in rewards])) if rewards else 1.0,  # nothing to compare
    'trees': len(trees),
    'em': float(np.mean([tree.question.score(tree.answer) for tree in trees])),
    'tokens_generated': sum(tree.count(Role.POLICY) for tree in trees),
    'tokens_per_tree': float(np.mean([tree.count() for tree in trees])),
  }  # fmt: skip
