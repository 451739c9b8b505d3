"""Training examples for CARL in the embedded world: code that searches, contexts in place of raw output,
facts known closed-book.

What the policy knows without search (its tier 2) are three facts on every country, learned from statements,
as in an encyclopedia; closed-book questions are about entities of the warm split only. Everything else has to
be searched (tier 1) or guessed. Habits are bad on purpose, as in the mix that other methods begin with: calls
where none is needed, closed-book answers where nothing is known, contexts that lost what mattered.

Names and values stand behind a space wherever they are written, as they do where they are read: so they are
the same tokens.
"""

import functools
import random
from collections.abc import Sequence

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.trees import grammar, grammars, templates
from jaxsearch.trees.tree import Node, Role, Tree
from jaxsearch.world import files as world
from jaxsearch.world.chains import Example, act, conclusion, encode, encode_chain, found, full_chain, sought
from jaxsearch.world.facts import ATTRIBUTES, Entity, read_back, sentence
from recipes.world import examples
from recipes.world.rename import rename

KNOWN = ('continent', 'currency', 'language')  # of countries
_countries = functools.cache(lambda: [e for e in read_back(world.corpus()) if e.type == 'country'])


def is_known(question: Question) -> bool:
  """Tells whether the question asks for one fact that the policy knows without search."""
  steps = question.metadata['steps']
  return len(steps) == 1 and steps[0]['passage_id'].startswith('country-') and steps[0]['attribute'] in KNOWN


def draw(rng: random.Random) -> Question:
  """A warm question without arithmetic, of at most two hops; half of the time one whose answer is known."""
  wanted = rng.random() < 0.5
  while True:
    question = examples.draw(rng)
    simple = question.metadata['hops'] <= 2 and question.metadata.get('operation') not in world.ARITHMETIC
    if simple and (not wanted or is_known(question)):
      return question


def statement(tokenizer, rng: random.Random) -> Example:
  """The known facts on a country, stated in any order; learned but for its name."""
  country = rng.choice(_countries())
  return stated(tokenizer, rng, country, [name for name in KNOWN if name in country.values])


def stated(tokenizer, rng: random.Random, entity: Entity, attributes: Sequence[str]) -> Example:
  """Facts on an entity, stated in any order; learned but for its name."""
  return encode(tokenizer, [span for name in rng.sample(attributes, len(attributes))
                            for span in ((f' {entity.title}', False),
                                         (f'{sentence(name, "", entity.values[name])}\n', True))])


def episode(tokenizer, rng: random.Random, *, closed_book: float, one_call: float, lost: float,
            renamed: float, template: str = 'world_carl') -> Tree:
  """A finished episode as a tree, its policy spans to be learned.

  Args:
    closed_book: share that answers without a call, right where the answer is known and a guess elsewhere.
    one_call: share that answers after one call; a guess where more were needed.
    lost: share of contexts that hold another sentence than the one that was needed.
    renamed: share of the others under made-up names.
  """
  question = draw(rng)
  u = rng.random()
  if u < closed_book:
    return commit(prompted(tokenizer, question, template), *recalled(question, rng))
  results = examples.results_of(question)
  if rng.random() < renamed:
    question, results = rename(question, results, rng, numbers=rng.random() < 0.7)
  steps = question.metadata['steps']
  node = prompted(tokenizer, question, template)
  served = steps[:1] if u < closed_book + one_call else steps
  for step in served:
    node = node.append(f'{sought(step)}\n{program(step["query"])}', Role.POLICY)
    documents = results[step['query']]
    node = told(node, documents, found(step) if rng.random() >= lost else another(step, documents, rng))
  if len(served) == len(steps):
    return commit(node, conclusion(question).strip(), question.golden_answers[0])
  return commit(node, 'I guess.', examples.guess(question, rng))


def told(node: Node, documents: Sequence[Document], context: str) -> Node:
  """Appends what a call gave, the policy's context, and the copy of it that stays, which is returned."""
  speech = grammars.of_tags(node.tree.tokenizer, grammar.CARL)
  shown = speech.observe(None, [(None, speech.safe(grammar.listed(documents).strip()))])
  node.append(shown, Role.OBSERVATION).append(f'<context> {context}</context>', Role.POLICY)
  return node.append(speech.recall(None, context), Role.CONTEXT)


def closed_book(tokenizer, rng: random.Random, template: str) -> Tree:
  """An episode that answers without a call."""
  question = draw(rng)
  return commit(prompted(tokenizer, question, template), *recalled(question, rng))


def recalled(question: Question, rng: random.Random) -> tuple[str, str]:
  """(thought, answer) without search: the fact as it was stated, if it is known, else a guess in the same
  words."""
  answer = question.golden_answers[0] if is_known(question) else examples.guess(question, rng)
  first, *more = question.metadata['steps']
  return 'I guess.' if more else ' ' + sentence(first['attribute'], first['query'], answer), answer


def searched(tokenizer, rng: random.Random, *, closed_book: float, one_search: float,
             template: str = 'world') -> Example:
  """An episode in the format of Search-R1, so that what is known does not depend on the format."""
  question = draw(rng)
  u = rng.random()
  if u < closed_book:
    thought, answer = recalled(question, rng)
    spans = [('policy', act(thought.strip(), 'answer', answer))]
  elif u < closed_book + one_search:
    spans = examples.one_search_chain(question, rng)
  else:
    spans = full_chain(question)
  return encode_chain(tokenizer, question, spans, template=template)


def drill(tokenizer, rng: random.Random) -> Example:
  """The call of a first step, or a context, about a name of random tokens: see `examples.drill`."""
  step = examples.invented(tokenizer, rng)
  if rng.random() < 0.5:
    asked = rng.choice(ATTRIBUTES[step['attribute']]['questions']).format(step['query'])
    prompt = templates.prompt(asked, 'world_carl_forced')
    return encode(tokenizer, [(prompt, False), (f'{sought(step)}\n{program(step["query"])}', True)])
  tree = Tree(tokenizer)
  told(tree.root, [Document('', step['query'], examples.stated([step]))], found(step))
  return encode(tokenizer, [(node.text, node.role is Role.POLICY) for node in tree.walk()])


def program(query: str) -> str:
  return f'```python\nprint(search(" {query}"))\n```\n'


def prompted(tokenizer, question: Question, template: str) -> Node:
  return Tree(tokenizer, question).root.append(templates.prompt(question.question, template), Role.PROMPT)


def commit(node: Node, thought: str, answer: str) -> Tree:
  """The tree with the answer behind `node`, and the end token behind it."""
  box = f'\\boxed{{ {answer}}}'
  last = node.append(f'{thought} {box}' if thought else box, Role.POLICY)
  last.tokens.append(node.tree.tokenizer.eos_ids[0])
  return node.tree


def another(step: dict, documents: Sequence[Document], rng: random.Random) -> str:
  """Another sentence of the first document found, with 'It' for its title."""
  sentences = []
  for document in documents[:1]:
    rests = f' {document.text}'.removesuffix('.').split(f'. {document.title}')
    sentences += [f'It{rest}.' for rest in rests]
  others = [s.replace(f'It {documents[0].title}', 'It') for s in sentences if step['finding'] not in s]
  return rng.choice(others) if others else 'It is not there.'
