"""The folder on this machine of a run in a bucket; runs in buckets are in test_bucket.py."""

import os
import pathlib

import pytest

from jaxsearch.training import remote


def test_each_run_has_a_folder_that_only_its_user_can_enter(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  (tmp_path / 'jaxsearch').mkdir(mode=0o777)
  folders = [remote.local(out) for out in ('gs://bucket-run', 'gs://bucket/run')]
  assert folders[0] != folders[1] and remote.local('gs://bucket/run') == folders[1]
  assert {path.stat().st_mode & 0o777 for path in (*folders, tmp_path / 'jaxsearch')} == {0o700}
  assert remote.local('runs/mine') == pathlib.Path('runs/mine')


@pytest.mark.parametrize('planted', ['jaxsearch', 'run'])
def test_a_folder_that_somebody_else_made_is_not_used(planted, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  own, victim = remote.local('gs://bucket/run'), tmp_path / 'victim'
  link = own if planted == 'run' else own.parent
  link.rename(victim)
  (victim / 'precious').touch()
  link.symlink_to(victim)
  with pytest.raises(ValueError, match=f'{link}: a link'):
    remote.fetch('gs://bucket/run')
  link.unlink()
  victim.rename(link)
  monkeypatch.setattr(os, 'getuid', lambda: link.stat().st_uid + 1)
  with pytest.raises(ValueError, match='another user'):
    remote.fetch('gs://bucket/run')
  assert (link / 'precious').exists()
