"""An engine with tools and sampling of its own, for tests that drive generators without a method."""

import functools

from jaxsearch.sampler.driver import Episode, Schedule
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Sampling, Tools

TOOLS = ('search', 'topk', 'python', 'services', 'deadline', 'workers', 'max_observation', 'answer_reserve')


class Equipped(Engine):
  """Takes the fields of `Tools` and a temperature as arguments; those of the tools can be changed as attributes."""

  def __init__(self, config, tokenizer, temperature=1.0, **settings):
    self.sampling = Sampling(temperature)
    for name in TOOLS:
      setattr(self, name, settings.pop(name, getattr(Tools(), name)))
    super().__init__(config, tokenizer, **settings)

  @property
  def tools(self):
    return Tools(**{name: getattr(self, name) for name in TOOLS})

  def run(self, growths, key, on_progress=None, observer=None):
    """Runs (generator, tree) pairs; returns the metrics."""
    return self.schedule(growths, key, on_progress, observer).run()

  def schedule(self, growths, key, on_progress=None, observer=None):
    """A `Schedule` of (generator, tree) pairs, to be run."""
    numbered = [Episode(number, *growth) for number, growth in enumerate(growths)]
    return Schedule(functools.partial(self.decoding, key, self.sampling), numbered, self.tools, on_progress,
                    observer)
