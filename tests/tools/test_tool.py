"""Tools that a policy calls by name: their schemas, the arguments they take, what they show."""

import json

import jsonschema
import pytest
from pydantic import Field

from configs import base
from jaxsearch import tools
from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.sampler.requests import Call, RunPython, Search, ToolFailure, Tools
from jaxsearch.setup import open_tools
from jaxsearch.tools import index_build, tool
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.index import Index
from jaxsearch.trees.tree import Role, Tree
from tests.methods.driving import Letters

ARTICLE = '\n'.join(f'Verse {number} of the song about ships.' for number in range(1, 301))
CORPUS = [Document('7', 'The Song', ARTICLE), Document('8', 'Ships', 'A ship floats.'),
          Document('9', 'Ships', 'The Endeavour sank in\n1778 off Newport.'),
          Document('Ships', 'Odd', 'An odd id.')]
OFFERED = {name: tools.find_tool(name) for name in tools.TOOLS}
FITTING = {'search': {'query': 'x'}, 'open': {'document': '7', 'line': 2}, 'python': {'code': 'print(1)'},
           'find': {'document': '7', 'words': 'a'}, 'finish': {'answer': 'Paris'}}


@pytest.fixture
def node():
  return Tree(Letters(), Question('q', 'Who?', ('A',))).root.append('prompt', Role.PROMPT)


def said(name, node, arguments, search=None, room=10**6, **settings):
  """Returns what the policy sees of a call, served as a rollout serves it."""
  given = Tools(search=search or BM25(CORPUS), **{'max_observation': 10**6, 'answer_reserve': 0} | settings)
  requests = OFFERED[name].requests(node, arguments, lambda text: f'<{text}>')
  replies = [request.cut(request.run(given), given, room, Letters()) for request in requests]
  return OFFERED[name].result(replies)


@pytest.mark.parametrize('name', tools.TOOLS)
def test_a_schema_is_json_schema_and_what_it_allows_is_served(name, node):
  one = OFFERED[name]
  assert one.schema.keys() == {'name', 'description', 'parameters'} and one.name == name
  jsonschema.Draft202012Validator.check_schema(one.schema['parameters'])
  jsonschema.validate(FITTING[name], one.schema['parameters'])
  fields = one.schema['parameters']['properties'].values()
  assert all('description' in field and 'title' not in field for field in fields)
  if one.serve:
    assert [request.tool for request in one.requests(node, FITTING[name])] == [name]
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate({}, one.schema['parameters'])


@pytest.mark.parametrize('name, arguments, wrong', [
  ('search', {}, 'search(query): query: Field required'),
  ('search', {'query': 'x', 'k': 3}, 'search(query): k: Extra inputs are not permitted'),
  ('search', {'query': ['x'] * 9}, 'search(query): query: Input should be a valid string; query: List should have at most 8'),
  ('search', {'query': []}, 'query: List should have at least 1'),
  ('search', {'query': ['x', ' ']}, 'query: String should match'),
  ('open', {'document': '7', 'line': 'two'}, 'open(document, line?): line: Input should be a valid integer'),
  ('open', {'document': '7', 'line': 0}, 'line: Input should be greater than or equal to 1'),
  ('find', {'document': '7', 'words': ' '}, 'find(document, words): words: String should match'),
  ('python', {'code': '\n'}, 'code: String should match'),
  ('python', 'print(1)', 'python(code): arguments: Input should be a valid dictionary')])
def test_arguments_that_do_not_fit_are_said(name, arguments, wrong, node):
  with pytest.raises(ValueError) as error:
    OFFERED[name].requests(node, arguments)
  assert wrong in str(error.value)


def test_numbers_and_texts_are_read_as_the_schema_has_them(node):
  assert OFFERED['search'].requests(node, {'query': 2024})[0].query == '2024'
  assert OFFERED['open'].requests(node, {'document': 7, 'line': '3'})[0].query == '7, line 3'


def test_a_search_shows_ids_and_several_queries_are_several_searches(node):
  shown = said('search', node, {'query': 'Endeavour'})
  assert shown == '[9] Ships\nThe Endeavour sank in\n1778 off Newport.'
  requests = OFFERED['search'].requests(node, {'query': ['Endeavour', 'nix']})
  assert [(type(request), request.query) for request in requests] == [(Search, 'Endeavour'), (Search, 'nix')]
  assert OFFERED['search'].result([[CORPUS[1]], ToolFailure('down'), []]) == (
    '[8] Ships\nA ship floats.\n\nThe tool failed: down\n\nNothing was found.')
  assert said('search', node, {'query': 'Endeavour'}, room=9) == 'Found, but there is no room to show it.'
  assert said('search', node, {'query': 'nix'}, room=9) == 'Nothing was found.'


def test_a_document_opens_by_id_or_title_whole_in_windows(node, tmp_path):
  lines = [json.dumps({'id': one.id, 'contents': f'{one.title}\n{one.text}'}) for one in CORPUS]
  (tmp_path / 'c.jsonl').write_text('\n'.join(lines))
  index_build.build(tmp_path / 'c.jsonl', tmp_path / 'index', 'bm25')
  for search in (BM25(CORPUS), Index(tmp_path / 'index')):
    page = said('open', node, {'document': '7'}, search).splitlines()
    assert page[:2] == ['The Song, lines 1 to 100 of 300', 'Verse 1 of the song about ships.']
    assert len(page) == 101
    last = said('open', node, {'document': ' the  SONG', 'line': 299}, search)
    assert last == 'The Song, lines 299 to 300 of 300\n' + '\n'.join(ARTICLE.splitlines()[298:])
    odd = said('open', node, {'document': 'Ships'}, search)  # ids come first
    assert odd == 'Odd, lines 1 to 1 of 1\nAn odd id.'
    assert 'no document' in said('open', node, {'document': '77'}, search)
    assert said('open', node, {'document': '8', 'line': 9}, search) == 'Ships has 1 lines.'
  untitled = BM25([Document('5', '', 'No title.')])
  assert 'no document' in said('open', node, {'document': ' '}, untitled) and untitled.open('') == []
  both = BM25(CORPUS[:3])
  assert said('open', node, {'document': 'ships'}, both).splitlines()[1:] == [
    'A ship floats.', 'The Endeavour sank in', '1778 off Newport.']


def test_a_window_has_the_lines_that_fit_and_says_which(node):
  shown = said('open', node, {'document': '7', 'line': 3}, room=200)
  assert shown.startswith('The Song, lines 3 to 7 of 300\n') and len(shown) + 2 <= 200 < len(shown) + 36
  assert len(said('open', node, {'document': '7'}, room=40)) == 38  # not a line: what fits of it
  limits = {'max_observation': 200}, {'room': 200}
  assert len({said('open', node, {'document': '7'}, **limit) for limit in limits}) == 1


def test_words_are_found_with_their_lines(node):
  assert said('find', node, {'document': '9', 'words': 'sank  IN 1778'}) == (
    'Ships\n\nLine 1:\nThe Endeavour sank in\n1778 off Newport.')
  assert said('find', node, {'document': '9', 'words': 'n'}).count('Line 1:') == 1  # on lines 1 and 2
  shown = said('find', node, {'document': '7', 'words': 'verse 2'})
  assert shown.startswith('The Song\n\nLine 1:\nVerse 1 of') and shown.count('Line ') == 10
  assert said('find', node, {'document': '7', 'words': 'a.b'}) == 'The Song\n\nNothing was found.'
  assert 'no document' in said('find', node, {'document': 'x', 'words': 'a'})
  broken = BM25([Document('7', 'Long', f'{"y" * 99}z {"a " * 26}well-known\n\n\xa0 end')])  # words across lines
  lines = said('open', node, {'document': '7'}, broken).splitlines()[1:]
  assert lines[2] == 'known' and lines[0] == 'y' * 80
  for words, first in (('well-known', 1), ('y' * 99 + 'Z', 1), ('known end', 2), ('end', 4), ('a a', 1)):
    shown = said('find', node, {'document': '7', 'words': words}, broken)
    assert shown.split('\n\n', 1)[1] == '\n'.join([f'Line {first}:', *lines[first - 1:first + 2]])


def test_python_gets_the_table_of_the_question(node):
  node.tree.question.metadata['table'] = [['a', '1']]
  request, = OFFERED['python'].requests(node, {'code': 'print(table())'})
  assert isinstance(request, RunPython) and request.table == (['a', '1'],)


def test_a_back_end_that_opens_nothing_fails(node):
  class Web:
    def search(self, queries, topk):
      return [[]]

  with pytest.raises(LookupError, match='opens no documents'):
    said('open', node, {'document': '7'}, Web())
  config = base.get_config()
  config.tools, config.search.backend, config.search.url = ('search', 'find'), 'http', 'http://127.0.0.1:9'
  with pytest.raises(ValueError, match="tools: 'find' opens documents, which search.backend='http' does not"):
    open_tools(config)


def test_a_tool_of_your_own(node):
  class Weather(tool.Arguments):
    """Says the weather."""
    city: str = Field(description='Where.')

  weather = tool.declare('weather', Weather, lambda node, arguments, show: [
    Call(lambda tools: f'Rain in {arguments.city}', node, 'weather', arguments.city, show)])
  request, = weather.requests(node, {'city': 'Kiel'})
  assert request.run(Tools()) == 'Rain in Kiel' and (request.tool, request.query) == ('weather', 'Kiel')
  assert weather.schema == {'name': 'weather', 'description': 'Says the weather.', 'parameters': {
    'type': 'object', 'properties': {'city': {'type': 'string', 'description': 'Where.'}},
    'required': ['city']}}
