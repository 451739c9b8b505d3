"""Questions and documents by name."""

import json

import pytest

from jaxsearch.data.jsonl import DataError
from jaxsearch.data.sources import load_corpora, load_corpus, load_questions


def test_questions_of_the_world_by_hops_and_without_arithmetic():
  some = load_questions('world:test', hops=(1, 2), arithmetic=False)
  assert {question.metadata['hops'] for question in some} == {1, 2}
  assert not any(question.metadata.get('operation') in ('sum', 'difference') for question in some)
  assert len(load_questions('world:test')) > len(some) > 100


def questions(path, *ids):
  records = [{'id': name, 'question': 'Who?', 'golden_answers': ['A']} for name in ids]
  path.write_text('\n'.join(map(json.dumps, records)))
  return str(path)


def gsm8k(path, *golds):
  path.write_text('\n'.join(json.dumps({'question': f'{n}?', 'answer': f'#### {n}'}) for n in golds))
  return f'gsm8k:{path}'


def hotpotqa(path, name, *passages):
  path.write_text(json.dumps([{
    '_id': name, 'question': 'Who?', 'answer': 'Ada', 'type': 'bridge', 'supporting_facts': [],
    'context': [[title, [text]] for title, text in passages]}]))
  return path


def test_files_and_benchmarks_by_name(tmp_path):
  unfiltered = dict(hops=(3,), arithmetic=False)  # the filters are for the world alone
  assert load_questions(questions(tmp_path / 'q+r.jsonl', '1'), **unfiltered)[0].id == '1'
  assert [one.golden_answers for one in load_questions(gsm8k(tmp_path / 'g+h', 1, 2))] == [('1',), ('2',)]
  path = hotpotqa(tmp_path / 'h', 'x', ('A', 'a'), ('B', 'b'))
  for source in ('hotpotqa', '2wiki'):
    question, = load_questions(f'{source}:{path}', **unfiltered)
    assert (question.id, question.metadata['source']) == ('x', source)
    assert [passage.id for passage in load_corpus(f'{source}:{path}')] == [f'{source}_0', f'{source}_1']
  (tmp_path / 'c').write_text(json.dumps({'id': '1', 'contents': '"Title"\nText.'}))
  assert load_corpus(str(tmp_path / 'c'))[0].title == 'Title'


def test_a_set_of_several_files(tmp_path):
  first, second = gsm8k(tmp_path / 'g', 1, 2), gsm8k(tmp_path / 'h', 3)
  hotpot, own = f'hotpotqa:{hotpotqa(tmp_path / "w", "x")}', questions(tmp_path / 'q', 'gsm8k_1')
  assert [(question.id, *question.golden_answers) for question in
          load_questions(f'{hotpot}+{first}+{own}+{second}')] == [
    ('x', 'Ada'), ('gsm8k:gsm8k_0', '1'), ('gsm8k:gsm8k_1', '2'), ('file:gsm8k_1', 'A'),
    ('gsm8k.2:gsm8k_0', '3')]
  (tmp_path / 'nq').mkdir()
  several = f'{hotpot}+{questions(tmp_path / "nq" / "test.jsonl", "1")}+{questions(tmp_path / "own.jsonl", "2")}'
  assert [question.metadata['source'] for question in load_questions(several)] == [
    'hotpotqa', 'nq/test', f'{tmp_path.name}/own']
  both = load_questions(f'world:test+{first}', hops=(1,))
  assert len(both) == len(load_questions('world:test', hops=(1,))) + 2


def test_a_corpus_of_several_files_has_every_passage_once_and_can_be_had_by_source(tmp_path):
  a = hotpotqa(tmp_path / 'a', 'x', ('A', 'a'), ('B', 'b'))
  b = hotpotqa(tmp_path / 'b', 'y', ('B', 'b'), ('A', 'other'))
  documents = load_corpus(f'hotpotqa:{a}+hotpotqa:{b}+2wiki:{a}')
  assert [(one.title, one.text) for one in documents] == [('A', 'a'), ('B', 'b'), ('A', 'other')]
  assert len({one.id for one in documents}) == 3
  assert len(load_corpus(f'world+hotpotqa:{a}')) == len(load_corpus('world')) + 2
  corpora = load_corpora(f'hotpotqa:{a}+2wiki:{a}+hotpotqa:{b}')
  assert {source: [one.text for one in of_source] for source, of_source in corpora.items()} == {
    'hotpotqa': ['a', 'b', 'other'], '2wiki': ['a', 'b']}


def test_names_that_stand_for_nothing(tmp_path):
  name = gsm8k(tmp_path / 'g', 1)
  for load, wrong, reason in (
      *((load_questions, wrong, 'nothing stands') for wrong in (f'{name}+', f'+{name}', f'{name}++{name}')),
      (load_questions, f'gsm:{tmp_path}/g', "no source is called 'gsm'; known: world, nq, triviaqa, popqa"),
      (load_corpus, name, "no documents come with 'gsm8k'"),
      (load_corpus, 'world:rl', "'world', not 'world:rl'")):
    with pytest.raises(ValueError, match=reason):
      load(wrong)
  with pytest.raises(DataError, match='ids that are the same'):
    load_questions('+'.join([questions(tmp_path / 'a', '1'), questions(tmp_path / 'b', '1', 'file:1')]))
