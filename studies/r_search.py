"""R-Search with frozen weights: how a reader takes evidence, and what a policy's evidence gives it as a tool.

    python -m recipes beds seeker reader --config.out=runs/beds
    for seed in 0 1; do jaxsearch train --config configs/r_search.py --config.out=runs/beds/r_search_$seed \
      --config.seed=$seed --config.model=runs/beds/seeker --config.steps=8 --config.questions_per_step=12 \
      --config.data.hops='(2,3)' --config.data.arithmetic=False --config.data.number=1000 \
      --config.eval.every=0; done
    python -m studies.r_search

First the reader's F1 and EM on evidence that is complete, partial, invented, absent, and on passages. A
reader that has under 95 % F1 on complete evidence, or with partial evidence is over 5 points better than
without any, decides nothing. Then its EM with what policies found: nothing, one search for the question, all
that a policy's searches found, the policy's evidence, gold evidence. Controls: evidence of another question,
and a policy whose searches return random documents.
"""

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np
from ml_collections import ConfigDict

from configs import r_search as method_config
from jaxsearch import setup
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import rstool, verdicts
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.trees.tree import Role, Tree, spans
from jaxsearch.world import chains, files
from recipes.world.beds import read, reads_evidence
from recipes.world.examples import stated
from studies import common

HOPS = (2, 3)
TRAINED = 1000  # questions of world:rl that policies train on
LEFT_OUT = ('continent', 'timezone')  # continents are easily guessed; the reader cannot copy names with '/'
SIZES = {'full': dict(number=360), 'tiny': dict(number=4)}
POLICIES = 3  # at least
Ask = Callable[[list[str]], Sequence[str]]


def questions(number: int) -> list[Question]:
  """Returns the first questions that follow one path and that no policy was trained on."""
  asked = [question for question in files.questions('rl', HOPS, arithmetic=False)[TRAINED:]
           if question.metadata.get('operation') is None]
  return [question for question in asked if question.metadata['answer_type'] not in LEFT_OUT][:number]


def evidence_of(question: Question, rng: random.Random) -> dict[str, str]:
  """Returns kind -> evidence for a question that follows a path.

  complete: a sentence a step; partial: without the last, which holds the answer; answer alone: that one;
  invented: complete, but with the answer of another question of its type; passages: all that the searches
  of the steps find; absent: none.
  """
  steps = question.metadata['steps']
  others = {other for kind, other in _answers() if kind == question.metadata['answer_type']}
  other = rng.choice(sorted(others - set(question.golden_answers)))
  return {'complete': stated(steps), 'partial': stated(steps[:-1]), 'answer alone': stated(steps[-1:]),
          'invented': stated([*steps[:-1], steps[-1] | {'finding': other}]),
          'passages': ' '.join(document.text for step in steps for document in chains.search(step['query'])),
          'absent': ''}


@functools.cache
def _answers() -> frozenset[tuple[str, str]]:
  asked = files.questions('warm', HOPS)
  return frozenset((question.metadata['answer_type'], question.golden_answers[0]) for question in asked)


def by_kind(ask: Ask, asked: Sequence[Question]) -> dict[str, dict]:
  """Returns kind of evidence -> EM and F1 of each question."""
  rng = random.Random(0)
  of_questions = [evidence_of(question, rng) for question in asked]
  return {kind: read(ask, asked, [of[kind] for of in of_questions]) for kind in of_questions[0]}


def found_by(trees: Sequence[Tree]) -> dict[str, list[str]]:
  """Returns, for each tree, its evidence as training takes it, and the documents that its searches found."""
  documents = lambda tree: [document.text for node in tree.nodes(Role.POLICY)
                            for document in node.data.get('documents', ())]
  return {'evidence': [rstool.evidence_of({'spans': spans(tree)})['evidence'] for tree in trees],
          'observations': [' '.join(documents(tree)) for tree in trees]}


def served(ask: Ask, policy: str, asked: Sequence[Question], noise: float = 0.0) -> dict:
  """Returns the reader's EM and F1 with what a policy found, greedy, and the policy's own EM."""
  config = method_config.get_config().unlock()
  config.search.noise = noise
  bed = common.open_bed(config, asked, policy)
  trees = [tree for tree, in common.grow(bed, 0, sampling=GREEDY)]
  found = found_by(trees)
  return {kind: read(ask, asked, texts) for kind, texts in found.items()} | {
    'another question': read(ask, asked, found['evidence'][1:] + found['evidence'][:1]),
    'own': [question.score(tree.answer) for question, tree in zip(asked, trees)],
    'written': [bool(text) for text in found['evidence']],
    'quoted': [stated(question.metadata['steps'][-1:]) in text
               for question, text in zip(asked, found['evidence'])]}


def study(given, out) -> str:
  """Measures what is missing and returns the tables."""
  asked = questions(given.number)
  settings = dict(model=given.reader, max_tokens=24, stop=('\n',), chat=False, slots=32, length=1024)
  ask = functools.cache(lambda: setup.load_assistant(ConfigDict(settings), 'float32'))
  reader = lambda prompts: ask()(prompts)
  one_search = lambda: read(reader, asked, [
    ' '.join(document.text for document in chains.search(question.question)) for question in asked])
  parts = {f'reader {given.reader}': lambda: by_kind(reader, asked),
           f'one search {given.reader}': lambda: {'one search': one_search()}}
  policies = given.policies.split(',')
  for policy in policies:
    parts[f'{policy} for {given.reader}'] = functools.partial(served, reader, policy, asked)
  parts[f'{policies[0]}, random documents'] = functools.partial(served, reader, policies[0], asked, 1.0)
  return report(common.measured(out, parts), given.reader, policies)


def report(rows: dict[str, dict], reader: str, policies: Sequence[str]) -> str:
  shown = lambda values: common.interval(verdicts.estimate(values), 100)
  kinds = {kind: of for kind, of in rows[f'reader {reader}'].items() if isinstance(of, dict)}
  first = [{'evidence': kind, 'F1 in %': shown(of['f1']), 'EM in %': shown(of['em'])}
           for kind, of in kinds.items()]
  of_policies = {policy: rows[f'{policy} for {reader}'] for policy in policies}
  mean = lambda kind: np.mean([of[kind]['em'] for of in of_policies.values()], axis=0)
  broken = {f'{policies[0]}, random documents': rows[f'{policies[0]}, random documents']}
  second = [{'policy': policy, 'its own EM': shown(of['own']),
             'wrote evidence': f'{100 * np.mean(of["written"]):.0f}',
             'states the answer': f'{100 * np.mean(of["quoted"]):.0f}'}
            | {kind: shown(of[kind]['em']) for kind in ('observations', 'evidence', 'another question')}
            for policy, of in (of_policies | broken).items()]
  searched = rows[f'one search {reader}']['one search']['em']
  why = undecided(kinds, len(policies))
  contrasts = {
    '**evidence - raw observations**': (verdicts.estimate(mean('evidence') - mean('observations')), 0.03),
    'evidence - one search': (verdicts.estimate(mean('evidence') - np.array(searched)), None),
    'evidence - alone': (verdicts.estimate(mean('evidence') - np.array(kinds['absent']['em'])), None),
    'gold - evidence': (verdicts.estimate(np.array(kinds['complete']['em']) - mean('evidence')), None)}
  third = common.verdicts_of(contrasts, "points of the reader's EM", 100, why=why)
  return '\n\n'.join([common.table(first), f'One search for the question: {shown(searched)} % EM.',
                      common.table(second), third])


def undecided(kinds: dict[str, dict], policies: int) -> str:
  """Says why the plan's rule decides nothing of the tool; '' if it does."""
  if not reads_evidence({kind: np.mean(of['f1']) for kind, of in kinds.items()}):
    return 'undecided: the reader misses its gate'
  return '' if policies >= POLICIES else f'undecided: {policies} policies, where the plan asks for {POLICIES}'


if __name__ == '__main__':
  common.main('r_search', study, SIZES, reader='runs/beds/reader',
              policies='runs/beds/seeker,runs/beds/r_search_0,runs/beds/r_search_1')
