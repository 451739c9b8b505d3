"""What an installed wheel holds, and that it works far from the repository."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow  # pip fetches the build backend
def test_an_installed_wheel_finds_the_shipped_configs(tmp_path):
  subprocess.run([sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', tmp_path, ROOT], check=True)
  with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel:
    wheel.extractall(tmp_path / 'site')
  shipped = {path.relative_to(ROOT / 'configs') for path in (ROOT / 'configs').rglob('*.py')}
  assert {path.relative_to(tmp_path / 'site/jaxsearch/configs')
          for path in (tmp_path / 'site/jaxsearch/configs').rglob('*.py')} == shipped
  assert {path.name for path in (tmp_path / 'site').iterdir()} == {'jaxsearch', 'jaxsearch-0.1.0.dist-info'}
  (tmp_path / 'own.py').write_text('from configs import base\nget_config = base.get_config\n')
  for name in ('quickstart', 'configs/quickstart.py', 'smollm2:search_r1_grpo', 'own.py'):
    done = subprocess.run([sys.executable, '-m', 'jaxsearch.cli', 'train', '--config', name, '--config.steps=-3'], text=True,
                          capture_output=True, cwd=tmp_path, env={'PYTHONPATH': str(tmp_path / 'site')})
    assert (done.returncode, done.stderr) == (2, 'jaxsearch: steps=-3 must be >= 1\n')
