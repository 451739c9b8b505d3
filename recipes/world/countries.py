"""The bed of CARL's study: a policy that knows the facts on 60 countries by heart, and on no other.

The facts are exchanged among 120 countries, so that no name hints at them: a value stands for at most two of
them. 60 are known (tier 2), 60 are not (tier 1); half of each are to learn from, half are held out. A share
`LOST` of the contexts loses what was found; then the policy searches again, answers by heart, or guesses.

It begins as the shipped policy of CARL. It learns from statements on known countries, and from episodes on
these and on the world's remaining countries, whose facts are drawn anew each time; then from drills too, so
that it copies any name. It never sees a fact on an unknown country, nor searches by what it knows.
"""

import dataclasses
import functools
import pathlib
import random
import re
from collections.abc import Iterator

import jax
import ml_collections
import numpy as np

from configs import carl
from jaxsearch import setup
from jaxsearch.data.corpus import Document, join_contents
from jaxsearch.data.questions import Question, write_questions
from jaxsearch.evaluation import agents
from jaxsearch.models import hub
from jaxsearch.models.decoder import Decoder
from jaxsearch.rewards.match import answer_found
from jaxsearch.sampler.driver import rollout
from jaxsearch.training import row_files
from jaxsearch.training.run_folder import RunStopped
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from jaxsearch.world.chains import Example, found, sought
from jaxsearch.world.facts import ATTRIBUTES, Entity, read_back, sentence
from recipes.world import carl_examples, policies

ASKED = ('capital', 'population', 'currency', 'language', 'calling_code', 'domain')
NUMBER = 60  # of known countries, and of unknown ones
LOST = 0.4  # of the contexts
AGAIN = 0.3  # of the times that a context lost what was found
TRIES = 2  # searches of an episode at most
CALLS = 0.6  # of the episodes search
BLANK = 'It is not there.'
COPIES = 2  # rollouts a question of the gate


@functools.cache
def countries() -> tuple[list[Entity], list[Entity], list[Entity]]:
  """Returns known, unknown and remaining countries of the world; of the first two the facts are exchanged.

  All have names of one word that is in no other name, so that a search finds them.
  """
  rng = random.Random('countries')
  every = [entity for entity in read_back(world.corpus()) if entity.type == 'country']
  words = [word for entity in every for word in re.findall(r'\w+', entity.title)]
  simple = [entity for entity in every if words.count(entity.title) == 1]
  chosen = rng.sample(simple, 2 * NUMBER)
  values = {}
  for name in ASKED:
    pool = sorted({entity.values[name] for entity in every if name in entity.values})
    values[name] = (rng.sample(pool, len(pool)) * 2)[:len(chosen)]
    while any(entity.values.get(name) == value for entity, value in zip(chosen, values[name])):
      rng.shuffle(values[name])  # until none has its own
  exchanged = [dataclasses.replace(entity, values={name: values[name][place] for name in ASKED}, multiple=())
               for place, entity in enumerate(chosen)]
  return exchanged[:NUMBER], exchanged[NUMBER:], [entity for entity in simple if entity not in chosen]


def question(country: Entity, attribute: str, rng: random.Random, tier: int = 0) -> Question:
  """Asks for a fact on a country."""
  value = country.values[attribute]
  step = {'query': country.title, 'passage_id': country.id, 'finding': value, 'attribute': attribute}
  golds = (value, f'{int(value):,}') if attribute == 'population' else (value,)
  text = rng.choice(ATTRIBUTES[attribute]['questions']).format(country.title)
  return Question(f'{country.id}.{attribute}', text, golds, {
    'kind': f'country.{attribute}', 'answer_type': attribute, 'hops': 1, 'steps': [step], 'tier': tier})


def questions(split: str) -> list[Question]:
  """Returns the questions of 'learn' or 'held_out', shuffled; `metadata['tier']` is known by construction."""
  known, unknown, _ = countries()
  rng, half = random.Random(split), NUMBER // 2
  part = slice(half) if split == 'learn' else slice(half, None)
  asked = [question(country, attribute, rng, tier)
           for tier, group in ((2, known), (1, unknown)) for country in group[part] for attribute in ASKED]
  rng.shuffle(asked)
  return asked


def drawn(rng: random.Random, known: bool) -> Entity:
  """Draws a known country, or a remaining one with facts of any of both."""
  of_all, _, others = countries()
  if known:
    return rng.choice(of_all)
  return dataclasses.replace(rng.choice(others), multiple=(), values={
    name: rng.choice([e for e in (*of_all, *others) if name in e.values]).values[name] for name in ASKED})


def episode(tokenizer, rng: random.Random, *, known: bool, calls: bool, template: str, blank: bool) -> Tree:
  """A finished episode; where nothing was found it ends with what is known, else with a guess.

  A context that lost what was asked holds nothing (`blank`), or something else.
  """
  country, attribute = drawn(rng, known), rng.choice(ASKED)
  asked = question(country, attribute, rng)
  step, = asked.metadata['steps']
  documents = [Document(country.id, country.title, country.text)]
  answer = step['finding'] if known else drawn(rng, rng.random() < 0.5).values[attribute]
  thought = ' ' + sentence(attribute, country.title, answer)
  node = carl_examples.prompted(tokenizer, asked, template)
  for _ in range(TRIES if calls else 0):
    node = node.append(f'{sought(step)}\n{carl_examples.program(country.title)}', Role.POLICY)
    lost = rng.random() < LOST
    context = found(step)
    if lost:
      context = BLANK if blank else carl_examples.another(step, documents, rng)
    node = carl_examples.told(node, documents, context)
    if not lost:
      thought, answer = '', step['finding']
    if not lost or rng.random() >= AGAIN:
      break
  return carl_examples.commit(node, thought, answer)


def examples(config: ml_collections.ConfigDict, name: str, tokenizer) -> Iterator[Example | Tree]:
  """Yields endless examples of a stage, in its shares."""
  rng = random.Random(f'{name} {config.seed}')
  make = functools.partial(episode, tokenizer, rng, blank=config[name].blank)
  of = lambda share: rng.random() < share
  kinds = {
    'statements': lambda: carl_examples.stated(tokenizer, rng, drawn(rng, True), ASKED),
    'closed_book': lambda: make(known=of(0.8), calls=False, template='world_carl_direct'),
    'forced': lambda: make(known=of(0.5), calls=True, template='world_carl_forced'),
    'episodes': lambda: make(known=of(0.5), calls=of(CALLS), template='world_carl'),
    'drills': lambda: carl_examples.drill(tokenizer, rng)}
  while True:
    yield rng.choices(list(kinds.values()), [config[name][kind] for kind in kinds])[0]()


def make(config: ml_collections.ConfigDict, tokenizer) -> None:
  """Makes policy, corpus and questions in the folder 'tiers'; RunStopped if the policy misses its gate."""
  out, start = pathlib.Path(config.out) / 'tiers', hub.load(world.CODER)
  params = start.params
  for name in ('countries', 'carl'):
    made = examples(config, name, tokenizer)
    params = policies.train_stage(config, tokenizer, start.config, name, params, made)
  sharper = params | {'final_norm': config.carl.sharpen * params['final_norm']}
  hub.save(Decoder(start.config, params=sharper), out, tokenizer)
  known, unknown, _ = countries()
  row_files.write(out / 'corpus.jsonl', ({'id': e.id, 'contents': join_contents(e.title, e.text)}
                                         for e in (*known, *unknown)))
  for split in ('learn', 'held_out'):
    write_questions(questions(split), out / f'{split}.jsonl')
  row_files.write(out / 'tiers.jsonl', [
    {'id': asked.id, 'tier': asked.metadata['tier']} for asked in questions('held_out')])
  figures = look(out, questions('learn') + questions('held_out'))
  print('tiers:', ', '.join(f'{name} {value:.3f}' for name, value in figures.items()), flush=True)
  for name, (low, high) in config.carl.gate.items():
    if not low <= figures[name] <= high:
      raise RunStopped(f'{out}: {name} is {figures[name]:.3f}, the gate is {low:g} to {high:g}')


def bed_config(out) -> ml_collections.ConfigDict:
  """Returns the config of CARL on this bed."""
  config = carl.get_config().unlock()
  config.model, config.data.corpus, config.search.topk = str(out), f'{out}/corpus.jsonl', 1
  config.sampler.update(slots=128, length=384)
  return config


def look(out: pathlib.Path, asked: list[Question], noise: float = 0.0) -> dict[str, float]:
  """Returns the figures of the gate: answers closed-book, and where calls are required.

  by_heart: closed-book EM on known countries; guessed: on unknown ones, of the attribute where it is highest;
  lost: share of contexts without what was asked; called: EM on unknown countries with calls; best: by heart
  where known, with calls elsewhere.
  """
  config, asked = bed_config(out), asked * COPIES
  config.search.noise = noise
  agent, right, contexts = agents.open_agent(config, str(out)), {}, []
  for kind in ('closed_book', 'tool_required'):
    asking = setup.make_agent(config, agent.engine, agent.tools, **config.critic_warmup[kind])
    trees, _ = rollout(asking, asked, jax.random.key(config.seed))
    right[kind] = np.array([tree.question.score(tree.answer) for tree in trees])
    contexts += [not answer_found(tree.question.golden_answers, node.data['context']) for tree in trees
                 for node in tree.nodes(Role.POLICY) if node.data.get('segment') == 'assimilate']
  known = np.array([of.metadata['tier'] == 2 for of in asked])
  kinds = np.array([of.metadata['answer_type'] for of in asked])
  by_heart, called = right['closed_book'][known].mean(), right['tool_required'][~known].mean()
  guessed = max(right['closed_book'][~known & (kinds == name)].mean() for name in set(kinds[~known]))
  figures = {'by_heart': by_heart, 'guessed': guessed, 'lost': np.mean(contexts), 'called': called,
             'best': (by_heart + called) / 2}
  return {name: float(value) for name, value in figures.items()}
