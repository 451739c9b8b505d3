"""A run folder in a bucket: `config.out` may be 'gs://BUCKET/RUN', with the extra `gs`.

Orbax writes the checkpoints into the bucket. All other files of a run are small, and are appended to, which
an object cannot be: they are written to a folder of the user's on this machine (`local`), and copied to the
bucket before every checkpoint and when the run ends. A run that starts takes them from there.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Sequence

from etils import epath

from jaxsearch.files import write_whole

PACKAGES = {'gs': 'gcsfs'}  # that etils.epath needs
FOLDERS = ('', 'tensorboard')  # whose files are copied
FILES = tuple(os.path.join(folder, '*') for folder in FOLDERS)
STAYS = ('lock', 'locked_by')  # mean something on this machine alone


def is_remote(out: str | os.PathLike) -> bool:
  """Tells whether a path is a URL."""
  return '://' in str(out)


def place(path: str | os.PathLike) -> epath.Path:
  """Returns a URL as it is, any other path absolute."""
  path = epath.Path(path)
  return path if is_remote(path) else path.absolute()


def local(out: str | os.PathLike) -> pathlib.Path:
  """Returns where this machine writes the small files of a run: `out`, or for a URL a folder of this user."""
  if not is_remote(out):
    return pathlib.Path(out)
  cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'jaxsearch'
  folder = cache / hashlib.sha256(str(out).encode()).hexdigest()[:32]
  folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  return folder


def fetch(out: str) -> None:
  """Makes the local files those that the bucket has; nothing to do without one."""
  if not is_remote(out):
    return
  for path in local(out).iterdir():
    if path.name not in STAYS:
      shutil.rmtree(path) if path.is_dir() else path.unlink()
  for folder in FOLDERS:
    for path in epath.Path(out, folder).glob('*'):
      if not path.is_dir():
        write_whole(local(out) / folder / path.name, path.read_bytes())


def publish(out: str, since: float = 0.0, files: Sequence[str] = FILES) -> None:
  """Copies the local `files` written at or after `since` (seconds since 1970) to the bucket, if any."""
  for path in (path for pattern in files if is_remote(out) for path in sorted(local(out).glob(pattern))):
    if path.is_file() and path.name not in STAYS and path.stat().st_mtime >= since:
      target = epath.Path(out, *path.relative_to(local(out)).parts)
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_bytes(path.read_bytes())
