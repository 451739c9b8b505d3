"""Documents are cut to the room there is."""

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import RunPython, Search, ToolFailure, Tools, shorten
from jaxsearch.trees import grammar


class Bytes:
  special_tokens, longest_token = ('<|end|>',), 1
  encode = staticmethod(lambda text: list(text.encode()))
  starts = staticmethod(lambda text: list(range(len(text))))


DOCUMENTS = [Document(str(i), f'T{i}', chr(97 + i) * size) for i, size in enumerate((50, 10, 200))]


def measure(documents):
  return sum(10 + len(document.text) for document in documents)


def test_what_fits_stays():
  assert shorten(DOCUMENTS, 290, measure, Bytes()) == DOCUMENTS


def test_texts_are_cut_at_one_length_the_largest_that_fits():
  cut = shorten(DOCUMENTS, 129, measure, Bytes())
  assert [len(document.text) for document in cut] == [44, 10, 44]     # 45 each would make 130
  assert [document.title for document in cut] == ['T0', 'T1', 'T2']


def test_documents_are_left_out_where_not_even_titles_fit():
  assert [document.text for document in shorten(DOCUMENTS, 25, measure, Bytes())] == ['aa', 'bb']
  assert shorten(DOCUMENTS, 9, measure, Bytes()) == []



observation = Tools(answer_reserve=0, max_observation=10**6).observation


def test_the_output_of_a_program_is_cut_to_the_room():
  request = RunPython(None, 'print(1)')
  whole = observation(request, 'a' * 100, 1000, Bytes())
  assert whole == 'a' * 100
  room = len(grammar.output('a' * 40, ()))
  assert observation(request, 'a' * 100, room, Bytes()) == 'a' * 40
  assert observation(request, 'a' * 100, 3, Bytes()) == ''  # not even the tags fit


def test_what_is_no_reply_is_a_failure():
  assert observation(RunPython(None, ''), 3, 100, Bytes()) == ToolFailure('malformed reply of the sandbox', 'malformed')
  assert observation(Search(None, ''), 'text', 100, Bytes()) == ToolFailure('malformed reply of the search back end', 'malformed')
  assert observation(Search(None, ''), ToolFailure('down'), 100, Bytes()) == ToolFailure('down')


def test_an_observation_leaves_room_for_an_answer_and_has_a_limit():
  request, size = RunPython(None, 'print(1)'), len(grammar.output('', ()))
  for tools, room in ((Tools(answer_reserve=30), 100), (Tools(max_observation=70), 1000)):
    assert len(tools.observation(request, 'a' * 200, room, Bytes())) == 70 - size
