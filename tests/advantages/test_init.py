"""The package is a library of functions that imports nothing heavy, whatever is imported first."""

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys
{first}
import jaxsearch.advantages
from jaxsearch.advantages import gae, group_relative, smdp_td, truncated_step, depth_greedy
functions = [callable(getattr(jaxsearch.advantages, name)) for name in jaxsearch.advantages.__all__]
same = jaxsearch.advantages.gae is gae
print(json.dumps(dict(functions=all(functions) and callable(gae), same=same, loaded=sorted(sys.modules))))
"""


@pytest.mark.parametrize('first', [
    '', 'import jaxsearch.advantages.gae; from jaxsearch.advantages.gae import whiten',
    'import jaxsearch.losses, jaxsearch.rewards.match, jaxsearch.evaluation.calibration'])
def test_names_are_functions_and_nothing_heavy_is_imported(first):
  command = [sys.executable, '-c', PROBE.format(first=first)]
  probe = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
  assert probe['functions'] and probe['same']
  loaded = {name.split('.')[0] for name in probe['loaded']}
  assert not loaded & {'flax', 'transformers', 'optax', 'torch', 'orbax'}
  project = {name for name in probe['loaded'] if name.startswith('jaxsearch.')}
  alone = {'jaxsearch.losses', 'jaxsearch.rewards', 'jaxsearch.rewards.match', 'jaxsearch.evaluation',
           'jaxsearch.evaluation.calibration'}
  assert all(name in alone or name.startswith('jaxsearch.advantages') for name in project)
