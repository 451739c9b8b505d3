"""Names of packages are there, and parts that can do without heavy packages do not import them."""

import subprocess
import sys

import pytest

from jaxsearch import models


def test_every_name_of_the_models_is_there():
  assert all(getattr(models, name) is not None for name in models.__all__)


MODEL = 'from jaxsearch import models; from jaxsearch.world.files import folder; '


@pytest.mark.parametrize(('code', 'without'), [
  ('import jaxsearch.data.questions', 'grain jax numpy'),
  ('from jaxsearch.cli import main; main(["--help"])', 'jax numpy'),
  ('from jaxsearch.models import Tokenizer', 'jax transformers'),
  (MODEL + 'models.Tokenizer.load(folder()).encode("a")', 'torch'),
  (MODEL + 'sys.modules["torch"] = None; models.load(folder())', ''),  # as if it were not installed
  # A library of functions; most have the name of their module.
  ('import jaxsearch.advantages.gae; assert callable(jaxsearch.advantages.gae)', 'flax transformers optax torch orbax'),
  ('import jaxsearch.losses, jaxsearch.rewards.match, jaxsearch.evaluation.calibration, jaxsearch.advantages as a; '
   'assert all(callable(getattr(a, name)) for name in a.__all__)',
   'flax transformers optax torch orbax jaxsearch.trees jaxsearch.models')])
def test_it_does_not_import(code, without):
  done = subprocess.run([sys.executable, '-c', f'import sys; {code}; print(*sys.modules)'], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert set(without.split()).isdisjoint(done.stdout.splitlines()[-1].split())
