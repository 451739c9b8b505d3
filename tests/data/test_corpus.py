import gzip
import json

import pytest

from jaxsearch.data.corpus import Document, join_contents, read_corpus, split_contents
from jaxsearch.data.jsonl import DataError


@pytest.mark.parametrize(('contents', 'title', 'text'), [
    ('"Paris"\nA city.\nIn France.', 'Paris', 'A city.\nIn France.'),
    ('"\'99–\'00 Demos"\nAn album.', "'99–'00 Demos", 'An album.'),
    ('""Heroes" (song)"\nBy Bowie.', '"Heroes" (song)', 'By Bowie.'),
    ('Paris\nA city.', 'Paris', 'A city.'),
    ('"Paris"', 'Paris', ''),
    ('"', '"', ''),
    ('"Paris"\r\nA city.\r\n', 'Paris', 'A city.')])
def test_title_and_text(contents, title, text):
  assert split_contents(contents) == (title, text)
  assert split_contents(join_contents(title, text)) == (title, text)


@pytest.mark.parametrize('packed', [False, True])
def test_reads_in_file_order(tmp_path, packed):
  lines = [{'id': '5', 'contents': '"B"\nb'}, {'id': 3, 'contents': 'Ångström\nunit', 'extra': 1}]
  data = '\n'.join(map(json.dumps, lines)).encode()
  path = tmp_path / ('c.jsonl.gz' if packed else 'c.jsonl')
  path.write_bytes(gzip.compress(data) if packed else data)
  assert read_corpus(path) == [Document('5', 'B', 'b'), Document('3', 'Ångström', 'unit')]


def test_rows_of_tevatron_have_a_title_of_their_own_or_none(tmp_path):
  path = tmp_path / 'c.jsonl'
  path.write_text('{"docid": 7, "title": "B", "text": "b"}\n{"docid": "8", "text": "c", "url": "u"}')
  assert read_corpus(path) == [Document('7', 'B', 'b'), Document('8', '', 'c')]


@pytest.mark.parametrize(('line', 'reason'), [
    ({'contents': 'x'}, "no key 'id'"), ({'id': '2'}, "no key 'contents'"),
    ({'id': '2', 'contents': 7}, "'contents'"), ({'id': '2', 'contents': ' \n'}, "'contents'"),
    ({'id': True, 'contents': 'x'}, "'id'"),
    ({'id': '1', 'contents': 'x'}, "id '1' was already used at .*c.jsonl:1")])
def test_faults_name_file_line_and_key(tmp_path, line, reason):
  path = tmp_path / 'c.jsonl'
  path.write_text(json.dumps({'id': '1', 'contents': 'x'}) + '\n' + json.dumps(line))
  with pytest.raises(DataError, match=reason) as error:
    read_corpus(path)
  assert f'{path}:2: ' in str(error.value)
