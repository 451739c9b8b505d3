"""Readers of the public benchmark files, on made-up records in the formats of their authors."""

import copy
import json

import pytest

from jaxsearch.data import benchmarks
from jaxsearch.data.corpus import Document
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.sources import load_questions

GSM8K = [
  {'question': 'Ada bakes 48 buns and half as many. How many in all?', 'answer': 'Half is 24.\n#### 72'},
  {'question': 'A loan of $1,000 grows by 20%?', 'answer': '1000*1.2 = $<<1000*1.2=1200>>1200\n#### 1,200'},
  {'question': 'It was 4 degrees and fell by 14?', 'answer': '4-14 = <<4-14=-10>>-10\n#### -10'}]
HOTPOTQA = [
  {'_id': '5a8b57', 'answer': 'yes', 'question': 'Were Ada Moor and Ben Tide of the same nationality?',
   'supporting_facts': [['Ada Moor', 0], ['Ben Tide', 0], ['Ada Moor', 1]], 'type': 'comparison',
   'context': [['Ada Moor', ['Ada Moor is a Welsh director.', ' She lives in Bangor.']],
               ['Ben Tide', ['Ben Tide is Welsh.']], ['Empty', []]]},
  {'_id': '5a8c75', 'answer': 'Chief of Protocol', 'question': 'What office?', 'type': 'bridge',
   'supporting_facts': [['Tide (film)', 0], ['Cora “Quill” Reed', 1]],
   'context': [['Tide (film)', ['Tide stars Cora Reed.']], ['Ben Tide', ['Ben Tide is Welsh.']],
               ['Ada Moor', ['Ada Moor is a hill.']]]}]
TWO_WIKI = [
  {'_id': '8813f8', 'type': 'compositional', 'question': "Who is the mother of Tide's director?",
   'context': [['Tide (film)', ['Tide is a 1931 film.', 'It was directed by Ada Moor.']],
               ['Ada Moor', ['Her mother: Eve Moor.']]],
   'supporting_facts': [['Tide (film)', 1], ['Ada Moor', 0]], 'answer': 'Eve Moor', 'answer_id': 'Q1'}]


def musique(name, answer, *paragraphs, aliases=(), answerable=True, hops=2):
  keys = 'title', 'paragraph_text', 'is_supporting'
  return {'id': name, 'question': 'When?', 'answer': answer, 'answer_aliases': [*aliases],
          'answerable': answerable, 'paragraphs': [dict(zip(keys, values)) for values in paragraphs],
          'question_decomposition': [{'question': 'q', 'answer': 'a'}] * hops}


MUSIQUE = [
  musique('2hop__48', '1284', ('Bangor', 'Founded in 1284.', True), ('Bangor', 'It has a pier.', False),
          ('Ada Moor', 'Died in Bangor.', True), aliases=['the year 1284', '1284']),
  musique('2hop__48', '1284', ('Conwy', 'Conwy has walls.', False), answerable=False),  # the same id
  musique('3hop1__92', 'Cora Reed', ('Union', 'Led by Reed.', True), hops=3)]


def finqa(exe_ans, answer, number=1):
  table = [['', '2009', '2008'], ['net sales', '$ 1,234.50', '$ 1,100.00'],
           ['tax rate', '12.3 % ( 12.3 % )', '']]
  return {'pre_text': ['interest rate risk .', 'sales are in millions .'], 'post_text': ['see note 5 .'],
          'id': f'TIDE/2009/page_49.pdf-{number}', 'table': table,
          'qa': {'question': 'what is the growth of net sales?', 'answer': answer, 'exe_ans': exe_ans,
                 'program': 'subtract(60.94, 25.14), divide(#0, 25.14)'}}


FINQA = [finqa(0.12227, '12.2%'), finqa(134.5, '134.5', 2), finqa('yes', 'yes', 3)]
ALL = {'gsm8k': GSM8K, 'hotpotqa': HOTPOTQA, '2wiki': TWO_WIKI, 'musique': MUSIQUE, 'finqa': FINQA}
LINES = ('gsm8k', 'musique')


def write(path, source, records):
  path.write_text('\n'.join(map(json.dumps, records)) if source in LINES else json.dumps(records))
  return path


@pytest.fixture
def read(tmp_path):
  return lambda source, records: benchmarks.read_questions(source, write(tmp_path / 'q', source, records))


@pytest.fixture
def passages(tmp_path):
  return lambda source, records: benchmarks.read_documents(source, write(tmp_path / 'p', source, records))


def test_gsm8k(read):
  questions = read('gsm8k', GSM8K)
  assert [(question.id, question.golden_answers) for question in questions] == [
    ('gsm8k_0', ('72',)), ('gsm8k_1', ('1200',)), ('gsm8k_2', ('-10',))]
  assert questions[0].metadata == {'match': 'numeric', 'source': 'gsm8k'}
  assert [one.score(answer) for one, answer in zip(questions, ('72.0 buns', '$1,200', '10'))] == [1, 1, 0]


def test_hotpotqa_and_2wiki(read):
  yes, office = read('hotpotqa', HOTPOTQA)
  assert (yes.id, yes.golden_answers, yes.question) == ('5a8b57', ('yes',), HOTPOTQA[0]['question'])
  facts = [['Ada Moor', 0], ['Ben Tide', 0], ['Ada Moor', 1]]
  assert yes.metadata == {'type': 'comparison', 'source': 'hotpotqa', 'gold_titles': ['Ada Moor', 'Ben Tide'],
                          'supporting_facts': facts}
  assert office.score('the US chief of protocol.') == 0 and office.score('the chief of protocol.') == 1
  question, = read('2wiki', TWO_WIKI)
  assert (question.id, question.golden_answers) == ('8813f8', ('Eve Moor',))
  assert question.metadata['source'] == '2wiki' and question.metadata['gold_titles'] == [
    'Tide (film)', 'Ada Moor']


def test_columns_of_hugging_face_are_the_same_questions_and_passages(read, passages):
  columns = copy.deepcopy(HOTPOTQA)
  for record in columns:
    record['id'] = record.pop('_id')
    for key, other in (('supporting_facts', 'sent_id'), ('context', 'sentences')):
      titles, values = zip(*record[key], strict=True)
      record[key] = {'title': list(titles), other: list(values)}
  for reader in read, passages:
    assert reader('hotpotqa', columns) == reader('hotpotqa', HOTPOTQA)
  for record in columns:
    del record['id']
  assert [question.id for question in read('hotpotqa', columns)] == ['hotpotqa_0', 'hotpotqa_1']


def test_musique_without_what_cannot_be_answered(read):
  two, three = read('musique', MUSIQUE)
  assert (two.id, two.golden_answers) == ('2hop__48', ('1284', 'the year 1284'))
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
                             'program': FINQA[0]['qa']['program'], 'source': 'finqa'}
  assert greater.score('Yes') == 1 and greater.score('no') == 0 and change.score('about $135 million') == 1


@pytest.mark.parametrize(('exe_ans', 'answer', 'golds', 'yes', 'no'), [
  (0.12227, '12.2%', ('12.227%', '12.2%'), '12.2%|12.23 %|12.2|0.122|0.12227', '1.22|13%|-12.2%'),
  (0.4655, '46.55', ('46.55%', '46.55'), '46.55|46.6%|0.4655', '4655|4.655'),     # without its sign
  (12.5, '12.5%', ('12.5%',), '12.5|12.5%|0.125', '1250%|1250'),                  # the program multiplies
  (0.0148, '1%', ('1.48%', '1%'), '1%|1.48%|0.0148', '2%|1.2%'),                  # rounded far
  (81.66667, '81.6', ('81.66667', '81.6'), '81.6|81.67|82', '83|0.8166'),         # cut off, not rounded
  (0.29167, '-22%', ('0.29167',), '0.29167|29.2%', '-22%|22%|29.2'),              # a wrong answer is no gold
  (0.5, '', ('0.5',), '0.5|50%|1/2', '50|none'), (405.0, '405', ('405',), '$405 million|404', '400|40500'),
  (-0.0561, '-5.61%', ('-5.61%',), '-5.61%|-0.0561', '5.61%'), (1e-05, '', ('0.00001',), '1e-5', '0|0.0001')])
def test_finqa_percentages_and_rounding(read, exe_ans, answer, golds, yes, no):
  question, = read('finqa', [finqa(exe_ans, answer)])
  assert question.golden_answers == golds
  right, wrong = yes.split('|'), no.split('|')
  assert [given for given in right + wrong if question.score(given)] == right


@pytest.mark.parametrize(('source', 'key', 'value', 'reason'), [
  ('gsm8k', 'answer', 'x\n#### many', "no number behind '####'"), ('gsm8k', 'answer', None, 'no gold answer'),
  ('gsm8k', 'question', ' ', "no 'question'"), ('hotpotqa', 'answer', None, "no key 'answer'"),
  ('hotpotqa', 'supporting_facts', 'Ada', 'not in the format of hotpotqa'),
  ('hotpotqa', 'supporting_facts', {}, "no key 'title'"), ('hotpotqa', 'supporting_facts', {'title': ['A']}, 'shorter'),
  ('musique', 'answerable', None, "no key 'answerable'"),
  ('musique', 'paragraphs', ['x'], 'not in the format of musique'),
  ('finqa', 'exe_ans', 'maybe', "convert string to float: 'maybe'"),
  ('finqa', 'exe_ans', float('nan'), "'exe_ans' must be finite"),
  ('finqa', 'table', [['a', 'b'], ['c']], "the rows of 'table' must have one length")])
def test_faults_name_file_record_and_key(tmp_path, source, key, value, reason):
  first, *others = copy.deepcopy([record for record in ALL[source] if record.get('answerable', True)])
  inside = first['qa'] if key == 'exe_ans' else first
  del inside[key]
  if value is not None:
    inside[key] = value
  path = write(tmp_path / 'file.json', source, [*others, first])
  with pytest.raises(DataError, match=reason) as error:
    benchmarks.read_questions(source, path)
  last = len(others) + 1
  assert str(error.value).startswith(f'{path}:{last}: ' if source in LINES else f'{path}: record {last}: ')


def test_passages_once_and_in_order(passages):
  assert passages('hotpotqa', HOTPOTQA) == [
    Document('hotpotqa_0', 'Ada Moor', 'Ada Moor is a Welsh director. She lives in Bangor.'),
    Document('hotpotqa_1', 'Ben Tide', 'Ben Tide is Welsh.'),
    Document('hotpotqa_2', 'Tide (film)', 'Tide stars Cora Reed.'),
    Document('hotpotqa_3', 'Ada Moor', 'Ada Moor is a hill.')]
  assert passages('2wiki', TWO_WIKI)[0].text == 'Tide is a 1931 film. It was directed by Ada Moor.'
  titles = [passage.title for passage in passages('musique', MUSIQUE)]
  assert titles == ['Bangor', 'Bangor', 'Ada Moor', 'Conwy', 'Union']


def test_the_reports_of_finqa_can_be_searched_for(read, passages):
  question, *_ = read('finqa_search', FINQA)
  assert question.question == (
    'Report: TIDE/2009/page_49.pdf\n\n | 2009 | 2008\nnet sales | $ 1,234.50 | $ 1,100.00\n'
    'tax rate | 12.3 % ( 12.3 % ) | \n\nwhat is the growth of net sales?')
  assert question.golden_answers == read('finqa', FINQA)[0].golden_answers
  table, *texts = passages('finqa', FINQA)  # three questions on one report
  assert {table.title, *(text.title for text in texts)} == {'TIDE/2009/page_49.pdf'}
  assert [text.text for text in texts] == ['interest rate risk . sales are in millions .', 'see note 5 .']
  assert 'net sales | $ 1,234.50' in table.text


def test_passages_that_are_not_there(passages):
  with pytest.raises(ValueError, match="no documents come with 'gsm8k'; they do with hotpotqa, 2wiki"):
    passages('gsm8k', GSM8K)
  for context, reason in (([], 'no documents in it'),
                          ([['A', 'text']], "record 1: .*'context' must hold lists of sentences"),
                          ([[None, ['text']]], 'record 1: not in the format of hotpotqa')):
    with pytest.raises(DataError, match=reason):
      passages('hotpotqa', [HOTPOTQA[0] | {'context': context}])


AUTHORS = {  # name -> their file, one question in it, its id, its golds
  'nq': ('NQ-open.dev.jsonl', '{"question": "who wrote tide", "answer": ["Ada Moor", "Moor"]}\n',
         'nq_0', ('Ada Moor', 'Moor')),
  'triviaqa': ('unfiltered-web-dev.json', json.dumps({'Data': [
    {'Question': 'Who wrote Tide?', 'QuestionId': 'tc_3',
     'Answer': {'Value': 'Ada', 'Aliases': ['A. Moor', 'Ada']}}]}), 'tc_3', ('Ada', 'A. Moor')),
  'popqa': ('popQA.tsv', 'id\tquestion\tpossible_answers\n42\tWho is the author of Tide?\t"[""A"", ""B""]"\n',
            '42', ('A', 'B')),
  'bamboogle': ('Bamboogle Prerelease - Sheet1.csv',
                'Question,Answer\n"Who wrote Tide, and when?","A, 1931"\n', 'bamboogle_0', ('A, 1931',))}


@pytest.mark.parametrize('name', AUTHORS)
def test_single_hop_benchmarks_as_their_authors_publish_them(tmp_path, name):
  file, text, ids, golds = AUTHORS[name]
  (tmp_path / file).write_text(text)
  question, = load_questions(benchmarks.find(name, tmp_path))
  assert (question.id, question.golden_answers, question.metadata['source']) == (ids, golds, name)
  assert 'ide' in question.question


@pytest.mark.parametrize(('name', 'text', 'message'), [
  ('popqa', 'id\tquestion\tpossible_answers\n1\tWho?\tnone\n', "'possible_answers' is no JSON: 'none'"),
  ('popqa', 'id\tquestion\tpossible_answers\n1\tWho?\t[]\tmore\n', 'more cells than columns'),
  ('triviaqa', '{"Questions": []}', "no key 'Data'"), ('bamboogle', 'Question,Answer\nWho?,\n', '2: no gold'),
  ('nq', '{"question": "Who?", "answer": [" "]}', 'no gold answer'),
  ('nq', '{"question": "Who?", "answer": {"value": "<unk>", "aliases": []}}', 'no gold answer')])
def test_what_these_files_lack_is_named(tmp_path, name, text, message):
  (tmp_path / 'file').write_text(text)
  with pytest.raises(DataError, match=message):
    benchmarks.read_questions(name, tmp_path / 'file')


@pytest.mark.parametrize(('files', 'name', 'place'), [
  ('nq/train.jsonl nq/dev.jsonl nq/test.jsonl', 'nq', 'nq/test.jsonl'),  # FlashRAG
  ('hotpotqa/test.jsonl hotpotqa/dev.jsonl', 'hotpotqa', 'hotpotqa/dev.jsonl'),  # test has no answers
  ('qa/2wikimultihopqa.jsonl', '2wiki', 'qa/2wikimultihopqa.jsonl'),
  ('gsm8k_train.jsonl gsm8k_test.jsonl', 'gsm8k', 'gsm8k_test.jsonl'),
  ('test.parquet train.parquet', 'popqa', 'test.parquet'),
  ('musique/dev/state.json', 'musique', 'musique/dev'),
  ('2wiki/dev.json', '2wikimultihopqa', '2wiki:2wiki/dev.json'),
  ('data/musique_ans_v1.0_dev.jsonl', 'musique', 'musique:data/musique_ans_v1.0_dev.jsonl')])
def test_a_benchmark_is_found_under_the_names_it_is_published_by(tmp_path, files, name, place):
  line = json.dumps({'id': 'test_0', 'question': 'Who?', 'golden_answers': ['A']})
  for file in files.split():
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text('{"paragraphs": []}' if 'ans_v1' in file else line)
  assert benchmarks.find(name, tmp_path).replace(f'{tmp_path}/', '') == place


@pytest.mark.parametrize(('name', 'split'), [
  ('a/gsm8k_test.jsonl', 'test'), ('hotpotqa:hotpot_dev_distractor_v1.json', 'dev'), ('latest/nq.jsonl', ''),
  ('nq/train.parquet', 'train'), ('world:test', 'test')])
def test_the_split_is_read_off_the_name(name, split):
  assert benchmarks.split_of(name) == split
