"""From rollouts to new parameters: state, step, loop, checkpoints, and the supervised warm-up."""
