"""Makes the policies of the beds in studies/ (docs/claims/plan.md) from the shipped one.

  actor     paths of three hops; searches a wrong title now and then and goes on from what that says,
            sometimes repeats a query. It has seen the form of a review, and nothing of what a flaw is
  reviewer  the actor, taught the flaws: the reviews that it saw, one behind each step, name the first
  countries CARL's policy, taught the facts on some countries, see countries.py
  carl      the same, which copies any name again
  tiers     the same with all logits scaled up, and the corpus and the questions of CARL's study
  seeker    writes evidence in the format of R-Search: of all steps, or as often of one
  both      half of the time in that format, else in Search-R1's; searches too little
  growing   Search-R1 from the shipped policy, a checkpoint each step, while its chains get deeper
  reader    of R-Search's study: the shipped one, taught to answer from passages too, and not by heart
  exchanged questions with the answers of others: what a run learns from them is no answer. Paths,
            exchanged_HOPS.jsonl, and those that CARL's policy learns from, exchanged_tiers.jsonl

Each is a folder of `config.out`; one that exists is not made again. The actor is made before the reviewer.
Gates: how often the actor is right; what `tiers` knows and loses; how often the reader is right from
evidence.
"""

import dataclasses
import functools
import pathlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import ml_collections

from configs import search_r1_grpo
from jaxsearch import setup
from jaxsearch.data.questions import Question, write_questions
from jaxsearch.evaluation import agents
from jaxsearch.models import hub
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards.match import exact_match, f1
from jaxsearch.sampler.driver import rollout
from jaxsearch.training import loop
from jaxsearch.training.run_folder import RunStopped
from jaxsearch.trees import templates
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from jaxsearch.world.chains import Example, Spans, act, encode, encode_chain, found, sought
from jaxsearch.world.facts import Entity, read_back
from recipes.world import countries, examples
from recipes.world.policies import train_stage
from recipes.world.rename import rename

COMPLETE, CHANCE = 0.95, 0.05  # a reader's F1 on complete evidence, and on partial over that on none


def make(config: ml_collections.ConfigDict, names: Sequence[str] = ()) -> pathlib.Path:
  """Makes what is missing of these, or of all, and returns the folder.

  Raises ValueError for a name that is none, RunStopped if a policy misses its gate.
  """
  tokenizer = Tokenizer.load(world.folder())
  teach = lambda kind, name: functools.partial(kind, config, name, tokenizer)
  makers = {
    'actor': teach(teach_flaws, 'actor'), 'reviewer': teach(teach_flaws, 'reviewer'),
    'tiers': lambda: countries.make(config, tokenizer),
    'seeker': teach(teach_seeker, 'seeker'), 'both': teach(teach_seeker, 'both'),
    'growing': lambda: grow(config.growing, pathlib.Path(config.out) / 'growing'),
    'reader': lambda: teach_reader(config, tokenizer),
    'exchanged': lambda: write_exchanged(pathlib.Path(config.out)),
  }
  if unknown := [name for name in names if name not in makers]:
    raise ValueError(f'{unknown[0]!r} is none of {", ".join(makers)}')
  wanted = set(names or makers)
  if 'reviewer' in wanted:
    wanted.add('actor')
  for name, maker in makers.items():
    if name in wanted:
      maker()
  return pathlib.Path(config.out)


def write_exchanged(out: pathlib.Path) -> None:
  """Writes the controls: a file for the paths of each number of hops, one for CARL's questions."""
  asked = {hops: _paths('world:rl', (hops,)) for hops in (1, 2, 3)}
  asked['tiers'] = countries.questions('learn')
  for name, questions in asked.items():
    write_questions(exchanged(questions, random.Random('exchanged')), out / f'exchanged_{name}.jsonl')


def exchanged(questions: Sequence[Question], rng: random.Random) -> list[Question]:
  """Returns the questions, each with answer and gold chain of another."""
  return [dataclasses.replace(other, id=question.id, question=question.question)
          for question, other in zip(questions, rng.sample(questions, len(questions)))]


def teach_flaws(config: ml_collections.ConfigDict, name: str, tokenizer) -> None:
  """Trains the actor, or the reviewer from it; RunStopped if the actor is right too often or too seldom."""
  start = hub.load(world.POLICY if name == 'actor' else f'{config.out}/actor')
  train_stage(config, tokenizer, start.config, name, start.params, examples_of(config, name, tokenizer))
  if name == 'actor':
    check(config)


def teach_seeker(config: ml_collections.ConfigDict, name: str, tokenizer) -> None:
  """Trains the shipped policy on chains with evidence, or some with it."""
  stage, shipped, rng = config[name], hub.load(world.POLICY), random.Random(f'{name} {config.seed}')
  make = functools.partial(examples.undecided, tokenizer, rng, shares=(stage.at_once, stage.one_search),
                           evidence=stage.evidence)
  train_stage(config, tokenizer, shipped.config, name, shipped.params, iter(make, None))


def teach_reader(config: ml_collections.ConfigDict, tokenizer) -> None:
  """Trains the reader; RunStopped if it misses its gate on held-out questions."""
  shipped = hub.load(world.READER)
  params = shipped.params
  for name in ('reading', 'reader'):
    rng = random.Random(f'reader {config.seed}')
    made = iter(functools.partial(reading, config[name], tokenizer, rng), None)
    params = train_stage(config, tokenizer, shipped.config, name, params, made)
  settings = dict(model=f'{config.out}/reader', max_tokens=24, stop=('\n',), chat=False, slots=32, length=256)
  ask = setup.load_assistant(ml_collections.ConfigDict(settings), config.dtype)
  asked = _paths(config.gate.questions, (2, 3))[:config.gate.number]
  kinds = {'complete': slice(None), 'partial': slice(-1), 'absent': slice(0)}  # of the steps
  evidence = {kind: [examples.stated(question.metadata['steps'][part]) for question in asked]
              for kind, part in kinds.items()}
  share = {kind: statistics.fmean(read(ask, asked, texts)['f1']) for kind, texts in evidence.items()}
  print('reader: F1 ' + ', '.join(f'{of:.1%} on {kind} evidence' for kind, of in share.items()), flush=True)
  if not reads_evidence(share):
    raise RunStopped(f'{config.out}/reader misses its gate')


def read(ask: Callable[[list[str]], Sequence[str]], asked: Sequence[Question],
         evidence: Sequence[str]) -> dict[str, list[float]]:
  """Returns the EM and F1 of a reader's answers to each question from its evidence."""
  replies = ask([templates.reader_prompt(question.question, text, 'world')
                 for question, text in zip(asked, evidence)])
  pairs = [(reply, question.golden_answers) for reply, question in zip(replies, asked)]
  return {'em': [exact_match(*pair) for pair in pairs], 'f1': [round(f1(*pair), 4) for pair in pairs]}


def reads_evidence(f1_of: Mapping[str, float]) -> bool:
  """Tells whether a reader passes its gate, by its mean F1 on complete, partial and absent evidence."""
  return f1_of['complete'] >= COMPLETE and f1_of['partial'] <= f1_of['absent'] + CHANCE


def grow(stage: ml_collections.ConfigDict, out: pathlib.Path) -> None:
  """Trains Search-R1 from the shipped policy and keeps every checkpoint."""
  config = search_r1_grpo.get_config()
  config.update(out=str(out), steps=stage.steps, questions_per_step=stage.questions_per_step,
                group_size=stage.group_size, checkpoint_every=1, keep_checkpoints=stage.steps + 1)
  config.data.update(hops=stage.hops, arithmetic=False)
  config.optim.learning_rate = stage.learning_rate
  config.eval.every = 0
  loop.train(config)


def check(config: ml_collections.ConfigDict) -> None:
  """Raises RunStopped unless the share of the actor's chains that are right lies within the gate."""
  agent = agents.open_agent(config, f'{config.out}/actor')
  questions = _paths(config.gate.questions, config.gate.hops)[:config.gate.number]
  trees, _ = rollout(agent, questions, jax.random.key(config.seed))
  share = sum(tree.question.score(tree.answer) for tree in trees) / len(trees)
  print(f'actor: {share:.1%} of {len(trees)} sampled answers are right', flush=True)
  if not config.gate.em <= share <= config.gate.em_most:
    raise RunStopped(f'{config.out}/actor is right in {share:.1%} of its chains, the gate is '
                     f'{config.gate.em:.0%} to {config.gate.em_most:.0%}')


def reading(stage: ml_collections.ConfigDict, tokenizer, rng: random.Random) -> Example:
  """Returns a question with evidence or passages, and its answer; a guess unless every step is there."""
  question = rng.choice(_paths('world:warm', (1, 2, 3)))
  results = examples.results_of(question)
  if rng.random() < 0.5:
    question, results = rename(question, results, rng, numbers=rng.random() < 0.7)
  steps = question.metadata['steps']
  shown = steps if rng.random() < stage.whole else rng.sample(steps, rng.randrange(len(steps)))
  text = examples.stated(shown)
  if rng.random() < stage.passages:
    text = ' '.join(document.text for step in rng.sample(shown, len(shown))
                    for document in results[step['query']])
  answer = steps[-1]['finding'] if len(shown) == len(steps) else examples.guess(question, rng)
  if len(shown) == len(steps) and rng.random() < stage.drills:
    known = examples.stated(steps[-1:])
    answer = answer[:answer.rfind('/') + 1] + examples.invented(tokenizer, rng)['finding']
    text = text.replace(known, examples.stated([steps[-1] | {'finding': answer}]))
  prompt = templates.reader_prompt(question.question, text, 'world')
  return encode(tokenizer, [(prompt, False), (f' {answer}\n', True)])


@functools.cache
def _paths(split: str, hops: tuple[int, ...]) -> list[Question]:
  questions = world.questions(split.removeprefix('world:'), hops, arithmetic=False)
  return [question for question in questions if question.metadata.get('operation') is None]


def examples_of(config: ml_collections.ConfigDict, name: str, tokenizer) -> Iterator[Example | Tree]:
  """Yields endless examples of a stage: chains, and reviews behind chains."""
  stage, rng = config[name], random.Random(f'{name} {config.seed}')
  while True:
    question = rng.choice(_paths('world:warm', config.gate.hops))
    spans, flawed = strayed(question, rng, wrong=stage.wrong, repeat=stage.repeat)
    if rng.random() >= stage.reviews:
      yield encode_chain(tokenizer, question, spans)
      continue
    spans = spans[:2 * config.grow.max_turns + 1]  # no more than a draft may have
    turns = (len(spans) + 1) // 2
    if not stage.taught:
      flawed = rng.randint(1, turns) if rng.random() < 0.5 else 0
    yield reviewed(tokenizer, question, spans, flawed, range(1, turns + 1) if stage.taught else [turns])


def reviewed(tokenizer, question: Question, spans: Spans, flawed: int, turns: Iterable[int]) -> Tree:
  """Returns a draft with a review behind each of `turns`, of what stands so far; only numbers are learned."""
  tree, node, length = Tree(tokenizer), None, 0
  for turn in turns:
    draft, _ = encode_chain(tokenizer, question, spans[:2 * turn - 1])
    node, length = (node or tree.root).append(draft[length:], Role.OBSERVATION), len(draft)
    asked = node.append(templates.fill(templates.find('world', 'reviewer'), steps=turn), Role.OBSERVATION)
    asked.append(f' {flawed if flawed <= turn else 0}\n', Role.POLICY)
  return tree


def strayed(question: Question, rng: random.Random, *, wrong: float, repeat: float) -> tuple[Spans, int]:
  """Returns the chain of a path that goes astray now and then, and its first flawed step, 0 for none.

  Args:
    wrong: probability, at every hop, of the title of another thing of its kind; the chain goes on from there.
    repeat: probability, after every search, that it is sent once more.
  """
  steps, spans, flawed, thought = list(question.metadata['steps']), [], 0, ''
  for hop in range(len(steps)):
    turn = len(spans) // 2 + 1
    if rng.random() < wrong and (others := elsewhere(steps[hop:], rng)):
      steps[hop:], flawed = others, flawed or turn
    said = [('policy', act(thought + sought(steps[hop]), 'search', steps[hop]['query'])),
            ('observation', steps[hop]['query'])]
    spans += said
    if rng.random() < repeat:
      spans, flawed = spans + said, flawed or turn + 1
    thought = found(steps[hop]) + ' '
  return [*spans, ('policy', act(thought.strip(), 'answer', steps[-1]['finding']))], flawed


def elsewhere(steps: Sequence[dict], rng: random.Random, tries: int = 20) -> list[dict] | None:
  """Returns the same steps from another thing of the first one's kind; None if `tries` ones lead nowhere."""
  kinds = [step['passage_id'].split('-')[0] for step in steps]
  alike = list(_entities()[kinds[0]].values())
  for _ in range(tries):
    at, walked = rng.choice(alike), []
    for step, following in zip(steps, [*kinds[1:], None]):
      if at is None or step['attribute'] not in at.values:
        break
      finding = at.values[step['attribute']]
      walked.append(step | {'query': at.title, 'passage_id': at.id, 'finding': finding})
      at = _entities()[following].get(finding) if following else None
    if len(walked) == len(steps) and walked[0]['query'] != steps[0]['query']:
      return walked
  return None


@functools.cache
def _entities() -> dict[str, dict[str, Entity]]:
  """Returns kind -> title -> entity, the first one of a title."""
  kinds: dict[str, dict[str, Entity]] = {}
  for entity in read_back(world.corpus()):
    kinds.setdefault(entity.type, {}).setdefault(entity.title, entity)
  return kinds
