"""Training: the loop, the step, checkpoints, supervised training, the warm-up of critics."""


class RunStopped(RuntimeError):
  """The run cannot usefully go on; the message says why. The command line names it without importing JAX."""
  status = 1  # of the command
