import pathlib
import subprocess
import sys

import pytest

from jaxsearch import models


def test_every_name_is_there():
  assert all(getattr(models, name) is not None for name in models.__all__)


def test_a_tokenizer_needs_no_jax():
  code = 'import sys; from jaxsearch.models import Tokenizer; sys.exit(not {"jax", "transformers"}.isdisjoint(sys.modules))'
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


FOLDER = pathlib.Path(models.__file__).parents[1] / 'world/shipped'


@pytest.mark.parametrize('code', [
  'models.Tokenizer.load(folder).encode("a"); assert "torch" not in sys.modules',
  'sys.modules["torch"] = None; assert models.load(folder).config.num_layers == 4',  # as if it were not installed
])
def test_pytorch_is_not_needed(code):
  """transformers is a requirement, PyTorch is not."""
  start = f'import sys; from jaxsearch import models; folder = {str(FOLDER)!r}; '
  done = subprocess.run([sys.executable, '-c', start + code], check=False, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
