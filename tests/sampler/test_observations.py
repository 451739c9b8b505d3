"""Documents are cut to the room there is."""

from jaxsearch.sampler.observations import shorten
from jaxsearch.tools.documents import Document

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
