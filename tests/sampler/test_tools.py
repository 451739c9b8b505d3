"""Documents are cut to the room there is."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxsearch.data.corpus import Document
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.requests import RunPython, Search, ToolFailure, Tools, shorten
from jaxsearch.tools.python_sandbox import PythonSandbox
from jaxsearch.tools.run_python import MAX_FOUND
from jaxsearch.trees import grammar
from jaxsearch.world import files as world

WORLD = Tokenizer.load(world.folder())


class Bytes:
  special_tokens, longest_token = ('<|end|>',), 1
  encode = staticmethod(lambda text: list(text.encode()))
  starts = staticmethod(lambda text: list(range(len(text))))


DOCUMENTS = [Document(str(i), f'T{i}', chr(97 + i) * size) for i, size in enumerate((50, 10, 200))]


def show(documents):
  return ''.join(f'--------{document.title}{document.text}' for document in documents)


def test_what_fits_stays():
  assert shorten(DOCUMENTS, 290, show, Bytes()) == DOCUMENTS


def test_texts_are_cut_at_one_length_the_largest_that_fits():
  cut = shorten(DOCUMENTS, 129, show, Bytes())
  assert [len(document.text) for document in cut] == [44, 10, 44]     # 45 each would make 130
  assert [document.title for document in cut] == ['T0', 'T1', 'T2']


def test_documents_are_left_out_where_not_even_titles_fit():
  assert [document.text for document in shorten(DOCUMENTS, 25, show, Bytes())] == ['aa', 'bb']
  assert shorten(DOCUMENTS, 9, show, Bytes()) == []





def observation(request, result, room, tokenizer, tools=None):
  return request.read(result, tools or Tools(answer_reserve=0, max_observation=10**6), room, tokenizer)


def test_the_output_of_a_program_is_cut_to_the_room():
  request = RunPython(None, 'print(1)')
  whole = observation(request, 'a' * 100, 1000, Bytes())
  assert whole == 'a' * 100
  room = len(grammar.output('a' * 40, ()))
  assert observation(request, 'a' * 100, room, Bytes()) == 'a' * 40
  assert observation(request, 'a' * 100, 3, Bytes()) == ''  # not even the tags fit


def test_a_search_shows_the_first_words_of_a_passage():
  found = [[Document('1', 'One two', 'a b  c\nd'), Document('2', 'Three', 'e')]]
  tools = Tools(answer_reserve=0, max_observation=10**6)
  for words, texts in ((0, ['a b  c\nd', 'e']), (3, ['a b  c', 'e']), (1, ['a', 'e'])):
    shown = observation(Search(None, ''), found, 1000, Bytes(), dataclasses.replace(tools, words=words))
    assert [(document.title, document.text) for document in shown] == [('One two', texts[0]), ('Three', texts[1])]


def test_what_is_no_reply_is_a_failure():
  assert observation(RunPython(None, ''), 3, 100, Bytes()) == ToolFailure('malformed reply of the sandbox', 'malformed')
  assert observation(Search(None, ''), 'text', 100, Bytes()) == ToolFailure('malformed reply of the search back end', 'malformed')


def test_an_observation_leaves_room_for_an_answer_and_has_a_limit():
  request, size = RunPython(None, 'print(1)'), len(grammar.output('', ()))
  for tools, room in ((Tools(answer_reserve=30), 100), (Tools(max_observation=70), 1000)):
    assert len(observation(request, 'a' * 200, room, Bytes(), tools)) == 70 - size


# What a shortened observation holds, and what it costs.

PIECES = ('Oviedo ', 'is ', 'a city', ' ', '<information>', '</', '\n', 'é', '日本', '😀', '0', '...', 'x' * 9)
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
  assert len(shown) == max([n for n in range(len(documents) + 1) if not n or tokens(cut(documents[:n], 0)) <= budget])
  assert shown == documents[:len(shown)] or tokens(cut(documents[:len(shown)], size + 1)) > budget


class Counting:
  """The world's tokenizer; counts the texts and characters that it gets."""
  special_tokens, longest_token = WORLD.special_tokens, WORLD.longest_token

  def __init__(self):
    self.sizes = []

  def encode(self, text):
    self.sizes.append(len(text))
    return WORLD.encode(text)

  def starts(self, text):
    self.sizes.append(len(text))
    return WORLD.starts(text)


def test_megabytes_cost_no_more_than_what_is_shown_of_them():
  text, tools = 'Oviedo lies on the Nalon, 232 m above the sea; ' * 20_000, Tools(max_observation=512, answer_reserve=0)
  documents, most = [Document(str(i), f'Title {i}', f'{i}{text}') for i in range(10)], 512 * WORLD.longest_token
  for result in ([documents], text * 10):
    counting = Counting()
    request = Search(None, '') if isinstance(result, list) else RunPython(None, '')
    shown = observation(request, result, 4096, counting, tools)
    text = written(shown) if isinstance(result, list) else grammar.output(shown, ())
    assert 500 < len(WORLD.encode(text)) <= 512
    assert sum(counting.sizes) < most + 12 * len(text) and sum(size > 2 * len(text) for size in counting.sizes) == 1


def test_titles_of_megabytes_are_left_out_before_they_are_tokenised():
  documents = [Document('', 'Oviedo', 'a city'), Document('', 'x' * 10**6, 'a title'), Document('', 'Gijón', 'a port')]
  counting = Counting()
  assert observation(Search(None, ''), [documents], 4096, counting, Tools()) == documents[:1] and sum(counting.sizes) < 100
  assert observation(Search(None, ''), [documents[1:]], 4096, counting, Tools()) == []


def test_a_program_gets_no_megabytes_from_a_search():
  class Huge:
    def search(self, queries, topk=3):
      return [[Document('', 'T', 'x' * 10**7)] * topk]

  class Program:
    def run(self, code, functions):
      return str(len(functions['search']('q')))

  assert RunPython(None, '').run(Tools(search=Huge(), python=Program()), []) == str(MAX_FOUND)


class Asked(list):
  """A back end that remembers its queries."""

  def search(self, queries, topk=3):
    self += queries
    return [[]]


@pytest.mark.parametrize('query', ['["x"]', 'nest', '"x" * 1001', '7'])
def test_a_query_of_a_program_is_a_short_text(query):
  """A list that holds a list twice, 28 times over, is small in the sandbox and gigabytes as text; 12 times are enough here."""
  asked, sandbox = Asked(), PythonSandbox(workers=1)
  code = f"nest = ['x']\nfor i in range(12): nest = [nest, nest]\nprint(search('good'))\nsearch({query})"
  printed = RunPython(None, code).run(Tools(search=asked, python=sandbox), [])
  sandbox.close()
  assert 'ValueError' in printed and asked == ['good']
