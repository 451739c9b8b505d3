"""Every name of the registry can be looked up, and what it stands for is what its callers expect."""

import pytest

from jaxsearch import registry
from jaxsearch.world import files as world


@pytest.mark.parametrize('what, name', [(what, name) for what, names in registry.ENTRIES.items()
                                        for name in names])
def test_every_entry_is_there(what, name):
  assert registry.find(what, name) is not None


def test_names_stand_for_what_ships():
  assert registry.find('tokenizers', 'world') == world.folder()
  for name in registry.ENTRIES['models']:
    assert (registry.find('models', name) / 'model.safetensors').exists()
  assert registry.find('corpora', 'world')() == world.corpus()
  found = registry.find('questions', 'world')('dev', (1,), False)
  assert found == world.questions('dev', (1,), arithmetic=False)


def test_what_is_not_registered():
  with pytest.raises(KeyError):
    registry.find('models', 'world-huge')
