"""Rejection sampling: what is kept, that it is learned as it was sampled, and the command."""

import dataclasses
import json

import jax
import pytest

from configs import quickstart
from jaxsearch import cli
from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation.run import open_agent
from jaxsearch.methods import carl
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import ToolFailure, Tools
from jaxsearch.training import rejection, runs, sft
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from tests.methods.driving import ANSWER, QUESTION, SEARCH, drive

RIGHT = '<think>so</think><answer> Lovelace </answer>'


def chain(*said, **settings):
  return drive(said, max_turns=4, **settings)[0]


def test_wrong_malformed_failed_and_equal_chains_are_left_out():
  again, direct = chain(SEARCH, RIGHT), chain(RIGHT)
  group = [chain(SEARCH, ANSWER), chain(SEARCH, RIGHT), again, chain('hm', RIGHT), direct,
           chain(SEARCH, RIGHT, found=ToolFailure('down')), chain(SEARCH, SEARCH, RIGHT)]
  [kept] = rejection.select([group])
  assert kept == [group[1], direct, group[6]]
  assert rejection.select([group, [chain(SEARCH, ANSWER)]], most=2) == [[group[1], direct], []]


def test_text_that_is_not_tokenised_back_is_left_out():
  tokenizer = Tokenizer.load(world.folder())
  trees = []
  for split in (False, True):  # the same text in its own tokens, and in one token for each letter
    tree = Tree(tokenizer, QUESTION)
    tokens = [token for letter in RIGHT for token in tokenizer.encode(letter)] if split else tokenizer.encode(RIGHT)
    tree.root.append(templates.prompt('Who?', 'world'), Role.PROMPT).append(tokens, Role.POLICY)
    tree.answer, tree.stop = 'Lovelace', 'answered'
    trees.append(tree)
  assert trees[0].leaves()[0].text == trees[1].leaves()[0].text
  assert rejection.select([trees]) == [trees[:1]]


def test_a_tree_with_alternatives_is_no_demonstration():
  tree = chain(RIGHT)
  tree.nodes(Role.PROMPT)[0].append(RIGHT, Role.POLICY)
  with pytest.raises(ValueError, match='alternatives'):
    rejection.select([[tree]])


def test_what_carl_sampled_is_learned_with_its_raw_output_beside_the_path(tmp_path):
  def sampled(*contexts):
    said = [text for found in contexts for text in ('```python\nsearch("x")\n```\n', f'<context>{found}</context>')]
    return drive([*said, 'So \\boxed{Lovelace}'], grow=carl.grow, printed='Doc 1', template='world_carl')[0]

  one, two, again = sampled('Ada'), sampled('Ada', 'Lovelace'), sampled('Ada')
  [kept] = rejection.select([[one, two, again]])
  assert kept == [one, two]
  rejection.write(tmp_path / 'd.jsonl', kept)
  for tree, read in zip(kept, sft.read_demonstrations(tmp_path / 'd.jsonl', one.tokenizer), strict=True):
    shape = lambda tree: [(node.role, node.tokens, node.trained, node.path_tokens()) for node in tree.walk()]
    assert shape(read) == shape(tree) and len(read.leaves()) == len(tree.nodes(Role.OBSERVATION)) + 1


@pytest.mark.parametrize('parent', [1, 7, -2, 'x', True])
def test_a_span_without_a_place_is_named(parent, tmp_path):
  spans = [{'role': 'prompt', 'text': 'Who?'}, {'role': 'policy', 'text': 'Ada', 'parent': parent}]
  (tmp_path / 'd.jsonl').write_text(json.dumps({'spans': spans}) + '\n')
  with pytest.raises(DataError, match="span 1 has the 'parent'"):
    sft.read_demonstrations(tmp_path / 'd.jsonl', chain(RIGHT).tokenizer)


@pytest.fixture(scope='module')
def sampled():
  config = quickstart.get_config()
  config.sampler.slots = 16
  questions = [q for q in world.questions('rl') if q.metadata['hops'] == 1][:12]
  return rejection.sample(open_agent(config), questions, 3, jax.random.key(1), temperature=1.0)


def test_what_was_sampled_is_what_is_learned(sampled, tmp_path):
  """Through the real sampler with the shipped policy: the file gives back the very tokens, and marks the policy's own."""
  assert [len(group) for group in sampled] == [3] * 12 and len({tree.question.id for group in sampled for tree in group}) == 12
  selected = rejection.select(sampled)
  kept = [tree for group in selected for tree in group]
  assert 0 < len(kept) < 36
  rejection.write(tmp_path / 'deep' / 'd.jsonl', kept)
  read = sft.read_demonstrations(tmp_path / 'deep' / 'd.jsonl', kept[0].tokenizer)
  for tree, demonstration in zip(kept, read, strict=True):
    assert exact_match(tree.answer, tree.question.golden_answers)
    assert grammar.answer(demonstration.nodes(Role.POLICY)[-1].text) == tree.answer
    assert [(node.role, node.tokens, node.trained) for node in tree.walk()] == [
      (node.role, node.tokens, node.trained) for node in demonstration.walk()]


class Down:
  def search(self, queries, topk):
    raise ConnectionError('nobody is there')


def test_chains_whose_searches_mostly_failed_are_not_learned_from():
  config = quickstart.get_config()
  config.sampler.slots = 16
  agent = dataclasses.replace(open_agent(config), tools=Tools(search=Down()))
  with pytest.raises(runs.RunStopped, match='nothing was written: .* searches failed; the last: ConnectionError: nobody'):
    rejection.sample(agent, world.questions('rl')[:2], 2, jax.random.key(1), temperature=1.0)


def test_figures(sampled):
  selected = rejection.select(sampled, most=1)
  figures = rejection.figures(sampled, selected)
  number = sum(map(len, selected))
  assert figures['questions'] == 12 and figures['sampled'] == 36 and figures['demonstrations'] == number
  assert figures['kept'] == pytest.approx(number / 36) and figures['covered'] == pytest.approx(number / 12)
  assert figures['right'] >= figures['kept']
  nothing = rejection.figures([[chain(ANSWER)]], [[]])
  assert nothing['kept'] == nothing['covered'] == nothing['searches'] == 0.0


def test_the_command_writes_a_file_that_sft_reads(tmp_path, capsys):
  questions, out = tmp_path / 'q.jsonl', tmp_path / 'd.jsonl'
  easy = [q for q in world.questions('rl') if q.metadata['hops'] == 1][:6]
  questions.write_text(''.join(json.dumps({'id': q.id, 'question': q.question, 'golden_answers': list(q.golden_answers)}) + '\n'
                               for q in easy))
  command = ['sample', '--config=configs/quickstart.py', '--config.sampler.slots=16', f'--questions={questions}', f'--out={out}',
             '--n=4', '--keep=2', '--temperature=0.7', '--limit=5']
  assert cli.main(command) == 0
  printed = json.loads(capsys.readouterr().out)
  assert printed['questions'] == 5 and printed['sampled'] == 20 and printed['out'] == str(out)
  records = [json.loads(line) for line in out.read_text().splitlines()]
  assert len(records) == printed['demonstrations'] > 0
  assert max(sum(record['id'] == q.id for record in records) for q in easy) <= 2
  first = out.read_bytes()
  assert cli.main(command) == 0 and out.read_bytes() == first


@pytest.mark.parametrize('arguments, message', [
  ([], 'sample needs --out'),
  (['--out=x.jsonl', '--n=0'], '--n=0 must be >= 1'),
  (['--out=x.jsonl', '--keep=0'], '--keep=0 must be >= 1'),
  (['--out=x.jsonl', '--n=many'], '--n=many: a whole number is needed'),
])
def test_mistakes_of_the_command(arguments, message, capsys):
  assert cli.main(['sample', *arguments]) == 2
  assert message in capsys.readouterr().err
