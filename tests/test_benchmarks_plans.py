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
  program = {'memory': {'resident': 12 * plans.GIB, 'total': 30 * plans.GIB}, 'each': cost}
  return {'date': '2026-01-02', 'jax': '0.1', 'load': {'temporary': plans.GIB, 'total': 13 * plans.GIB},
          'resident': {'parameters': 3 * plans.GIB, 'moments': 2 * plans.GIB, 'weights': plans.GIB, 'cache': 6 * plans.GIB},
          'programs': dict.fromkeys(('update', 'score', 'prefill', 'decode'), program), 'share': 0.42, 'fits': fits,
          'phases': {'rollout': 5.0, 'score': 1.0, 'update': 7.0}, 'step_seconds': 13.0, 'advice': 'sampler.slots=8',
          'decode_traffic': 1.07}


def test_the_pages_say_what_fits_and_what_is_missing(tmp_path, monkeypatch):
  monkeypatch.setattr(plans, 'PLANS', tmp_path / 'plans.jsonl')
  assert plans.read() == {}
  made = [{'name': 'search_r1_grpo_qwen2_5_3b@cuda:h100:2x8'} | fake(True), {'name': 'scaling_7b@tpu:v5p:4x4x4'} | fake(False),
          {'name': 'scaling_32b@tpu:v6e:2x4'} | fake(False) | {'step_seconds': None}]
  plans.PLANS.write_text(''.join(json.dumps(line) + '\n' for line in made))
  page = plans.plans_page(plans.read())
  assert 'Made 2026-01-02 with JAX 0.1.' in page
  assert '| `search_r1_grpo_qwen2_5_3b` | 5.0 | 7.0 | 18.0 |  | 42% |' in page
  assert '| 42% | 5 | 1 | 7 | update: memory |' in page and 'moves 1.07 to 1.07 times' in page
  assert f'Not planned yet: {2 * len(plans.CONFIGS) - 1} of {2 * len(plans.CONFIGS)}' in page
  assert 'Nothing was run' in ' '.join(page.split())
  assert '| `tpu:v5p` | 95.7 | 2765 | 459 | 600 |  | https://cloud.google.com/tpu/docs/v5p |' in page
  scaling = plans.scaling_page(plans.read())
  assert '| 7B, 64 x tpu:v5p | 256 | 42% | 13 | does not fit: sampler.slots=8 |' in scaling
  assert '| 32B, 8 x tpu:v6e | 8 | too much |  | does not fit: sampler.slots=8 |' in scaling


def test_a_line_has_what_the_pages_need():
  plan = fake(True) | {'collectives': [1] * 100}
  line = plans.short(plan)
  assert 'collectives' not in line and line['programs']['score'] == plan['programs']['score']
  assert plans.plans_page({'x': plan}) == plans.plans_page({'x': line | {'date': '2026-01-02', 'jax': '0.1'}})


def test_no_program_needs_more_room_than_the_update_or_the_critic():
  for plan in plans.read().values():
    memory = {name: program['memory'] for name, program in plan['programs'].items()}
    added = {name: sizes['total'] - sizes['resident'] for name, sizes in memory.items()}
    if not plan['name'].startswith('scaling'):
      added['load'] = plan['load']['temporary']
    assert max(added, key=added.get) in ('update', 'critic'), plan['name']


def test_the_pages_in_docs_are_made_by_the_script():
  for page, make in (('plans', plans.plans_page), ('scaling', plans.scaling_page)):
    assert (CONFIGS.parent / 'docs' / f'{page}.md').read_text() == make(plans.read())
