"""Rejection sampling: what is kept, that it is learned as it was sampled, and the command."""

import json

import pytest

from jaxsearch import cli
from jaxsearch.data.questions import write_questions
from jaxsearch.evaluation import answers
from jaxsearch.methods import carl
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards.match import exact_match
from jaxsearch.sampler.requests import ToolFailure
from jaxsearch.training import rejection, row_files, sft
from jaxsearch.trees import grammar, templates
from jaxsearch.trees.tree import Role, Tree
from jaxsearch.world import files as world
from tests.methods.driving import ANSWER, QUESTION, SEARCH, drive
from tests.tools.serving import server

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


def test_shares_of_nothing_kept():
  nothing = rejection.figures([rejection.record([chain(ANSWER)])], 1)
  assert nothing['kept'] == nothing['covered'] == nothing['searches'] == 0.0


def test_what_the_command_sampled_is_what_sft_learns(tmp_path, capsys, monkeypatch):
  """Through the real sampler with the shipped policy; where most searches fail nothing is written."""
  out, easy = tmp_path / 'deep' / 'd.jsonl', [q for q in world.questions('rl') if q.metadata['hops'] == 1][:6]
  write_questions(easy, tmp_path / 'q.jsonl')
  command = ['sample', '--config=configs/quickstart.py', '--config.sampler.slots=16', f'--out={out}', '--n=4',
             f'--questions={tmp_path}/q.jsonl', '--keep=2', '--temperature=0.7', '--limit=5']
  with server() as (url, _):
    pass  # nobody is there any more
  assert cli.main([*command, '--config.search.backend=http', f'--config.search.url={url}']) == 1
  said = capsys.readouterr().err.splitlines()[-1]
  assert said.startswith('jaxsearch: stopped: ') and 'SearchError' in said and not out.exists()

  monkeypatch.setattr(answers, 'CHUNK', 8)  # rollouts, so two questions
  record, made = rejection.record, []

  def stop_in_the_third_chunk(group, most):
    made.append(group)
    return record(group, most) if len(made) < 5 else 1 / 0

  monkeypatch.setattr(rejection, 'record', stop_in_the_third_chunk)
  assert cli.main(command) == 70
  assert '4 of 5 questions are saved; rerun the same command to resume' in capsys.readouterr().err
  monkeypatch.setattr(rejection, 'record', record)
  monkeypatch.setattr(answers, 'CHUNK', 512)
  assert cli.main([*command, f'--out={tmp_path}/whole.jsonl']) == 0
  capsys.readouterr()
  assert cli.main(command) == 0
  assert out.read_text() == (tmp_path / 'whole.jsonl').read_text()
  assert sorted(path.name for path in out.parent.iterdir()) == ['d.jsonl']
  printed = json.loads(capsys.readouterr().out)
  assert printed['questions'] == 5 and printed['sampled'] == 20 and printed['out'] == str(out)
  records, tokenizer = row_files.read(out), Tokenizer.load(world.folder())
  assert printed['kept'] == pytest.approx(len(records) / 20) and printed['right'] >= printed['kept'] > 0
  assert printed['covered'] == pytest.approx(len({record['id'] for record in records}) / 5)
  golden = {q.id: q.golden_answers for q in easy}
  for record, tree in zip(records, sft.read_demonstrations(out, tokenizer), strict=True):
    assert exact_match(grammar.answer(tree.nodes(Role.POLICY)[-1].text), golden[record['id']])
    assert tokenizer.decode(tree.leaves()[0].path_tokens()) == ''.join(span['text'] for span in record['spans'])
  assert max(sum(record['id'] == q.id for record in records) for q in easy) <= 2
