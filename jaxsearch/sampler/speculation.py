"""Decodes several tokens a step: drafts what followed a path's last tokens where they stood before.

Siblings and documents repeat long strings. A step runs the model over the last token of a path and the
drafted ones, draws a token behind each, and keeps those in front of which every draft was drawn too. The
token at depth d of a path has a number of its own (`segment.draws`): the tokens are those of decoding one by
one, up to rounding, whatever was drafted.
"""

from collections.abc import Callable

import jax.numpy as jnp

SAID = 2048  # tokens that a path drafts from: of its question's other spans, then its own
HEARD = 512  # of those spans at most


def drafted(said, ends, count: int):
  """Returns [S,count] tokens that may come next.

  They follow the last place in front of the last in which the two tokens at the end of said[:, :ends] [S,N]
  stand, if possible with the one before them; where there is none they are any.
  """
  N = said.shape[1]
  last = lambda back: jnp.take_along_axis(said, ends[:, None] - 1 - back, axis=1)
  again = lambda back: jnp.pad(said, ((0, 0), (back, 0)))[:, :N] == last(back)
  places = jnp.arange(N)
  found = again(0) & again(1) & (places < ends[:, None] - 1)
  place = jnp.argmax(jnp.where(found, places + N * again(2), -1), axis=1)
  return jnp.take_along_axis(said, jnp.minimum(place[:, None] + 1 + jnp.arange(count), N - 1), axis=1)


def step(draw: Callable, count: int, following, remaining, uniforms, _, state: tuple) -> tuple:
  """Does one step of `segment.decode` with `count` drafted tokens.

  Args:
    draw: (tokens [S,1+count], counts [S], cache, numbers [S,1+count]) -> (tokens, log-probabilities, cache);
      what comes behind each token, by the number at its place.
    following, remaining, uniforms: of its tables, slots and arguments.
    state: its own, what was said with room for what will be, and the steps in which each slot took part.
  """
  last, counts, active, states, held, tokens, logprobs, said, steps = state
  fed = jnp.concatenate([last[:, None], drafted(said, SAID + counts, count)], axis=1)
  slots, places = jnp.arange(len(last))[:, None], counts[:, None] + jnp.arange(1 + count)
  drawn, logprob, held = draw(fed, counts, held, uniforms[slots, places])
  # What is not kept is behind what the slot has, and is overwritten.
  tokens, logprobs = tokens.at[slots, places].set(drawn), logprobs.at[slots, places].set(logprob)
  said, steps, kept = said.at[slots, SAID + places].set(drawn), steps + active, active
  for place in range(1 + count):
    last, counts = jnp.where(kept, drawn[:, place], last), counts + kept
    states = jnp.where(kept, following[states, last].astype(jnp.int32), states)
    active &= (states >= 0) & (counts < remaining)
    kept &= active & (fed[:, min(place + 1, count)] == last)
  return last, counts, active, states, held, tokens, logprobs, said, steps
