"""Readers of the public benchmark files, on made-up records in the formats of their authors."""

import copy
import gzip
import json

import pytest

from jaxsearch.data import benchmarks
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.sources import load_questions

GSM8K = [
    {'question': 'Ada bakes 48 buns in May and half as many in June. How many in all?',
     'answer': 'In June she bakes 48/2 = <<48/2=24>>24 buns.\nIn all 48+24 = <<48+24=72>>72 buns.\n#### 72'},
    {'question': 'A loan of $1,000 grows by 20% a year. What is owed after a year?',
     'answer': '1000*1.2 = $<<1000*1.2=1200>>1200\n#### 1,200'},
    {'question': 'It was 4 degrees and fell by 14. How cold is it?', 'answer': '4-14 = <<4-14=-10>>-10\n#### -10'}]
HOTPOTQA = [
    {'_id': '5a8b57f25542995d1e6f1371', 'answer': 'yes', 'question': 'Were Ada Moor and Ben Tide of the same nationality?',
     'supporting_facts': [['Ada Moor', 0], ['Ben Tide', 0], ['Ada Moor', 1]], 'type': 'comparison', 'level': 'hard',
     'context': [['Ada Moor', ['Ada Moor is a Welsh director.', ' She lives in Bangor.']], ['Ben Tide', ['Ben Tide is Welsh.']],
                 ['Empty', []]]},
    {'_id': '5a8c7595554299585d9e36b6', 'answer': 'Chief of Protocol', 'question': 'What office did the lead of "Tide" hold?',
     'supporting_facts': [['Tide (film)', 0], ['Cora “Quill” Reed', 1]], 'type': 'bridge', 'level': 'medium',
     'context': [['Tide (film)', ['Tide stars Cora Reed.']], ['Ben Tide', ['Ben Tide is Welsh.']],
                 ['Ada Moor', ['Ada Moor is a hill.']]]}]
TWO_WIKI = [
    {'_id': '8813f87c0bdd11eba7f7acde48001122', 'type': 'compositional', 'question': "Who is the mother of Tide's director?",
     'context': [['Tide (film)', ['Tide is a 1931 film.', 'It was directed by Ada Moor.']],
                 ['Ada Moor', ['Her mother: Eve Moor.']]],
     'supporting_facts': [['Tide (film)', 1], ['Ada Moor', 0]], 'answer': 'Eve Moor', 'answer_id': 'Q1',
     'evidences': [['Tide (film)', 'director', 'Ada Moor'], ['Ada Moor', 'mother', 'Eve Moor']], 'evidences_id': []}]
MUSIQUE = [
    {'id': '2hop__482757_12019', 'question': 'When was the place where Ada Moor died founded?', 'answer': '1284',
     'answer_aliases': ['the year 1284', '1284'], 'answerable': True,
     'paragraphs': [
         {'idx': 0, 'title': 'Bangor', 'paragraph_text': 'Bangor was founded in 1284.', 'is_supporting': True},
         {'idx': 1, 'title': 'Bangor', 'paragraph_text': 'Bangor has a pier.', 'is_supporting': False},
         {'idx': 2, 'title': 'Ada Moor', 'paragraph_text': 'Ada Moor died in Bangor.', 'is_supporting': True}],
     'question_decomposition': [
         {'id': 482757, 'question': 'Ada Moor >> place of death', 'answer': 'Bangor', 'paragraph_support_idx': 2},
         {'id': 12019, 'question': 'When was #1 founded?', 'answer': '1284', 'paragraph_support_idx': 0}]},
    {'id': '2hop__482757_12019', 'question': 'When was the place where Ada Moor died founded?', 'answer': '1284',
     'answer_aliases': [], 'answerable': False,
     'paragraphs': [{'idx': 0, 'title': 'Conwy', 'paragraph_text': 'Conwy has walls.', 'is_supporting': False}],
     'question_decomposition': [{'id': 1, 'question': 'Who?', 'answer': 'x', 'paragraph_support_idx': None}]},
    {'id': '3hop1__9285_5188_23307', 'question': 'Who leads the union?', 'answer': 'Cora Reed', 'answer_aliases': [],
     'answerable': True, 'paragraphs': [{'idx': 0, 'title': 'Union', 'paragraph_text': 'Led by Reed.', 'is_supporting': True}],
     'question_decomposition': [{'id': n, 'question': 'q', 'answer': 'a', 'paragraph_support_idx': 0} for n in range(3)]}]


def finqa(number, exe_ans, answer, program='subtract(60.94, 25.14), divide(#0, 25.14)'):
  return {
      'pre_text': ['interest rate risk .', 'sales are in millions .'], 'post_text': ['see note 5 .'],
      'filename': 'TIDE/2009/page_49.pdf', 'table_ori': [], 'id': f'TIDE/2009/page_49.pdf-{number}',
      'table': [['', '2009', '2008'], ['net sales', '$ 1,234.50', '$ 1,100.00'], ['tax rate', '12.3 % ( 12.3 % )', '']],
      'qa': {'question': 'what is the growth of net sales?', 'answer': answer, 'explanation': '', 'program': program,
             'gold_inds': {}, 'exe_ans': exe_ans, 'program_re': '', 'ann_table_rows': [1], 'ann_text_rows': [], 'steps': []}}


FINQA = [finqa(1, 0.12227, '12.2%'), finqa(2, 134.5, '134.5', 'subtract(1234.50, 1100.00)'),
         finqa(3, 'yes', 'yes', 'greater(1234.50, 1100.00)')]
ALL = {'gsm8k': GSM8K, 'hotpotqa': HOTPOTQA, '2wiki': TWO_WIKI, 'musique': MUSIQUE, 'finqa': FINQA}
LINES = ('gsm8k', 'musique')


def write(path, source, records):
  data = '\n'.join(map(json.dumps, records)) if source in LINES else json.dumps(records)
  path.write_bytes(gzip.compress(data.encode()) if path.suffix == '.gz' else data.encode())
  return path


@pytest.fixture
def read(tmp_path):
  return lambda source, records: benchmarks.read_questions(source, write(tmp_path / 'file', source, records))


def right(question, answer):
  return question.score(answer)


def test_gsm8k(read):
  found = read('gsm8k', GSM8K)
  assert [(question.id, question.golden_answers) for question in found] == [
      ('gsm8k_0', ('72',)), ('gsm8k_1', ('1200',)), ('gsm8k_2', ('-10',))]
  assert found[0].question == GSM8K[0]['question']
  assert found[0].metadata == {'match': 'numeric', 'source': 'gsm8k'}
  assert [right(question, answer) for question, answer in zip(found, ['72.0 buns', '$1,200', '10'], strict=True)] == [1, 1, 0]


def test_hotpotqa(read):
  yes, office = read('hotpotqa', HOTPOTQA)
  assert (yes.id, yes.golden_answers, yes.question) == (HOTPOTQA[0]['_id'], ('yes',), HOTPOTQA[0]['question'])
  assert yes.metadata == {'type': 'comparison', 'source': 'hotpotqa', 'gold_titles': ['Ada Moor', 'Ben Tide'],
                          'supporting_facts': [['Ada Moor', 0], ['Ben Tide', 0], ['Ada Moor', 1]]}
  assert right(office, 'the US chief of protocol.') == 0 and office.score('the chief of protocol.') == 1
  assert right(yes, 'yes, both') == 0


def test_columns_of_hugging_face_are_the_same_questions_and_passages(read, tmp_path):
  columns = copy.deepcopy(HOTPOTQA)
  for record in columns:
    record['id'] = record.pop('_id')
    for key, other in (('supporting_facts', 'sent_id'), ('context', 'sentences')):
      titles, values = zip(*record[key], strict=True)
      record[key] = {'title': list(titles), other: list(values)}
  assert read('hotpotqa', columns) == read('hotpotqa', HOTPOTQA)
  paths = [write(tmp_path / name, 'hotpotqa', records) for name, records in (('a', HOTPOTQA), ('b', columns))]
  assert benchmarks.read_documents('hotpotqa', paths[0]) == benchmarks.read_documents('hotpotqa', paths[1])


def test_2wiki(read):
  question, = read('2wiki', TWO_WIKI)
  assert (question.id, question.golden_answers) == (TWO_WIKI[0]['_id'], ('Eve Moor',))
  assert question.metadata == {'type': 'compositional', 'source': '2wiki',
                               'gold_titles': ['Tide (film)', 'Ada Moor'],
                               'supporting_facts': [['Tide (film)', 1], ['Ada Moor', 0]]}


def test_musique_without_what_cannot_be_answered(read):
  two, three = read('musique', MUSIQUE)  # the unanswerable twin has the same id
  assert (two.id, two.golden_answers) == ('2hop__482757_12019', ('1284', 'the year 1284'))
  assert two.metadata == {'hops': 2, 'gold_titles': ['Bangor', 'Ada Moor'], 'source': 'musique'}
  assert three.metadata['hops'] == 3
  with pytest.raises(DataError, match='no questions in it'):
    read('musique', MUSIQUE[1:2])


def test_finqa_shows_the_text_the_table_and_the_question(read):
  growth, change, greater = read('finqa', FINQA)
  assert growth.question == (
      'interest rate risk . sales are in millions .\n\n'
      ' | 2009 | 2008\nnet sales | $ 1,234.50 | $ 1,100.00\ntax rate | 12.3 % ( 12.3 % ) | \n\n'
      'see note 5 .\n\nwhat is the growth of net sales?')
  assert growth.metadata == {'match': 'numeric', 'tolerance': 0.01, 'table': FINQA[0]['table'],
                             'program': 'subtract(60.94, 25.14), divide(#0, 25.14)', 'source': 'finqa'}
  assert change.golden_answers == ('134.5',) and greater.golden_answers == ('yes',)
  assert right(greater, 'Yes') == 1 and right(greater, 'no') == 0 and right(change, 'about $135 million') == 1


@pytest.mark.parametrize(('exe_ans', 'answer', 'golds', 'yes', 'no'), [
    (0.12227, '12.2%', ('12.227%', '12.2%'), ['12.2%', '12.23 %', '12.2', '0.122', '0.12227'], ['1.22', '13%', '-12.2%']),
    (0.4655, '46.55', ('46.55%', '46.55'), ['46.55', '46.6%', '0.4655'], ['4655', '4.655']),   # a percentage without its sign
    (12.5, '12.5%', ('12.5%',), ['12.5', '12.5%', '0.125'], ['1250%', '1250']),                # a program that multiplies
    (0.0148, '1%', ('1.48%', '1%'), ['1%', '1.48%', '0.0148'], ['2%', '1.2%']),                # rounded far, yet the answer
    (81.66667, '81.6', ('81.66667', '81.6'), ['81.6', '81.67', '82'], ['83', '0.8166']),       # cut off, not rounded
    (0.29167, '-22%', ('0.29167',), ['0.29167', '29.2%'], ['-22%', '22%', '29.2']),            # a wrong answer is no gold
    (0.5, '', ('0.5',), ['0.5', '50%', '1/2'], ['50', 'none']),
    (405.0, '405', ('405',), ['405', '$405 million', '404'], ['400', '40500']),
    (-0.0561, '-5.61%', ('-5.61%',), ['-5.61%', '-0.0561'], ['5.61%']),
    (1e-05, '', ('0.00001',), ['0.00001', '1e-5'], ['0', '0.0001']),
    (0.0, '0', ('0',), ['0', '0.00'], ['0.1'])])
def test_finqa_percentages_and_rounding(read, exe_ans, answer, golds, yes, no):
  question, = read('finqa', [finqa(1, exe_ans, answer)])
  assert question.golden_answers == golds
  assert [given for given in yes + no if right(question, given)] == yes


def changed(record, key, value):
  """A copy of a record with another value at 'qa.exe_ans'; None takes the key away."""
  record = copy.deepcopy(record)
  *outer, last = key.split('.')
  inside = record
  for name in outer:
    inside = inside[name]
  if value is None:
    del inside[last]
  else:
    inside[last] = value
  return record


@pytest.mark.parametrize(('source', 'key', 'value', 'reason'), [
  ('gsm8k', 'answer', 'x\n#### many', "no number behind '####'"), ('gsm8k', 'answer', None, 'no gold answer'),
  ('gsm8k', 'question', ' ', "no 'question'"), ('hotpotqa', 'answer', None, "no key 'answer'"),
  ('hotpotqa', 'supporting_facts', 'Ada', 'not in the format of hotpotqa'),
  ('hotpotqa', 'supporting_facts', {'title': ['A'], 'sent_id': []}, 'not in the format of hotpotqa'),
  ('musique', 'answerable', None, "no key 'answerable'"),
  ('musique', 'paragraphs', ['x'], 'not in the format of musique'),
  ('musique', 'paragraphs', [{'title': 'A'}], "no key 'is_supporting'"),
  ('finqa', 'qa', None, "no key 'qa'"), ('finqa', 'qa.exe_ans', 'maybe', "convert string to float: 'maybe'"),
  ('finqa', 'qa.exe_ans', float('nan'), "'exe_ans' must be finite"),
  ('finqa', 'table', [['a', 'b'], ['c']], "the rows of 'table' must have one length"),
  ('finqa', 'table', [['a', 1]], 'not in the format of finqa')])
def test_faults_name_file_record_and_key(tmp_path, source, key, value, reason):
  first, *others = [record for record in ALL[source] if record.get('answerable', True)]
  path = write(tmp_path / 'file.json', source, [*others, changed(first, key, value)])
  with pytest.raises(DataError, match=reason) as error:
    benchmarks.read_questions(source, path)
  last = len(others) + 1
  assert str(error.value).startswith(f'{path}:{last}: ' if source in LINES else f'{path}: record {last}: ')


@pytest.mark.parametrize('source', ['musique', 'finqa'])  # lines, an array
@pytest.mark.parametrize(('data', 'reason'), [
  (b'', 'no questions'), (b'{', 'bad JSON'), (b'["\xff"]', 'not UTF-8'), (b'[1]', 'expected a JSON object'),
  (b'"x"', 'expected a JSON (array of objects|object)')])
def test_files_that_are_not_in_the_format(tmp_path, source, data, reason):
  path = tmp_path / 'file'
  path.write_bytes(data)
  with pytest.raises(DataError, match=reason) as error:
    benchmarks.read_questions(source, path)
  assert str(error.value).startswith(f'{path}:')


def test_passages_once_and_in_order(tmp_path):
  path = write(tmp_path / 'file', 'hotpotqa', HOTPOTQA)
  assert benchmarks.read_documents('hotpotqa', path) == [
      Document('hotpotqa_0', 'Ada Moor', 'Ada Moor is a Welsh director. She lives in Bangor.'),
      Document('hotpotqa_1', 'Ben Tide', 'Ben Tide is Welsh.'), Document('hotpotqa_2', 'Tide (film)', 'Tide stars Cora Reed.'),
      Document('hotpotqa_3', 'Ada Moor', 'Ada Moor is a hill.')]
  two_wiki = benchmarks.read_documents('2wiki', write(tmp_path / 'file', '2wiki', TWO_WIKI))
  assert two_wiki[0] == Document('2wiki_0', 'Tide (film)', 'Tide is a 1931 film. It was directed by Ada Moor.')
  musique = benchmarks.read_documents('musique', write(tmp_path / 'file', 'musique', MUSIQUE))
  assert [passage.title for passage in musique] == ['Bangor', 'Bangor', 'Ada Moor', 'Conwy', 'Union']


def test_the_reports_of_finqa_can_be_searched_for(read, tmp_path):
  question, *_ = read('finqa_search', FINQA)
  assert question.question == ('Report: TIDE/2009/page_49.pdf\n\n | 2009 | 2008\nnet sales | $ 1,234.50 | $ 1,100.00\n'
                               'tax rate | 12.3 % ( 12.3 % ) | \n\nwhat is the growth of net sales?')
  assert (question.metadata['source'], question.golden_answers) == ('finqa', read('finqa', FINQA)[0].golden_answers)
  found = benchmarks.read_documents('finqa', write(tmp_path / 'reports', 'finqa', FINQA))  # three questions on one report
  assert {passage.title for passage in found} == {'TIDE/2009/page_49.pdf'}
  assert [passage.text for passage in found][1:] == ['interest rate risk . sales are in millions .', 'see note 5 .']
  assert 'net sales | $ 1,234.50' in found[0].text


def test_passages_that_are_not_there(tmp_path):
  with pytest.raises(ValueError, match="no documents come with 'gsm8k'; they do with hotpotqa, 2wiki"):
    benchmarks.read_documents('gsm8k', tmp_path / 'file')
  with pytest.raises(DataError, match='no documents in it'):
    benchmarks.read_documents('hotpotqa', write(tmp_path / 'file', 'hotpotqa', [changed(HOTPOTQA[0], 'context', [])]))
  with pytest.raises(DataError, match="record 1: .*'context' must hold lists of sentences"):
    benchmarks.read_documents('2wiki', write(tmp_path / 'file', '2wiki', [changed(TWO_WIKI[0], 'context', [['A', 'text']])]))


def authors(folder):
  """The files of the other four, as their authors publish them."""
  files = {
    'NQ-open.dev.jsonl': '{"question": "who wrote tide", "answer": ["Ada Moor", "Moor"]}\n',
    'unfiltered-web-dev.json': json.dumps({'Data': [{'Question': 'Who wrote Tide?', 'QuestionId': 'tc_3', 'QuestionSource': 'x',
                                                     'Answer': {'Value': 'Ada Moor', 'Aliases': ['A. Moor', 'Ada Moor'],
                                                                'NormalizedAliases': ['ada moor']}}], 'Version': 1.0}),
    'popQA.tsv': 'id\tsubj\tquestion\tpossible_answers\n4222362\tTide\tWho is the author of Tide?\t"[""Ada Moor"", ""Moor""]"\n',
    'Bamboogle Prerelease - Sheet1.csv': 'Question,Answer\n"Who wrote Tide, and when?","Ada Moor, 1931"\n'}
  for name, text in files.items():
    (folder / name).write_text(text)


@pytest.mark.parametrize(('name', 'ids', 'golds'), [
  ('nq', 'nq_0', ('Ada Moor', 'Moor')), ('triviaqa', 'tc_3', ('Ada Moor', 'A. Moor')), ('popqa', '4222362', ('Ada Moor', 'Moor')),
  ('bamboogle', 'bamboogle_0', ('Ada Moor, 1931',))])
def test_single_hop_benchmarks_as_their_authors_publish_them(tmp_path, name, ids, golds):
  authors(tmp_path)
  question, = load_questions(benchmarks.find(name, tmp_path))
  assert (question.id, question.golden_answers, question.metadata['source']) == (ids, golds, name)
  assert 'ide' in question.question


@pytest.mark.parametrize(('name', 'text', 'message'), [
  ('popqa', 'id\tquestion\tpossible_answers\n1\tWho?\tnone\n', "'possible_answers' is no JSON: 'none'"),
  ('triviaqa', '{"Questions": []}', "no key 'Data'"), ('nq', '{"question": "Who?", "answer": [" "]}', 'no gold answer'),
  ('bamboogle', 'Question,Answer\nWho?,\n', '2: no gold answer')])
def test_what_these_files_lack_is_named(tmp_path, name, text, message):
  (tmp_path / 'file').write_text(text)
  with pytest.raises(DataError, match=message):
    benchmarks.read_questions(name, tmp_path / 'file')


LINE = json.dumps({'id': 'test_0', 'question': 'Who?', 'golden_answers': ['A']})


@pytest.mark.parametrize(('files', 'name', 'found'), [
  (['nq/train.jsonl', 'nq/dev.jsonl', 'nq/test.jsonl'], 'nq', 'nq/test.jsonl'),  # FlashRAG
  (['hotpotqa/train.jsonl', 'hotpotqa/dev.jsonl'], 'hotpotqa', 'hotpotqa/dev.jsonl'),
  (['qa/2wikimultihopqa.jsonl'], '2wiki', 'qa/2wikimultihopqa.jsonl'),
  (['gsm8k_train.jsonl', 'gsm8k_test.jsonl'], 'gsm8k', 'gsm8k_test.jsonl'),
  (['test.parquet', 'train.parquet'], 'popqa', 'test.parquet'), (['musique/dev/state.json'], 'musique', 'musique/dev'),
  (['2wiki/dev.json'], '2wikimultihopqa', '2wiki:2wiki/dev.json'), (['finqa/test.json'], 'finqa', 'finqa:finqa/test.json'),
  (['data/musique_ans_v1.0_dev.jsonl'], 'musique', 'musique:data/musique_ans_v1.0_dev.jsonl')])
def test_a_benchmark_is_found_under_the_names_it_is_published_by(tmp_path, files, name, found):
  for file in files:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text('{"paragraphs": []}' if 'ans_v1' in file else LINE)
  assert benchmarks.find(name, tmp_path).replace(f'{tmp_path}/', '') == found


def test_a_benchmark_that_is_not_there(tmp_path):
  with pytest.raises(ValueError, match="no benchmark is called 'squad'; there are nq, triviaqa"):
    benchmarks.find('squad', tmp_path)
  with pytest.raises(FileNotFoundError, match='no popqa in it, such as popqa/test.jsonl or popqa.jsonl'):
    benchmarks.find('popqa', tmp_path)


@pytest.mark.parametrize(('name', 'split'), [('nq/test.jsonl', 'test'), ('a/gsm8k_test.jsonl', 'test'), ('qa/nq.jsonl', ''),
                                             ('hotpotqa:hotpot_dev_distractor_v1.json', 'dev'), ('latest/nq.jsonl', ''),
                                             ('nq/train.parquet', 'train'), ('world:test', 'test')])
def test_the_split_is_read_off_the_name(name, split):
  assert benchmarks.split_of(name) == split
