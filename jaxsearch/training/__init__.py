"""From rollouts to new parameters: state, step, loop, checkpoints, and the supervised warm-up."""


class RunStopped(RuntimeError):
  """The run cannot usefully go on; the message says why. Here, so that the command line can name it without importing JAX."""
