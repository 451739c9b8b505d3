import gzip
import tracemalloc

import pytest

from jaxsearch.data.jsonl import LINE, DataError, read_array, read_records


def test_places_count_blank_lines_and_skip_a_byte_order_mark(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": "x\\u2028y"}\r\n{"a": "\xe2\x80\xa8"}')
  assert list(read_records(path)) == [
      (f'{path}:1', {'a': 1}), (f'{path}:4', {'a': 'x\u2028y'}), (f'{path}:5', {'a': '\u2028'})]


@pytest.mark.parametrize(('line', 'reason'), [
    (b'{"a": 1', 'bad JSON'), (b'[1]', 'expected a JSON object'), (b'"\xff"', 'not UTF-8'),
    (b'"x\xed\xa0\xbd"', 'not UTF-8'),  # half a surrogate pair, written out
    (b'[' * 100_000, 'bad JSON'), (b'{"a": "\\ud83d"}', 'surrogate'), (b'{"a": "\\uDe00"}', 'surrogate'),
    (b'{"a": ' + b'1' * 5000 + b'}', 'bad JSON')])
def test_bad_lines_are_named(tmp_path, line, reason):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"a": "\\ud83d\\ude00"}\n' + line + b'\n')
  with pytest.raises(DataError, match=reason) as error:
    list(read_records(path))
  assert str(error.value).startswith(f'{path}:2: ')


def test_gzip_cut_short_or_not_gzip_at_all(tmp_path):
  whole = gzip.compress(b'{"a": 1}\n' * 5000)
  path = tmp_path / 'a.jsonl.gz'
  path.write_bytes(whole)
  assert len(list(read_records(path))) == 5000
  for broken in (whole[:-20], b'{"a": 1}\n', whole[:12] + b'\xff' * 20):
    path.write_bytes(broken)
    with pytest.raises(DataError, match=r'a\.jsonl\.gz: not a whole gzip file'):
      list(read_records(path))


def test_an_array_takes_no_more_memory_than_it_needs_and_may_come_as_lines(tmp_path):
  array, lines = tmp_path / 'a.json', tmp_path / 'a.jsonl'
  array.write_bytes(b'\xef\xbb\xbf [{"a": 1}]' + b' ' * LINE)
  lines.write_bytes(b'{"a": 1}\n')
  tracemalloc.start()
  assert [record for path in (array, lines) for _, record in read_array(path)] == [{'a': 1}] * 2
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 5 * LINE  # BufferedReader takes what `read` is asked for, here 200 times the file


def test_a_small_file_cannot_fill_the_memory(tmp_path):
  bomb, long = tmp_path / 'bomb.json.gz', tmp_path / 'long.jsonl'
  bomb.write_bytes(gzip.compress(b'[{"a": "' + b'x' * 10 * LINE + b'"}]'))
  long.write_bytes(b'{}\n' + b'x' * (LINE + 1))
  tracemalloc.start()
  for path, read, reason in ((bomb, read_records, r'bomb\.json\.gz:1: a line of more than 16 MiB'),
                             (bomb, read_array, r'bomb\.json\.gz: unpacks to more than 200 times its size'),
                             (long, read_records, r'long\.jsonl:2: a line of more than 16 MiB')):
    with pytest.raises(DataError, match=reason):
      list(read(path))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert bomb.stat().st_size < LINE / 50 and peak < 6 * LINE
