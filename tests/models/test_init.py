import subprocess
import sys

import pytest

from jaxsearch import models


def test_every_name_is_there():
  assert all(getattr(models, name) is not None for name in models.__all__)


def test_unknown_name():
  with pytest.raises(AttributeError, match="no attribute 'lod'"):
    _ = models.lod


def test_a_tokenizer_needs_no_jax():
  code = 'import sys; from jaxsearch.models import Tokenizer; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
