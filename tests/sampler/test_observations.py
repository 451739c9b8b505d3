"""Documents are cut to the room there is."""

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.observations import fitted, shorten
from jaxsearch.sampler.requests import RunPython, Search, ToolFailure
from jaxsearch.trees import grammar

DOCUMENTS = [Document(str(i), f'T{i}', chr(97 + i) * size) for i, size in enumerate((50, 10, 200))]


def measure(documents):
  return sum(10 + len(document.text) for document in documents)


def test_what_fits_stays():
  assert shorten(DOCUMENTS, 290, measure) == DOCUMENTS


def test_texts_are_cut_at_one_length_the_largest_that_fits():
  cut = shorten(DOCUMENTS, 129, measure)
  assert [len(document.text) for document in cut] == [44, 10, 44]     # 45 each would make 130
  assert [document.title for document in cut] == ['T0', 'T1', 'T2']


def test_documents_are_left_out_where_not_even_titles_fit():
  assert [document.text for document in shorten(DOCUMENTS, 25, measure)] == ['aa', 'bb']
  assert shorten(DOCUMENTS, 9, measure) == []


class Bytes:
  special_tokens = ('<|end|>',)
  encode = staticmethod(lambda text: list(text.encode()))


def test_the_output_of_a_program_is_cut_to_the_room():
  request = RunPython(None, 'print(1)')
  whole = fitted(request, 'a' * 100, 1000, Bytes())
  assert whole == 'a' * 100
  room = len(grammar.output('a' * 40, ()))
  assert fitted(request, 'a' * 100, room, Bytes()) == 'a' * 40
  assert fitted(request, 'a' * 100, 3, Bytes()) == ''  # not even the tags fit


def test_what_is_no_reply_is_a_failure():
  assert fitted(RunPython(None, ''), 3, 100, Bytes()) == ToolFailure('malformed reply of the sandbox')
  assert fitted(Search(None, ''), 'text', 100, Bytes()) == ToolFailure('malformed reply of the search back end')
  assert fitted(Search(None, ''), ToolFailure('down'), 100, Bytes()) == ToolFailure('down')
