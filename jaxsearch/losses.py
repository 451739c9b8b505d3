"""Per-token losses of policy and critic, and the rule by which they are averaged.

A loss here is a pure function of arrays `[B, T]` (batch, time) that returns a value per token, `[B, T]` in
float32 and 0 where masked, to be minimised; `aggregate` makes the scalar. Only jax is imported.

A masked position (mask 0) contributes exactly 0 to the loss and to every gradient, even if it holds NaN or
infinity. Where the public trainers differ, the convention is stated with its source; "verl" is
`verl/trainer/ppo/core_algos.py`.
"""

import jax
import jax.numpy as jnp

# exp(20) = 4.9e8 still leaves room in float32 for advantages and sums; the same bound as in verl.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def clipped_surrogate(logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, mask: jax.Array, *,
                      clip_low: float, clip_high: float, dual_clip: float | None = None) -> jax.Array:
  """Returns PPO's clipped surrogate, to be minimised.

  It is `max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A)`. Two clip ranges allow DAPO's
  clip-higher; equal ones are PPO (Schulman et al. 2017, eq. 7).

  Args:
    logp: [B, T], log-probabilities under the policy that is trained.
    old_logp: [B, T], log-probabilities under the policy that sampled; `ratio = exp(logp - old_logp)`, the
      log-ratio clamped to +-20 as in verl (no gradient beyond).
    advantages: [B, T], or broadcastable to it.
    mask: [B, T], 1 where a token is trained on.
    dual_clip: `c > 1` bounds the loss of a negative advantage at `-A c` (Ye et al. 2020, dual-clip PPO);
      None: off.
  """
  _, advantages = _masked(mask, advantages)
  return shared_surrogate(logp, old_logp, jnp.maximum(advantages, 0.0), jnp.maximum(-advantages, 0.0), mask,
                          clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def shared_surrogate(logp: jax.Array, old_logp: jax.Array, gains: jax.Array, losses: jax.Array,
                     mask: jax.Array, *, clip_low: float, clip_high: float,
                     dual_clip: float | None = None) -> jax.Array:
  """Adds up the weighted clipped surrogates of a token that several trajectories share.

  They have one ratio r, and weights w_i and advantages A_i of their own. The sum of `w_i` times
  `clipped_surrogate` is `max(r, 1 - clip_low) N - min(r, 1 + clip_high) P`; with a dual clip c the first
  factor is `min(max(r, 1 - clip_low), c)`.

  Args:
    gains: [B, T], `P = sum w_i max(A_i, 0)`.
    losses: [B, T], `N = sum w_i max(-A_i, 0)`.
    logp, old_logp, mask, clip_low, clip_high, dual_clip: as in `clipped_surrogate`.
  """
  trained, logp, old_logp, gains, losses = _masked(mask, logp, old_logp, gains, losses)
  ratio = jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  worse = jnp.maximum(ratio, 1.0 - clip_low)
  if dual_clip is not None:
    worse = jnp.minimum(worse, dual_clip)
  return jnp.where(trained, worse * losses - jnp.minimum(ratio, 1.0 + clip_high) * gains, 0.0)


def cispo(logp: jax.Array, old_logp: jax.Array, advantages: jax.Array, mask: jax.Array, *, clip_low: float,
          clip_high: float) -> jax.Array:
  """Returns the loss of CISPO: `-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A logp` (arXiv:2506.13585).

  A clipped token keeps its gradient, with the bound as its weight. It is linear in A: of a token that several
  trajectories share, give the sum of their weighted advantages. The value of the loss means nothing.

  Args: as of `clipped_surrogate`. `clip_low=1` is no lower bound (M1, ScaleRL); trainers that take bounds
    themselves say 5 where this takes `clip_high=4`.
  """
  trained, logp, old_logp, advantages = _masked(mask, logp, old_logp, advantages)
  ratio = jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
  return jnp.where(trained, -weight * advantages * logp, 0.0)


def sequence_log_ratio(logp: jax.Array, old_logp: jax.Array, sequences: jax.Array, mask: jax.Array,
                       most: int) -> jax.Array:
  """Returns the log-ratio of GSPO: at each token the mean of `logp - old_logp` over its sequence.

  See arXiv:2507.18071. Every token has the value of its sequence and the gradient of its own `logp`. So
  `shared_surrogate`, with it as `logp` and zeros as `old_logp`, is GSPO's loss if all tokens of a sequence
  weigh alike and all sequences do: 'seq-mean-token-mean'.

  Args:
    sequences: [B, T] int, of each token the number of its sequence, from 0 to below `most` in each row.
  """
  trained, logp, old_logp = _masked(mask, logp, old_logp)
  total = lambda x: over_sequences(x, sequences, mask, most)
  mean = total(logp - old_logp) / total(trained)
  return jnp.where(trained, jax.lax.stop_gradient(mean - logp) + logp, 0.0)


def over_sequences(x: jax.Array, sequences: jax.Array, mask: jax.Array, most: int) -> jax.Array:
  """Returns at each token [B, T] the sum of x over its sequence, see `sequence_log_ratio`; 1 where masked."""
  counted, x = _masked(mask, x)
  sums = jax.vmap(lambda x, numbers: jax.ops.segment_sum(x, numbers, most)[numbers])(x, sequences)
  return jnp.where(counted, sums, 1.0)


def importance_weights(logp: jax.Array, sampler_logp: jax.Array, cap: float,
                       floor: float | None = None) -> jax.Array:
  """Returns the importance weights `min(exp(logp - sampler_logp), cap)` of sampled tokens.

  Sampler and trainer have the same parameters and round differently, so the tokens do not quite come from the
  trainer's policy. These weights correct the gradient to that of the policy's own tokens, except for what
  the cap takes away to bound the variance (Ionides 2008; TRL and verl do it token by token as here). For
  weights of whole sequences, pass the log-probabilities summed over each sequence.

  Args:
    logp: [...], log-probabilities of the tokens by the trainer, before any update; the log-ratio is clamped
      to +-20.
    sampler_logp: [...], as captured while sampling.
    cap: the largest weight.
    floor: masks: a weight below it, or above the cap, becomes 0. None truncates.
  Returns:
    The weights, same shape, float32, without a gradient.
  """
  log_ratio = jnp.clip(_float32(logp) - _float32(sampler_logp), -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratio = jnp.exp(log_ratio)
  if floor is None:
    return jax.lax.stop_gradient(jnp.minimum(ratio, cap))
  return jax.lax.stop_gradient(jnp.where((ratio >= floor) & (ratio <= cap), ratio, 0.0))


def kl(logp: jax.Array, ref_logp: jax.Array, kind: str = 'k3') -> jax.Array:
  """Estimates KL(policy || reference) per token, from tokens that the policy sampled (Schulman 2020).

  With `r = ref_logp - logp`:
    'k1':  -r
    'abs': |r|
    'k2':  r^2 / 2
    'k3':  exp(r) - r - 1, with r clamped to +-20 and the result to +-10 (verl's `low_var_kl`)

  There is no mask: hand the result to `aggregate`, which has one. A log-probability that is not finite shows
  in the result but has gradient 0 (not 0 * inf = NaN), so that it cannot spoil a sum in which it is masked.

  Args:
    logp, ref_logp: [...], log-probabilities under the policy and under the reference.
  Returns:
    The estimates, same shape, float32.
  Raises:
    ValueError: `kind` is none of the four.
  """
  if kind not in _KL:
    raise ValueError(f'kl: kind {kind!r} is none of {", ".join(map(repr, _KL))}')
  log_ratio = _float32(ref_logp) - _float32(logp)
  finite = jnp.isfinite(log_ratio)
  estimate = _KL[kind](jnp.where(finite, log_ratio, 0.0))
  return jnp.where(finite, estimate, _KL[kind](jax.lax.stop_gradient(log_ratio)))


def _k3(log_ratio):
  log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  # expm1, because exp(r) - 1 loses its digits where the two policies are close, as they usually are.
  return jnp.clip(jnp.expm1(log_ratio) - log_ratio, -MAX_K3, MAX_K3)


_KL = {'k1': jnp.negative, 'abs': jnp.abs, 'k2': lambda log_ratio: 0.5 * jnp.square(log_ratio), 'k3': _k3}


def value_loss(values: jax.Array, old_values: jax.Array | None, returns: jax.Array, mask: jax.Array, *,
               clip: float | None = None) -> jax.Array:
  """Returns half the squared error of the critic; with `clip` the larger of the plain and the clipped one.

  The clipped error is that of `old_values + clamp(values - old_values, -clip, clip)`, as in verl and OpenAI
  baselines.

  Args:
    values: [B, T], the critic's values now.
    old_values: [B, T], its values when the trajectories were sampled; may be None without `clip`.
    returns: [B, T], the targets.
    mask: [B, T], 1 where a value is trained on.
    clip: how far a value may move from the old one before moving on earns nothing; None: no clipping.
  """
  trained, values, returns = _masked(mask, values, returns)
  loss = jnp.square(values - returns)
  if clip is not None:
    _, old_values = _masked(mask, old_values)
    clipped = old_values + jnp.clip(values - old_values, -clip, clip)
    loss = jnp.maximum(loss, jnp.square(clipped - returns))
  return jnp.where(trained, 0.5 * loss, 0.0)


def aggregate(x: jax.Array, mask: jax.Array, how: str = 'token-mean') -> jax.Array:
  """Returns the average of a per-token quantity that `how` names, a float32 scalar, see `denominator`.

  Sequences without a token that counts are left out of the mean over sequences (as in verl), so that padding
  rows change nothing; nothing to count at all gives 0. Training averages by the same rule, over the trees of
  a whole step and before they are packed: `trees.layout.loss_weights`.

  Args:
    x: [B, T]; anything where masked. B are the sequences.
    mask: [B, T], 1 where a token counts.
  """
  counted, x = _masked(mask, x)
  tokens = jnp.sum(counted, axis=-1, keepdims=True, dtype=jnp.float32)
  parts = denominator(how, tokens, jnp.sum(tokens), jnp.sum(tokens > 0, dtype=jnp.float32))
  return jnp.sum(x * (counted / jnp.maximum(parts, 1.0)))


def denominator(how: str, own, tokens, sequences):
  """Returns what every token of a sequence is divided by, so that the plain sum over a batch is its average.

    'token-mean'            every token that counts in the batch alike
    'seq-mean-token-mean'   every sequence alike, and in it every token that counts
    'seq-mean-token-sum'    the sum over the tokens of a sequence, averaged over sequences

  Args:
    own: tokens that count in the sequence.
    tokens, sequences: those of the whole batch; sequences without a token that counts are not among them.
  Raises:
    ValueError: `how` is none of the three.
  """
  denominators = {
    'token-mean': tokens, 'seq-mean-token-mean': own * sequences, 'seq-mean-token-sum': sequences}
  if how not in denominators:
    raise ValueError(f'the average {how!r} is none of {", ".join(map(repr, denominators))}')
  return denominators[how]


def _float32(x) -> jax.Array:
  return jnp.asarray(x).astype(jnp.float32)


def _masked(mask, *arrays):
  """Returns the mask as booleans, then the arrays in float32 with 0 where masked."""
  counted = jnp.asarray(mask) != 0
  return counted, *(jnp.where(counted, _float32(x), 0.0) for x in arrays)
