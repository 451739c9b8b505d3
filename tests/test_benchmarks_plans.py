"""The pages of plans: the pod configs are in them, and they are what the script makes of its lines."""

import pathlib

from benchmarks import plans

ROOT = pathlib.Path(__file__).parent.parent


def test_the_pages_are_made_by_the_script():
  files = {path.stem for name in ('*qwen*', '*llama3*') for path in (ROOT / 'configs').glob(f'{name}.py')}
  assert {config.split(':')[0] for config in plans.CONFIGS} == files
  for page, make in plans.PAGES.items():
    assert (ROOT / page).read_text() == make(plans.read())
