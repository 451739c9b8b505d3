"""Makes the warm-started policies of the embedded world: first the skill of searching, then the wrong habits.

  short    documents of the encyclopedia and worked chains, most under made-up names, into a decoder with
           planted induction heads; only what fits into short rows, one or two hops
  skill    the same with long chains
  names    the same with many retellings of documents, so that names and values of the encyclopedia are
           familiar
  drill    the same with many single steps about names of random tokens, so that every token can be copied;
           ends at a gate: in greedy rollouts on held-out entities enough answers must be right
  mix      chains of which most answer at once or after one search; the skill stays, the strategy is now a bad
           one
  review   from the mix, for Search-R2: it has also seen reviews of drafts
  carl     from the mix, for CARL: it writes code and contexts, see carl_examples.py
  recall   the same with more of what CARL's policy knows closed-book
  reader   a smaller model of another family (Llama) that answers from evidence alone; R-Search's evidence
           reward asks it

What ships is `policy`, `reviewer` and `coder` (mix, review and recall with all logits scaled up) and
`reader`. Each stage ends with a Hugging Face folder under `config.out`; a stage whose folder exists is not
trained again.
"""

import functools
import pathlib
import random
import time
from collections.abc import Callable, Iterator

import jax
import ml_collections

from jaxsearch import setup
from jaxsearch.data.sources import load_questions
from jaxsearch.evaluation import agents
from jaxsearch.models import hub
from jaxsearch.models.architecture import DecoderConfig, initial_params, preset
from jaxsearch.models.decoder import Decoder
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import mesh as meshes
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.training import sft, state as states
from jaxsearch.training.run_folder import RunStopped
from jaxsearch.trees.layout import pack
from jaxsearch.trees.tree import Tree
from jaxsearch.world import files as world
from jaxsearch.world.chains import Example
from recipes.world import carl_examples, examples
from recipes.world.induction import plant_induction

EMBEDDING_GAIN = 2.5  # on the usual 0.02: a tied embedding that small gives flat logits for too long


def make(config: ml_collections.ConfigDict) -> pathlib.Path:
  """Runs the stages whose folders are missing, returns that of the shipped policy; RunStopped if the drill
  was too short."""
  out, tokenizer = pathlib.Path(config.out), Tokenizer.load(world.folder())
  model_config, params = planted(config.model, config.seed)
  train = functools.partial(train_stage, config, tokenizer, model_config)
  for name in ('short', 'skill', 'names', 'drill'):
    params = train(name, params)
  share = share_right(config)
  print(f'{share:.1%} of held-out questions answered correctly', flush=True)
  if share < config.gate.em:
    raise RunStopped(
      f'{out}/drill answers {share:.1%} of held-out questions, the gate is {config.gate.em:.0%}: '
      'train longer (--config.drill.updates) into another folder')
  mixed = train('mix', params)
  reviewer = train('review', mixed)
  coder = train('recall', train('carl', mixed))
  for name, params in (('policy', mixed), ('reviewer', reviewer), ('coder', coder)):
    sharper = params | {'final_norm': config.mix.sharpen * params['final_norm']}
    hub.save(Decoder(model_config, params=sharper), out / name, tokenizer)
  model_config, params = planted(config.reader.model, config.seed)
  train_stage(config, tokenizer, model_config, 'reader', params)
  return out / 'policy'


def planted(model: str, seed: int) -> tuple[DecoderConfig, dict]:
  """(model_config, parameters) of a 'random:PRESET' with induction heads in it."""
  model_config = preset(model.removeprefix('random:'))
  params = initial_params(model_config, jax.random.key(seed))
  params = params | {'embedding': EMBEDDING_GAIN * params['embedding']}
  return model_config, plant_induction(model_config, params, seed)


def share_right(config: ml_collections.ConfigDict) -> float:
  """Share of held-out questions, arithmetic aside, that the drilled policy answers right, greedy."""
  gate = config.gate
  questions = load_questions(gate.questions, hops=gate.hops, arithmetic=False)[:gate.number]
  agent = agents.open_agent(config, f'{config.out}/drill')
  trees, _ = rollout(agent, questions, jax.random.key(config.seed), sampling=GREEDY)
  return sum(tree.question.score(tree.answer) for tree in trees) / len(trees)


def examples_of(config: ml_collections.ConfigDict, name: str, tokenizer) -> Iterator[Example | Tree]:
  """Endless examples of a stage."""
  rng = random.Random(f'{name} {config.seed}')
  shares, kinds = zip(*_kinds(config, name, tokenizer, rng), strict=True)
  while True:
    yield kinds[0]() if len(kinds) == 1 else rng.choices(kinds, shares)[0]()


def _kinds(config: ml_collections.ConfigDict, name: str, tokenizer,
           rng: random.Random) -> list[tuple[float, Callable]]:
  """(share, function that makes one) of every kind of example of a stage."""
  stage = config[name]
  match name:
    case 'mix':
      shares = stage.at_once, stage.one_search
      return [(1, lambda: examples.undecided(tokenizer, rng, shares=shares, evidence=stage.evidence))]
    case 'review':
      mix, shares = examples_of(config, 'mix', tokenizer), (stage.at_once, stage.one_search)
      return [(stage.reviews, lambda: examples.reviewed(tokenizer, rng, shares=shares, noise=stage.noise)),
              (1 - stage.reviews, lambda: next(mix))]
    case 'carl' | 'recall':
      episode = functools.partial(carl_examples.episode, tokenizer, rng, lost=stage.lost,
                                  renamed=stage.renamed)
      searched = functools.partial(carl_examples.searched, tokenizer, rng)
      return [
        (stage.statements, lambda: carl_examples.statement(tokenizer, rng)),
        (stage.closed_book, lambda: carl_examples.closed_book(tokenizer, rng, 'world_carl_direct')),
        (stage.forced, lambda: episode(closed_book=0.0, one_call=0.0, template='world_carl_forced')),
        (stage.episodes, lambda: episode(closed_book=stage.at_once, one_call=stage.one_call)),
        (stage.drills, lambda: carl_examples.drill(tokenizer, rng)),
        (stage.searches, lambda: searched(closed_book=stage.at_once, one_search=stage.one_call)),
        (stage.answers, lambda: searched(closed_book=1.0, one_search=0.0, template='world_direct')),
      ]
    case 'reader':
      return [(1, lambda: examples.reading(tokenizer, rng))]
  return [(stage.passages, lambda: examples.passage(tokenizer, rng)),
          (stage.retellings, lambda: examples.retelling(tokenizer, rng)),
          (stage.drills, lambda: examples.drill(tokenizer, rng)),
          (1 - stage.passages - stage.retellings - stage.drills,
           lambda: examples.skilled(tokenizer, rng, renamed=stage.renamed))]


def train_stage(config: ml_collections.ConfigDict, tokenizer, model_config: DecoderConfig, name: str,
                params: dict, made: Iterator[Example | Tree] | None = None) -> dict:
  """Trains a stage from `params`, on the examples `made` for it, logs to the terminal and saves it.

  Loads it instead if it is saved.
  """
  folder, stage = pathlib.Path(config.out) / name, config[name]
  if (folder / 'config.json').exists():  # the last file that `hub.save` writes
    return hub.load(folder).params
  run = config.copy_and_resolve_references().unlock()
  run.steps = stage.updates
  run.optim.update(learning_rate=stage.learning_rate, schedule=stage.schedule)
  run.train.update(row_length=stage.row_length, micro_rows=stage.rows)
  mesh, start = meshes.make_mesh(devices=jax.devices()[:1]), time.perf_counter()
  params = states.place_params(params, setup.param_shardings(model_config, mesh))
  state, learn = sft.open_imitation(run, model_config, params, mesh)
  forests = filled(made or examples_of(config, name, tokenizer), stage.rows, stage.row_length)
  for update, forest in zip(range(1, stage.updates + 1), forests):
    state, row = learn(state, forest)
    if update % 20 == 0 or update == stage.updates:
      seconds = time.perf_counter() - start
      print(f'{name} {update}/{stage.updates} loss {row["loss"]:.3f} {seconds:.0f} s', flush=True)
  hub.save(Decoder(model_config, params=state.params), folder, tokenizer)
  return state.params


def filled(examples: Iterator[Example | Tree], rows: int, length: int) -> Iterator[list[Tree]]:
  """Endless forests, each of which fills `rows` rows of `length` tokens; longer examples are skipped."""
  forest, sizes = [], []
  for example in examples:
    tree = example if isinstance(example, Tree) else sft.demonstration(*example)
    size = tree.count()
    if size > length:
      continue
    if len(pack([*sizes, size], length)) > rows:
      yield forest
      forest, sizes = [], []
    forest.append(tree)
    sizes.append(size)
