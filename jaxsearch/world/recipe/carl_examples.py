"""Worked examples for CARL in the embedded world: code that searches, contexts in place of raw output, and facts known by heart.

What the policy knows by heart (its tier 2) are three facts on every country, learned from statements, as in an encyclopedia;
questions by heart are only ever asked about the entities of the warm split. Everything else has to be searched (tier 1) or
guessed. Habits are bad on purpose, as in the mix that other methods begin with: calls where none is needed, answers by heart
where nothing is known, contexts that lost what mattered.

Names and values stand behind a space wherever they are written, as they do where they are read: so they are the same tokens.
"""

import functools
import random

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from jaxsearch.world.chains import act, conclusion, found, full_chain, guess, one_search_chain, sought
from jaxsearch.world.facts import ATTRIBUTES, Entity, read_back
from jaxsearch.world.questions import ENDINGS
from jaxsearch.world.recipe.examples import Example, chain, draw, encode, invented, pools, search
from jaxsearch.world.recipe.rename import rename

KNOWN = ('continent', 'currency', 'language')  # of countries


def is_known(question: Question) -> bool:
  """Whether the question asks for one fact that the policy has learned by heart."""
  steps = question.metadata['steps']
  return len(steps) == 1 and steps[0]['passage_id'].startswith('country-') and steps[0]['attribute'] in KNOWN


def statement(tokenizer, rng: random.Random) -> Example:
  """The known facts on a country, stated in any order; learned but for its name."""
  country = rng.choice(_countries())
  known = [name for name in KNOWN if name in country.values]
  spans = []
  for name in rng.sample(known, len(known)):
    sentence = ATTRIBUTES[name][1].format(title=country.title, value=country.values[name])
    spans += [(f' {country.title}', False), (sentence.removeprefix(country.title) + '\n', True)]
  return encode(tokenizer, spans)


@functools.cache
def _countries() -> list[Entity]:
  return [entity for entity in read_back(world.corpus()) if entity.type == 'country']


def episode(tokenizer, rng: random.Random, *, closed_book: float, one_call: float, lost: float, renamed: float,
            template: str = 'world_carl') -> Tree:
  """A finished episode as a tree, its policy spans to be learned.

  Args:
    closed_book: share that answers without a call, right where the answer is known and a guess elsewhere.
    one_call: share that answers after one call; a guess where more were needed.
    lost: share of contexts that hold another sentence than the one that was needed.
    renamed: share of the others under made-up names.
  """
  question = asked(rng)
  u = rng.random()
  if u < closed_book:
    return recited(tokenizer, rng, question, template)
  steps = question.metadata['steps']
  results = {step['query']: search(step['query']) for step in steps}
  if rng.random() < renamed:
    question, results = rename(question, results, rng, numbers=rng.random() < 0.7)
    steps = question.metadata['steps']
  tree, node = begun(tokenizer, question, template)
  served = steps[:1] if u < closed_book + one_call else steps
  for step in served:
    node = node.append(f'{sought(step)}\n{program(step["query"])}', Role.POLICY)
    shown = grammar.output(grammar.listed(results[step['query']]), tokenizer.special_tokens)
    context = found(step) if rng.random() >= lost else _another(step, results[step['query']], rng)
    node.append(shown, Role.OBSERVATION).append(f'<context> {context}</context>', Role.POLICY)
    node = node.append(grammar.context(context, tokenizer.special_tokens), Role.CONTEXT)
  if len(served) == len(steps):
    answer, said = question.golden_answers[0], conclusion(question).strip()
  else:
    answer, said = guess(question, rng, pools()), 'I guess.'
  node.append(f'{said} {committed(answer)}'.strip(), Role.POLICY)
  return ended(tree)


def recited(tokenizer, rng: random.Random, question: Question, template: str) -> Tree:
  """An answer by heart."""
  tree, node = begun(tokenizer, question, template)
  said, answer = recalled(question, rng)
  node.append(f'{said} {committed(answer)}', Role.POLICY)
  return ended(tree)


def recalled(question: Question, rng: random.Random) -> tuple[str, str]:
  """(thought, answer) by heart: the fact as it was stated, if it is known, else a guess in the same words."""
  answer = question.golden_answers[0] if is_known(question) else guess(question, rng, pools())
  if len(question.metadata['steps']) > 1:
    return 'I guess.', answer
  (step,) = question.metadata['steps']
  return ' ' + ATTRIBUTES[step['attribute']][1].format(title=step['query'], value=answer), answer


def searched(tokenizer, rng: random.Random, *, closed_book: float, one_search: float, template: str = 'world') -> Example:
  """An episode in the format of Search-R1, so that what is known does not hang on the format."""
  question = asked(rng)
  u = rng.random()
  if u < closed_book:
    said, answer = recalled(question, rng)
    spans = [('policy', act(said.strip(), 'answer', answer))]
  elif u < closed_book + one_search:
    spans = one_search_chain(question, rng, pools())
  else:
    spans = full_chain(question)
  results = {step['query']: search(step['query']) for step in question.metadata['steps']}
  return chain(tokenizer, question, spans, results, template=template)


def drilled(tokenizer, rng: random.Random) -> Example:
  """The call of a first step, or a context, about a name of random tokens: see `examples.drill`."""
  attribute, name, value = invented(tokenizer, rng)
  label, sentence = ATTRIBUTES[attribute]
  if rng.random() < 0.5:
    question = rng.choice(ENDINGS[attribute]).format(name)
    prompt = templates.prompt(question, 'world_carl_forced')
    return encode(tokenizer, [(prompt, False), (f'Find the {label}.\n{program(name)}', True)])
  shown = grammar.listed([Document('', name, sentence.format(title=name, value=value))])
  context = sentence.format(title='It', value=value)
  return encode(tokenizer, [(grammar.output(shown, tokenizer.special_tokens), False), (f'<context> {context}</context>', True),
                            (grammar.context(context, tokenizer.special_tokens), False)])


def asked(rng: random.Random) -> Question:
  """A warm question without arithmetic, of at most two hops; half of the time one whose answer is known."""
  wanted = rng.random() < 0.5
  while True:
    question = draw(rng)
    simple = question.metadata['hops'] <= 2 and question.metadata.get('operation') not in ('sum', 'difference')
    if simple and (not wanted or is_known(question)):
      return question


def program(query: str) -> str:
  return f'```python\nprint(search(" {query}"))\n```\n'


def committed(answer: str) -> str:
  return f'\\boxed{{ {answer}}}'


def begun(tokenizer, question: Question, template: str):
  tree = Tree(tokenizer, question)
  return tree, tree.root.append(templates.prompt(question.question, template), Role.PROMPT)


def ended(tree: Tree) -> Tree:
  """The tree with the end token behind its last span, which a commit ends with."""
  last = [node for node in tree.walk() if node.role is Role.POLICY][-1]
  last.tokens.append(tree.tokenizer.eos_ids[0])
  return tree


def _another(step: dict, passages, rng: random.Random) -> str:
  """Another sentence of what the search found, told of 'It'."""
  sentences = [f'It{rest}.' for p in passages[:1] for rest in f' {p.text}'.removesuffix('.').split(f'. {p.title}')]
  others = [s.replace(f'It {passages[0].title}', 'It') for s in sentences if step['finding'] not in s]
  return rng.choice(others) if others else 'It is not there.'
