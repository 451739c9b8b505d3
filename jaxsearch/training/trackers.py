"""Services that show the figures of runs, `config.log`: Weights & Biases (`wandb`) and Trackio, which has the same functions.

A service is an installed module with `init`, whose result has `log` and `finish`. It gets what TensorBoard gets, under the same
tags. Each needs the extra of its name.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator

import ml_collections

from jaxsearch.config_check import to_saved


@contextlib.contextmanager
def open_tracker(name: str, out: pathlib.Path,
                 config: ml_collections.ConfigDict) -> Iterator[Callable[[dict[str, float], int], None]]:
  """Yields `log(figures, step)` of a service, for the run in the folder `out`; a run that is resumed there is resumed here.

  Raises ImportError if the module is not installed; config_check.py says so first.
  """
  module = importlib.import_module(name)
  label = f'{out.resolve().name}-{hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:8]}'  # trackio knows a run by its name
  identity = {'id': label} if name == 'wandb' else {}
  os.environ.setdefault('WANDB__DISABLE_META', 'true')  # it would keep the command line, with the secrets in it
  run = module.init(project='jaxsearch', name=label, config=to_saved(config), resume='allow', **identity)
  try:
    yield lambda figures, step: run.log(figures, step=step)
  finally:
    run.finish()
