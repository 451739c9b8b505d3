"""Rejection sampling: what is kept, that it is learned as it was sampled, and the command."""

import dataclasses
import json

import jax
import pytest

from configs import quickstart
from jaxsearch import cli
from jaxsearch.data.questions import write_questions
from jaxsearch.evaluation.agents import open_agent
from jaxsearch.methods import carl
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import Sampling, ToolFailure, Tools
from jaxsearch.training import rejection, run_folder, sft
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


def test_text_that_is_not_tokenised_back_and_alternatives_are_no_demonstration():
  tree = Tree(Tokenizer.load(world.folder()), QUESTION)
  letters = [token for letter in RIGHT for token in tree.tokenizer.encode(letter)]
  tree.root.append(templates.prompt('Who?', 'world'), Role.PROMPT).append(letters, Role.POLICY)
  tree.answer, tree.stop = 'Lovelace', 'answered'
  assert tree.leaves()[0].text == RIGHT and rejection.select([[tree]]) == [[]]
  tree = chain(RIGHT)
  tree.nodes(Role.PROMPT)[0].append(RIGHT, Role.POLICY)
  with pytest.raises(ValueError, match='alternatives'):
    rejection.select([[tree]])


def shape(tree):
  return [(node.role, node.tokens, node.trained, node.path_tokens()) for node in tree.walk()]


def test_what_carl_sampled_is_learned_with_its_raw_output_beside_the_path(tmp_path):
  def sampled(*contexts):
    said = [text for found in contexts for text in ('```python\nsearch("x")\n```\n', f'<context>{found}</context>')]
    said.append('So \\boxed{Lovelace}')
    return drive(said, grow=carl.grow, printed='Doc 1', template='world_carl')[0]

  one, two, again = sampled('Ada'), sampled('Ada', 'Lovelace'), sampled('Ada')
  [kept] = rejection.select([[one, two, again]])
  assert kept == [one, two]
  rejection.write(tmp_path / 'd.jsonl', [kept])
  for tree, read in zip(kept, sft.read_demonstrations(tmp_path / 'd.jsonl', one.tokenizer), strict=True):
    assert shape(read) == shape(tree) and len(read.leaves()) == len(tree.nodes(Role.OBSERVATION)) + 1


@pytest.fixture(scope='module')
def agent():
  config = quickstart.get_config()
  config.sampler.slots = 16
  return open_agent(config)


def test_what_was_sampled_is_what_is_learned(agent, tmp_path):
  """Through the real sampler with the shipped policy: the file gives back the very tokens, and which are learned."""
  questions = [q for q in world.questions('rl') if q.metadata['hops'] == 1][:12]
  sampled = rejection.sample(agent, questions, 3, jax.random.key(1), Sampling(1.0))
  assert [len(group) for group in sampled] == [3] * 12
  assert len({tree.question.id for group in sampled for tree in group}) == 12
  selected = rejection.select(sampled, most=1)
  kept = [tree for group in selected for tree in group]
  assert 0 < len(kept) <= 12
  rejection.write(tmp_path / 'deep' / 'd.jsonl', selected)
  read = sft.read_demonstrations(tmp_path / 'deep' / 'd.jsonl', kept[0].tokenizer)
  for tree, demonstration in zip(kept, read, strict=True):
    assert exact_match(tree.answer, tree.question.golden_answers) and shape(tree) == shape(demonstration)
    assert grammar.answer(demonstration.nodes(Role.POLICY)[-1].text) == tree.answer
  figures = rejection.figures(sampled, selected)
  assert figures['questions'] == 12 and figures['sampled'] == 36 and figures['demonstrations'] == len(kept)
  assert figures['kept'] == pytest.approx(len(kept) / 36) and figures['covered'] == pytest.approx(len(kept) / 12)
  assert figures['right'] >= figures['kept']
  nothing = rejection.figures([[chain(ANSWER)]], [[]])
  assert nothing['kept'] == nothing['covered'] == nothing['searches'] == 0.0


class Down:
  def search(self, queries, topk):
    raise ConnectionError('nobody is there')


def test_chains_whose_searches_mostly_failed_are_not_learned_from(agent):
  agent = dataclasses.replace(agent, tools=Tools(search=Down()))
  with pytest.raises(run_folder.RunStopped, match='nothing was written: .* searches failed; the last: ConnectionError: nobody'):
    rejection.sample(agent, world.questions('rl')[:2], 2, jax.random.key(1), Sampling(1.0))


def test_the_command_writes_a_file_that_sft_reads(tmp_path, capsys):
  out, easy = tmp_path / 'd.jsonl', [q for q in world.questions('rl') if q.metadata['hops'] == 1][:6]
  write_questions(easy, tmp_path / 'q.jsonl')
  command = ['sample', '--config=configs/quickstart.py', '--config.sampler.slots=16', f'--out={out}', '--n=4',
             f'--questions={tmp_path}/q.jsonl', '--keep=2', '--temperature=0.7', '--limit=5']
  assert cli.main(command) == 0
  printed = json.loads(capsys.readouterr().out)
  assert printed['questions'] == 5 and printed['sampled'] == 20 and printed['out'] == str(out)
  records = [json.loads(line) for line in out.read_text().splitlines()]
  assert len(records) == printed['demonstrations'] > 0
  assert max(sum(record['id'] == q.id for record in records) for q in easy) <= 2
