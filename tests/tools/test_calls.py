"""Replies of tools are cut to the room there is; searches of calls are counted."""

import dataclasses

import pytest
from hypothesis import example, given, settings, strategies as st

from jaxsearch.data.corpus import Document
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.requests import Call, RunPython, Search, ToolFailure, Tools
from jaxsearch.tools.calls import shorten
from jaxsearch.tools.open_document import OpenDocument
from jaxsearch.tools.python_sandbox import PythonSandbox
from jaxsearch.trees import grammar
from jaxsearch.world import files as world

WORLD = Tokenizer.load(world.folder())
ALL = Tools(answer_reserve=0, max_observation=10**6)
OUTPUT = '<output>{}</output>\n'.format


class Bytes:
  special_tokens = ('<|end|>',)
  encode = staticmethod(lambda text: list(text.encode()))


DOCUMENTS = [Document(str(i), f'T{i}', chr(97 + i) * size) for i, size in enumerate((50, 10, 200))]


def show(documents):
  return ''.join(f'--------{document.title}{document.text}' for document in documents)


def test_texts_are_cut_at_one_length_the_largest_that_fits():
  assert shorten(DOCUMENTS, 290, show, Bytes()) == DOCUMENTS
  cut = shorten(DOCUMENTS, 129, show, Bytes())
  assert [len(document.text) for document in cut] == [44, 10, 44]  # 45 each would make 130
  assert [document.title for document in cut] == ['T0', 'T1', 'T2']


def test_the_output_of_a_program_is_cut_to_the_room():
  request = RunPython(None, 'print(1)', show=OUTPUT)
  room = len(OUTPUT('a' * 40))
  for available, size in ((1000, 100), (room, 40), (3, 0)):  # not even the tags fit into 3
    assert request.cut('a' * 100, ALL, available, Bytes()) == 'a' * size


def test_what_a_call_returns_is_measured_as_the_method_shows_it():
  double = Call(lambda tools: None, show=lambda text: text * 2)
  assert double.cut('a' * 50, ALL, 41, Bytes()) == 'a' * 20
  assert Call(lambda tools: None).cut(7, ALL, 1, Bytes()) == 7


@pytest.mark.parametrize('request_', [RunPython(None, ''), Call(str), OpenDocument(None, 'a'), Search(None, 'a')])
def test_a_call_that_ran_out_of_time_stays_a_failure(request_):
  failed = ToolFailure('no reply in time', 'timeout')
  assert request_.cut(failed, ALL, 100, Bytes()) is failed


class Shelf(list):
  """A back end that finds the same for every query, and remembers what it was asked."""

  def __init__(self, *documents):
    self.documents = list(documents)

  def search(self, queries, topk=3):
    self += queries
    return [self.documents]


def test_a_search_shows_the_first_words_of_a_passage():
  tools = Tools(search=Shelf(Document('1', 'One two', 'a b  c\nd'), Document('2', 'Three', 'e')))
  for words, texts in ((0, ['a b  c\nd', 'e']), (3, ['a b  c', 'e']), (1, ['a', 'e'])):
    shown = Search(None, '').run(dataclasses.replace(tools, words=words))
    assert [document.text for document in shown] == texts and shown[0].title == 'One two'
  sandbox = PythonSandbox(workers=1)
  printed = RunPython(None, 'print(search("x"))').run(dataclasses.replace(tools, words=1, python=sandbox))
  sandbox.close()
  assert 'One two) a\n' in printed


@pytest.mark.parametrize('reply', [None, [], [[1]], [[], []], 'text', RuntimeError('on fire')])
def test_each_search_of_a_call_is_counted_with_its_error(reply):
  class Lying:
    def search(self, queries, topk):
      if isinstance(reply, Exception):
        raise reply
      return reply

  tools = Tools(search=Shelf())
  assert Call(lambda tools: tools.find(None, 'x')).run(tools) == [] and tools.searches == [None]
  lied_to = Tools(search=Lying(), searches=tools.searches)
  with pytest.raises(RuntimeError) as error:
    Search(None, 'x').run(lied_to)
  assert tools.searches == [None, error.value]
  assert isinstance(reply, Exception) or error.value.fault == 'malformed'


def test_an_observation_leaves_room_for_an_answer_and_has_a_limit():
  request, size = RunPython(None, 'print(1)', show=OUTPUT), len(OUTPUT(''))
  for tools, room in ((Tools(answer_reserve=30), 100), (Tools(max_observation=70), 1000)):
    assert len(request.cut('a' * 200, tools, room, Bytes())) == 70 - size


PIECES = ('Oviedo ', 'is ', 'a city', ' ', '<information>', '</', '\n', 'é', '日本', '😀', '0', 'x' * 9)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map(''.join)


def written(documents):
  return grammar.information(documents, WORLD.special_tokens)


def tokens(documents):
  return len(WORLD.encode(written(documents)))


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=4), st.integers(-5, 150))
@example([('T', '😀' * 60)], 100)
@settings(deadline=None, max_examples=150)
def test_one_more_character_would_not_fit(given, budget):
  documents = [Document(str(i), title, text) for i, (title, text) in enumerate(given)]
  shown = shorten(documents, budget, written, WORLD)
  cut = lambda shown, size: [dataclasses.replace(document, text=document.text[:size]) for document in shown]
  if tokens(documents) <= budget:
    assert shown == documents
    return
  assert tokens(shown) <= budget or not shown
  size = max((len(document.text) for document in shown), default=0)
  assert shown == cut(documents[:len(shown)], size)
  with_titles = [n for n in range(len(documents) + 1) if not n or tokens(cut(documents[:n], 0)) <= budget]
  assert len(shown) == max(with_titles)
  assert shown == documents[:len(shown)] or tokens(cut(documents[:len(shown)], size + 1)) > budget


class Counting:
  """The world's tokenizer; counts the characters that it gets."""
  special_tokens = WORLD.special_tokens

  def __init__(self):
    self.sizes = []

  def encode(self, text):
    self.sizes.append(len(text))
    return WORLD.encode(text)


def test_megabytes_are_not_tokenised():
  text, tools = 'Oviedo lies on the Nalon; ' * 40_000, Tools(answer_reserve=0)
  documents = [Document(str(i), f'Title {i}', f'{i}{text}') for i in range(10)]
  for request, reply in ((Search(None, ''), documents), (RunPython(None, ''), text * 10)):
    counting = Counting()
    shown = request.written(request.cut(reply, tools, 4096, counting), counting.special_tokens)
    assert 500 < len(WORLD.encode(shown)) <= 512 and sum(counting.sizes) < 60_000


@pytest.mark.parametrize('query', ['["x"]', 'nest', '"x" * 1001', '7'])
def test_a_query_of_a_program_is_a_short_text(query):
  """A list that holds a list twice, 28 times over, would be gigabytes as text; 12 do here."""
  asked, sandbox = Shelf(), PythonSandbox(workers=1)
  code = f"nest = ['x']\nfor i in range(12): nest = [nest, nest]\nprint(search('good'))\nsearch({query})"
  printed = RunPython(None, code).run(Tools(search=asked, python=sandbox))
  sandbox.close()
  assert 'ValueError' in printed and asked == ['good']
