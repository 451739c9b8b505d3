"""What a wheel holds and needs, that it works where there is no repository, and what other machines fetch."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

import jaxsearch

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
  """An environment with the wheel and this one's packages: its site-packages, and its Python in an empty
  folder."""
  folder, empty = tmp_path_factory.mktemp('wheel'), tmp_path_factory.mktemp('empty')

  def run(*words, cwd=empty, check=False):
    environment = {**os.environ, 'PYTHONPATH': '', 'JAX_PLATFORMS': 'cpu'}
    return subprocess.run(list(map(str, words)), cwd=cwd, check=check, text=True, capture_output=True,
                          env=environment)

  run(sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', folder, cwd=ROOT, check=True)
  run(sys.executable, '-m', 'venv', '--without-pip', folder / 'own', check=True)
  run(sys.executable, '-m', 'pip', '--python', folder / 'own', 'install', '-q', '--no-deps', '--no-index',
      '--no-compile', *folder.glob('*.whl'), check=True)
  site = next((folder / 'own').glob('lib/python*/site-packages'))
  # Of a folder that a .pth file names no .pth file is read: not the one of an editable install either.
  (site / 'others.pth').write_text(sysconfig.get_path('purelib'))
  return site, functools.partial(run, folder / 'own/bin/python')


def configs_of(folder):
  return {path.relative_to(folder) for path in folder.rglob('*.py')}


def test_a_wheel_holds_the_package_and_the_configs(installed):
  site, _ = installed
  assert {path.name for path in site.iterdir()} == {
    'jaxsearch', f'jaxsearch-{jaxsearch.__version__}.dist-info', 'others.pth'}
  assert configs_of(site / 'jaxsearch/configs') == configs_of(ROOT / 'configs')


def test_every_command_of_an_installed_wheel_says_its_help(installed):
  site, python = installed
  code = '''if 1:
    from jaxsearch import cli
    print(cli.__file__)
    assert [cli.main([name, '--help']) for name in cli.COMMANDS] == [0] * len(cli.COMMANDS)
  '''
  done = python('-c', code)
  assert (done.returncode, done.stderr) == (0, '') and done.stdout.startswith(f'{site}/jaxsearch/cli.py\n')
  help = python(site.parents[2] / 'bin/jaxsearch', '--help').stdout
  named = [line.split()[0] for line in help.splitlines() if line.startswith('  ')]
  assert {'train', 'eval', 'plan'} < set(named)
  assert all(f'usage: jaxsearch {name} ' in done.stdout for name in named)


def test_an_installed_wheel_finds_the_shipped_configs(installed, tmp_path):
  _, python = installed
  (tmp_path / 'own.py').write_text('from configs import base\nget_config = base.get_config\n')
  code = '''if 1:
    import sys
    from jaxsearch import cli
    print(*[cli.main(['train', '--config', name, '--config.steps=-3']) for name in sys.argv[1:]])
  '''
  names = 'quickstart', 'configs/quickstart.py', 'smollm2:search_r1_grpo', tmp_path / 'own.py'
  done = python('-c', code, *names)
  assert (done.stdout, done.stderr) == ('2 2 2 2\n', 'jaxsearch: steps=-3 must be >= 1\n' * 4)


@pytest.mark.parametrize('python', ['3.11', '3.12', '3.13'])
def test_what_is_needed_has_an_upper_bound_and_what_is_pinned_lies_below(python):
  pinned = {}
  for line in (ROOT / 'launch/constraints.txt').read_text().splitlines():
    one = Requirement(line)
    if not one.marker or one.marker.evaluate({'python_version': python}):
      assert pinned.setdefault(plain(one.name), one) is one  # one version for each Python
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  for text in project['dependencies']:
    needed = Requirement(text)
    if needed.marker and not needed.marker.evaluate({'python_version': python}):
      continue
    version, = pinned[plain(needed.name)].specifier
    assert needed.specifier.contains(version.version) and not needed.specifier.contains('9999'), text


def plain(name):
  return re.sub('[-_.]+', '-', name).lower()


def test_what_the_workflow_and_the_image_are_made_of_is_pinned_by_hash():
  workflow = yaml.safe_load((ROOT / '.github/workflows/test.yml').read_text())
  used = [step['uses'] for step in workflow['jobs']['test']['steps'] if 'uses' in step]
  assert used and all(re.fullmatch(r'[\w/-]+@[0-9a-f]{40}', one) for one in used)
  assert workflow['permissions'] == {'contents': 'read'}
  image = [line.split() for line in (ROOT / 'launch/Dockerfile').read_text().splitlines()]
  assert re.fullmatch(r'python:3[\w.-]+@sha256:[0-9a-f]{64}',
                      *[words[1] for words in image if words[:1] == ['FROM']])
  assert [words[1] for words in image if words[:1] == ['USER']][-1:] == ['jaxsearch']
