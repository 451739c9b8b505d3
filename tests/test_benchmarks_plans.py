"""The pages of plans: every pod config is in them, and what they say of a plan."""

import json
import pathlib

from benchmarks import plans
from jaxsearch.config_check import check
from jaxsearch.flags import parse
from jaxsearch.parallel import targets

CONFIGS = pathlib.Path(__file__).parent.parent / 'configs'


def test_every_pod_config_is_planned_for_a_tpu_and_a_gpu():
  files = {path.stem for name in ('*qwen2_5*', '*llama3*') for path in CONFIGS.glob(f'{name}.py')}
  assert {config.split(':')[0] for config in plans.CONFIGS} == files
  assert {target.split(':')[0] for target in plans.TARGETS} == {'tpu', 'cuda'}
  for name, arguments in plans.jobs().items():
    config = parse('plan', [one for one in arguments if one not in ('--target', arguments[3])], '').config
    check(config)
    target = targets.parse(arguments[3])
    if name.startswith('scaling'):
      devices = 1
      for size in target.shape:
        devices *= size
      assert config.train.micro_rows == devices and devices in plans.SLICES


def fake(fits):
  cost = {'arithmetic': 0.1, 'memory': 0.3, 'network': 0.2}
  program = {'memory': {'total': 30 * plans.GIB}, 'each': cost}
  return {'resident': {'parameters': 4 * plans.GIB, 'moments': 2 * plans.GIB, 'cache': 6 * plans.GIB}, 'load': plans.GIB,
          'programs': dict.fromkeys(('update', 'score', 'prefill', 'decode'), program), 'share': 0.42, 'fits': fits,
          'phases': {'rollout': 5.0, 'score': 1.0, 'update': 7.0}, 'step_seconds': 13.0, 'advice': 'sampler.slots=8',
          'decode_traffic': 1.07}


def test_the_pages_say_what_fits_and_what_is_missing(tmp_path):
  for name, fits in (('search_r1_grpo_qwen2_5_3b@cuda_h100_2x8', True), ('scaling_7b@tpu_v5p_4x4x4', False)):
    (tmp_path / f'{name}.json').write_text(json.dumps(fake(fits)))
  page = plans.plans_page(tmp_path)
  assert '| `search_r1_grpo_qwen2_5_3b` | 4.0 | 2.0 | 6.0 | 18.0 |  | 18.0 |  | 18.0 | 18.0 | 1.0 | 42% | 5 | 1 | 7 |' in page
  assert '| update: memory | 1.07 |' in page
  assert f'Not planned yet: {2 * len(plans.CONFIGS) - 1} of {2 * len(plans.CONFIGS)}' in page and 'Nothing was run' in page
  assert '| `tpu:v5p` | 95.7 | 2765 | 459 | 600 |  | https://cloud.google.com/tpu/docs/v5p |' in page
  assert '| 7B, 64 x tpu:v5p | 42% | 5 | 1 | 7 | 13 | does not fit: sampler.slots=8 |' in plans.scaling_page(tmp_path)


def test_the_page_in_docs_is_made_by_the_script():
  text = (CONFIGS.parent / 'docs' / 'plans.md').read_text()
  assert 'python benchmarks/plans.py' in text and 'othing was run' in text
