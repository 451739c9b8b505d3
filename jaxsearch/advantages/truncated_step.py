"""SLATE: the credit of a step among its k alternatives from one prefix, and the judged reward of a step."""

import jax
import jax.numpy as jnp

from jaxsearch.advantages.group_relative import standardize


def truncated_step(rewards: jax.Array, *, normalize_std: bool = True, ddof: int = 1,
                   eps: float = 1e-6) -> jax.Array:
  """Credits each of k alternatives for a step against the others: `(r - mean) / (std + eps)` (SLATE, eq. 4).

  With k = 1 there is nothing to compare with: the advantage is the reward itself, as in REINFORCE (appendix
  A.9).

  Args:
    rewards: [..., k], the judged score of every alternative grown from the same prefix.
    normalize_std, ddof, eps: as in `group_relative`.
  Returns:
    [..., k] float32; exactly 0 where all of several alternatives scored the same.
  """
  rewards = jnp.asarray(rewards).astype(jnp.float32)
  if rewards.shape[-1] == 1:
    return rewards

  def over_group(reduce):
    return lambda x: jnp.broadcast_to(reduce(x, axis=-1, keepdims=True), x.shape)

  return standardize(
    rewards, jnp.ones(rewards.shape, bool), total=over_group(jnp.sum), lowest=over_group(jnp.min),
    highest=over_group(jnp.max), normalize_std=normalize_std, ddof=ddof, eps=eps)[0]


def step_reward(think: jax.Array, query: jax.Array, answer: jax.Array, is_answer: jax.Array, step: jax.Array,
                budget: jax.Array, *, early_bonus: float) -> jax.Array:
  """Returns the reward of one step from scores of a judge, each in {-1, 0, 1} (SLATE, eqs. 5 and 6).

    a search:   think + query
    an answer:  think + answer + early_bonus (budget - step) / budget

  Args:
    think: [...], score of the reasoning.
    query: [...], score of the query with its documents; not read (may be NaN) where the step answers.
    answer: [...], score of the answer; not read (may be NaN) where the step searches.
    is_answer: [...], 1 where the step answers, 0 where it searches.
    step: [...], counted from 1.
    budget: B, the most steps there may be; 4 in the paper.
    early_bonus: lambda, 0.1 in the paper.
  Returns:
    Same shape, float32.
  """
  given = think, query, answer, step, budget
  think, query, answer, step, budget = (jnp.asarray(x).astype(jnp.float32) for x in given)
  answer += early_bonus * (budget - step) / budget
  return think + jnp.where(jnp.asarray(is_answer) != 0, answer, query)
