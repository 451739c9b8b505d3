import json

import pytest

from jaxsearch import registry
from jaxsearch.models import adapter_files


@pytest.mark.parametrize(('group', 'field', 'value'), [('lora', 'rank', 'x'), ('decoder', 'rope_scaling', 3)])
def test_a_note_that_is_not_of_an_adapter_is_one_line(group, field, value, tmp_path):
  run = json.loads((registry.POLICIES['smollm2-wiki'] / 'jaxsearch.json').read_text())
  (run if group == 'decoder' else run['config'])[group][field] = value
  (tmp_path / 'jaxsearch.json').write_text(json.dumps(run))
  (tmp_path / 'adapter.safetensors').symlink_to(registry.POLICIES['smollm2-wiki'] / 'adapter.safetensors')
  with pytest.raises(ValueError, match='jaxsearch.json does not say what adapter.safetensors is an adapter of'):
    adapter_files.load(tmp_path)
