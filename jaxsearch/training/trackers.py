"""Services that show the figures of runs, `config.log`: Weights & Biases (`wandb`) and Trackio.

A service is an installed module with `init`, whose result has `log` and `finish`. It gets what TensorBoard
gets, under the same tags. Each needs the extra of its name.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from jaxsearch.config_check import to_saved


@contextlib.contextmanager
def open_tracker(name: str, out: pathlib.Path,
                 config: ConfigDict) -> Iterator[Callable[[dict[str, float], int], None]]:
  """Yields `log(figures, step)` of a service; a run that is resumed in the folder `out` is resumed there too.

  Raises ImportError if the module is not installed; config_check.py says so first.
  """
  module = importlib.import_module(name)
  path = out.resolve()
  label = f'{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}'  # trackio knows it
  identity = {'id': label} if name == 'wandb' else {}
  os.environ.setdefault('WANDB__DISABLE_META', 'true')  # else it keeps the command line, with its secrets
  run = module.init(project='jaxsearch', name=label, config=to_saved(config), resume='allow', **identity)
  try:
    yield lambda figures, step: run.log(figures, step=step)
  finally:
    run.finish()
