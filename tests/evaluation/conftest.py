"""Opens each sampler once: the commands under test run in this process, and each would compile its own."""

import pytest

from jaxsearch import setup
from jaxsearch.parallel import mesh as meshes

opened = {}


@pytest.fixture(scope='module', autouse=True)  # tests of other folders get engines of their own
def engines():
  open_engine = setup.open_engine

  def once(config, model_config, tokenizer, mesh=None):
    shape = repr((dict(config.sampler), model_config, tokenizer.backend.to_str(), mesh or meshes.of_host()))
    if shape not in opened:
      opened[shape] = open_engine(config, model_config, tokenizer, mesh)
    return opened[shape]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(setup, 'open_engine', once)
    yield


@pytest.fixture
def drawn(monkeypatch):
  """The figures that are saved, in order."""
  drawn = []
  monkeypatch.setattr('matplotlib.figure.Figure.savefig', lambda figure, *_, **__: drawn.append(figure))
  return drawn
