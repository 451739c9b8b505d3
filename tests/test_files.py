import os
import pathlib

import pytest

from jaxsearch.files import write_whole
from jaxsearch.training import rollout_file, row_files


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / 'new' / 'file.json'
  write_whole(path, 'old')
  (tmp_path / 'link').symlink_to(path)
  with pytest.raises(UnicodeEncodeError):
    write_whole(tmp_path / 'link', 'x' * 10**6 + chr(0xd800))
  assert path.read_text() == 'old' and [file.name for file in path.parent.iterdir()] == ['file.json']
  write_whole(tmp_path / 'link', 'né')
  assert path.read_text(encoding='utf-8') == 'né' and (tmp_path / 'link').is_symlink()
  in_dev = tmp_path / 'dev' / 'file.json'
  write_whole(in_dev, 'old')
  os.link(in_dev, before := tmp_path / 'before')
  monkeypatch.chdir(tmp_path.parent)
  write_whole(in_dev.relative_to(tmp_path.parent), 'new')
  assert (in_dev.read_text(), before.read_text()) == ('new', 'old')  # it was replaced, not written into
  write_whole('/dev/null', 'gone')
  assert pathlib.Path('/dev/null').is_char_device()


def test_links_beside_a_file_are_not_followed(tmp_path):
  victim = tmp_path / 'victim'
  victim.write_text('precious')
  for name in ('result.json.part', 'metrics.jsonl', rollout_file.FILE):
    (tmp_path / name).symlink_to(victim)
  write_whole(tmp_path / 'result.json', 'new')
  assert (tmp_path / 'result.json').read_text() == 'new'
  assert not os.path.lexists(tmp_path / 'result.json.part')
  for attack in (lambda: row_files.append(tmp_path / 'metrics.jsonl', [{}]),
                 lambda: rollout_file.append(tmp_path, 1, []),
                 lambda: rollout_file.keep_steps(tmp_path, 0)):
    with pytest.raises(OSError, match='link'):
      attack()
  assert victim.read_text() == 'precious'
