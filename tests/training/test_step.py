"""The step against plain NumPy sums, and what must not change it: packing, micro-batches, the mesh, observations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from configs import base
from jaxsearch.data.questions import Question
from jaxsearch.models import value_head
from jaxsearch.models.decoder import Decoder
from jaxsearch.parallel import mesh as meshes, transfer
from jaxsearch.training import step as steps
from jaxsearch.training.batch import make_batch, place
from jaxsearch.training.learner import open_critic
from jaxsearch.trees.layout import lay_out
from jaxsearch.trees.tree import Role, Tree


def accumulated(loss_fn, params, batch):
  """(gradients, loss, report) of the whole batch on one device, with the optimizer left out."""
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  accumulate = jax.jit(lambda params, batch: steps.accumulate(
    loss_fn, params, batch, jax.tree.map(lambda _: transfer.replicated(mesh), params)))
  return accumulate(params, jax.tree.map(jnp.asarray, batch))


def grads_of(tiny, rows, micro_rows, hyper=None, params=None, decoder=None, ref=False):
  """`accumulated`, of the policy's loss."""
  decoder = decoder or tiny.decoder
  params = params if params is not None else tiny.random_params(decoder, 0)
  batch = make_batch(rows, micro_rows)
  if ref:
    batch = dataclasses.replace(batch, ref_logprobs=batch.old_logprobs * 1.1)
  return accumulated(functools.partial(steps.policy_loss, config=decoder, **(hyper or tiny.hyper)), params, batch)


def assert_trees_close(a, b, rtol=1e-5, atol=1e-7):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def test_loss_is_the_sum_a_loop_over_plain_paths_gives(tiny):
  hyper = tiny.hyper | dict(clip_low=0.1, clip_high=0.3, dual_clip=2.0, kl_coef=0.3, entropy_coef=0.01, temperature=0.7)
  forest = tiny.random_forest(0, trees=5, branch=True)
  params = jax.tree.map(lambda x: x * 4, tiny.random_params(tiny.decoder, 1))  # ratios leave the clipping interval
  rows = lay_out(forest, 48, pad_id=0, how='seq-mean-token-mean')
  _, loss, report = grads_of(tiny, rows, 2, hyper, params, ref=True)

  model = jax.jit(lambda tokens: Decoder(tiny.decoder, params=params)(tokens))
  per_tree, clipped = [], 0
  for tree in forest:
    losses, seen = [], set()
    for leaf in tree.leaves():
      ids = leaf.path_tokens()
      scores = np.asarray(model(jnp.asarray([ids + [0] * (40 - len(ids))]))[0], np.float64) / hyper['temperature']
      logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
      start = 0
      for node in leaf.path():
        trained = node.role is Role.POLICY and node not in seen
        for offset, token in enumerate(node.tokens if trained else ()):
          predicted = logp[start + offset - 1]
          new, old, advantage = predicted[token], node.sampler_logprobs[offset], node.advantages
          ratio = np.exp(new - old)
          surrogate = max(-ratio * advantage, -np.clip(ratio, 0.9, 1.3) * advantage)
          if advantage < 0:
            surrogate = min(surrogate, -2.0 * advantage)
          kl = np.clip(np.exp(1.1 * old - new) - (1.1 * old - new) - 1, -10, 10)
          entropy = -np.sum(np.exp(predicted) * predicted)
          losses.append(surrogate + 0.3 * kl - 0.01 * entropy)
          clipped += ratio > 1.3 if advantage > 0 else ratio < 0.9
        seen.add(node)
        start += len(node.tokens)
    per_tree.append(np.mean(losses))
  np.testing.assert_allclose(loss, np.mean(per_tree), rtol=2e-5)
  np.testing.assert_allclose(report['mean']['clip_fraction'], clipped)
  assert clipped > 0


def test_micro_batches_and_packing_change_no_gradient(tiny):
  forest = tiny.random_forest(1, trees=8, branch=True)
  packed = lay_out(forest, 64, pad_id=0)
  loose = lay_out(forest[::-1], 40, pad_id=0)
  assert loose.tokens.shape[0] > packed.tokens.shape[0] >= 3
  hyper = tiny.hyper | dict(entropy_coef=0.02)
  reference = grads_of(tiny, packed, packed.tokens.shape[0], hyper)
  assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(reference[0])) > 1e-3
  for rows, micro_rows in ((packed, 1), (packed, 2), (loose, 3)):
    grads, loss, report = grads_of(tiny, rows, micro_rows, hyper)
    assert_trees_close(grads, reference[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, reference[1], rtol=1e-5)
    assert_trees_close(report, reference[2], rtol=1e-4, atol=1e-6)


def sharing_forest(seed):
  """Two questions with four trees each that have prompts, thoughts and branches in common, and credit of their own.

  What is sampled after the same path has the same log-probability and the same value.
  """
  rng, forest = np.random.default_rng(seed), []
  for number in range(2):
    prompt = rng.integers(1, 64, 5).tolist()
    for _ in range(4):
      tree = Tree(None, Question(str(number), '?', ('a',)))
      parent = tree.root.append(prompt, Role.PROMPT)
      for turn in range(2):
        for sibling in range(2 if turn else 1):
          tokens = rng.integers(1, 3, 3).tolist()  # two tokens: many paths begin alike
          path = parent.path_tokens() + tokens
          of_path = [np.random.default_rng(path[:end]).normal() for end in range(len(path) - 2, len(path) + 1)]
          node = parent.append(tokens, Role.POLICY, sampler_logprobs=[value / 2 - 4 for value in of_path])
          node.advantages = rng.normal(size=3) if sibling else float(rng.normal())
          node.values, node.returns = np.array(of_path), rng.normal(size=3)
        parent = node.append([7, 8], Role.OBSERVATION)
      tree.prune()
      forest.append(tree)
  return forest


METHODS = {
  'GRPO': ('token-mean', dict(importance_cap=1.2, dual_clip=1.5)), 'SLATE': ('step-mean', {}),
  "CARL's critic": ('step-mean', dict(coef=0.5)), 'PPO': ('token-mean', dict(value_clip=0.5))}


@pytest.mark.parametrize('method', METHODS)
def test_merged_trees_have_the_loss_and_the_gradients_of_separate_ones(tiny, method):
  how, changes = METHODS[method]
  hyper = tiny.hyper | dict(clip_low=0.1, clip_high=0.2, kl_coef=0.3, entropy_coef=0.01) | changes
  params = jax.tree.map(lambda x: x * 4, tiny.random_params(tiny.decoder, 1))  # ratios leave the clipping interval
  loss_fn = functools.partial(steps.policy_loss, config=tiny.decoder, **hyper)
  if 'coef' in hyper:
    head = value_head.initial_mlp(tiny.decoder.hidden_size, jax.random.key(2))
    params |= {'value_head': jax.tree.map(lambda x: x + 0.05, head)}
    loss_fn = functools.partial(steps.critic_loss, config=tiny.decoder, shared=True, coef=hyper['coef'])
  elif 'value_clip' in hyper:
    head = {'kernel': jnp.full(tiny.decoder.hidden_size, 0.3), 'bias': jnp.float32(0.1)}
    params, clip = {'decoder': params, 'head': head}, hyper['value_clip']
    loss_fn = functools.partial(steps.critic_loss, config=tiny.decoder, shared=False, value_clip=clip)
  results, sizes = [], []
  for merged in (False, True):
    forest = sharing_forest(0)
    for tree in forest if not merged else ():
      tree.question = None
    rows = lay_out(forest, 64, pad_id=0, how=how, share_trained=merged and hyper.get('value_clip') is None)
    batch = make_batch(rows, 2, critic=True)
    batch = dataclasses.replace(batch, ref_logprobs=1.1 * batch.sampler_logprobs)
    if 'importance_cap' in hyper:  # a trainer that finds the tokens more, or less, likely than the sampler
      batch = dataclasses.replace(batch, old_logprobs=batch.old_logprobs * 0.9 + 0.4)
    results.append((jax.device_get(accumulated(loss_fn, params, batch)), float(batch.spans.sum())))
    sizes.append(int(rows.real.sum()))
  ((grads, loss, report), spans), ((merged_grads, merged_loss, merged_report), merged_spans) = results
  most = 0.7 if hyper.get('value_clip') is None else 0.9
  assert sizes[1] < most * sizes[0] and spans == merged_spans
  largest = max(np.abs(x).max() for x in jax.tree.leaves(grads))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * largest), grads, merged_grads)
  if 'value' not in report['mean']:  # the squared errors differ by a constant, the spread of the returns
    np.testing.assert_allclose(merged_loss, loss, rtol=1e-5)
    assert float(report['mean']['clip_fraction']) > 1
  for name, value in report['mean'].items():
    # Of a shared token the clipped fraction is the share of the advantages, not of the spans.
    rtol = 1e-2 if name == 'clip_fraction' else 1e-4
    np.testing.assert_allclose(merged_report['mean'][name], value, rtol=rtol, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('hyper', [
  dict(kind='gspo', clip_low=0.02, clip_high=0.03), dict(importance='sequence-mask', importance_cap=2.0)], ids=str)
def test_a_loss_over_sequences_is_that_of_each_chain_alone(tiny, hyper):
  """Chains of a question share their prompt in a row; packed and alone they have the same loss and metrics."""
  forest = tiny.random_forest(3)
  for tree in forest:
    tree.question = Question('1', '?', ('a',))
  lay = functools.partial(lay_out, how='seq-mean-token-mean', pad_id=0, share_trained=False)
  results = []
  for length, micro_rows in ((96, 2), (30, 3)):
    batch = make_batch(lay(forest, length), micro_rows, sequences=True)
    scale = 0.97 if 'importance' in hyper else 1.0  # how far the trainer is from the sampler
    part = dataclasses.replace(batch, old_logprobs=scale * batch.sampler_logprobs)
    loss_fn = functools.partial(steps.policy_loss, config=tiny.decoder, **tiny.hyper | hyper)
    results.append(accumulated(loss_fn, tiny.random_params(tiny.decoder, 0), part))
  (grads, loss, report), (others, other_loss, other_report) = results
  np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(grads))
  assert largest > 0
  assert_trees_close(grads, others, rtol=0, atol=1e-5 * largest)
  assert_trees_close(report['mean'], other_report['mean'], rtol=1e-4)
  rejected = report['mean'].get('importance_capped', report['mean']['clip_fraction'])
  tokens = sum(tree.count(Role.POLICY) for tree in forest)
  assert 0 < float(rejected) < tokens
  if 'importance' in hyper:  # the trainer is likelier everywhere, so what is kept weighs more than 1
    assert float(report['mean']['importance_weight']) > tokens - float(rejected)


@pytest.mark.parametrize('kind', ['cispo', 'gspo'])
def test_before_the_first_update_every_kind_has_the_policy_gradient(tiny, kind):
  rows = lay_out(tiny.random_forest(3), 96, pad_id=0, how='seq-mean-token-mean', share_trained=False)
  batch = dataclasses.replace(make_batch(rows, 2, sequences=True), old_logprobs=None)
  loss_fn = functools.partial(steps.policy_loss, config=tiny.decoder, **tiny.hyper)
  plain, other = (accumulated(functools.partial(loss_fn, kind=each), tiny.random_params(tiny.decoder, 0), batch)[0]
                  for each in ('clip', kind))
  assert_trees_close(other, plain, rtol=1e-4, atol=1e-6)


@functools.partial(jax.jit, static_argnames=('config', 'hyper'))
def policy_gradient(params, part, config, hyper):
  return jax.grad(lambda params: steps.policy_loss(params, part, config=config, **dict(hyper)), has_aux=True)(params)


def expected_gradient(tiny, params, sampler, advantages, **changes):
  """The gradient of the step in expectation over the one token that a sampler with other parameters draws after a prompt.

  Every token is there once, its advantage times its probability.
  """
  prompt, forest = [3, 5, 8], []
  drawn = jax.jit(lambda p: jax.nn.log_softmax(Decoder(tiny.decoder, params=p)(jnp.array([prompt]))[0, -1]))(sampler)
  for token, logprob in enumerate(drawn.tolist()):
    tree = Tree(None, Question('1', '?', ('a',)))
    node = tree.root.append(prompt, Role.PROMPT).append([token], Role.POLICY, sampler_logprobs=[logprob])
    node.advantages = float(advantages[token] * np.exp(logprob) * tiny.vocab)
    forest.append(tree)
  batch = dataclasses.replace(make_batch(lay_out(forest, 96, pad_id=0), 1), old_logprobs=None)
  part = jax.tree.map(lambda x: jnp.asarray(x[0]) if np.ndim(x) else x, batch)
  grads, report = policy_gradient(params, part, tiny.decoder, tuple((tiny.hyper | changes).items()))
  return ravel_pytree(grads)[0], jax.tree.map(lambda total: float(total) / tiny.vocab, report['mean'])


def test_importance_weights_turn_the_gradient_of_a_wrong_sampler_into_the_policys(tiny):
  params = jax.tree.map(lambda x: 3 * x, tiny.random_params(tiny.decoder, 1))
  wrong = jax.tree.map(lambda x, noise: x + noise, params, tiny.random_params(tiny.decoder, 2))
  advantages = np.random.default_rng(0).normal(size=tiny.vocab)

  def reward(params):
    return jnp.sum(jax.nn.softmax(Decoder(tiny.decoder, params=params)(jnp.array([[3, 5, 8]]))[0, -1]) * advantages)

  true, _ = ravel_pytree(jax.jit(jax.grad(reward))(params))
  away = lambda gradient: float(jnp.linalg.norm(-gradient - true) / jnp.linalg.norm(true))
  own, report = expected_gradient(tiny, params, params, advantages, importance_cap=2.0)
  assert away(own) < 1e-4 and report['importance_capped'] == 0 and report['logprob_gap'] < 1e-5
  plain, before = expected_gradient(tiny, params, wrong, advantages)
  full, _ = expected_gradient(tiny, params, wrong, advantages, importance_cap=1e6)
  capped, after = expected_gradient(tiny, params, wrong, advantages, importance_cap=2.0)
  assert away(full) < 1e-4 < away(capped) < 0.5 * away(plain) and away(plain) > 0.4
  assert 0 < after['importance_capped'] < 0.6 and after['logprob_gap'] > 0.3
  assert after['logprob_gap'] == pytest.approx(before['logprob_gap'])
  assert 'importance_capped' not in before and after['ratio'] == pytest.approx(1)


def test_chunk_size_and_remat_change_nothing(tiny):
  rows = lay_out(tiny.random_forest(3), 64, pad_id=0)
  reference = grads_of(tiny, rows, 2)
  for chunk, remat in ((7, 'dots'), (1024, 'full')):
    grads, loss, _ = grads_of(tiny, rows, 2, tiny.hyper | dict(chunk=chunk),
                              decoder=dataclasses.replace(tiny.decoder, remat=remat))
    np.testing.assert_allclose(loss, reference[1], rtol=1e-5)
    assert_trees_close(grads, reference[0], rtol=1e-4, atol=1e-6)


def test_in_bfloat16_the_gradient_of_the_vocabulary_is_float32_and_no_chunk_rounds_it(tiny):
  rows = lay_out(tiny.random_forest(3), 64, pad_id=0)
  decoder = dataclasses.replace(tiny.decoder, dtype='bfloat16', tie_embeddings=False)
  moments = []
  for chunk in (1, 1024):
    lab = tiny.setup(decoder=decoder, hyper=tiny.hyper | dict(chunk=chunk), clip_norm=1e9)
    state, _ = lab.train_step(lab.state, place(make_batch(rows, 2), lab.mesh))
    moments.append(np.asarray(optax.tree.get(state.opt_state, 'mu')['unembedding']))
  one, many = moments
  assert np.linalg.norm(one - many) < 1e-5 * np.linalg.norm(many)
  gradient = many / np.float32(1 - 0.9)
  rounded = np.asarray(jnp.asarray(gradient, jnp.bfloat16), np.float32)
  assert np.median(np.abs(rounded - gradient) / np.abs(gradient)) > 2.0**-11  # it was not rounded on its way


def test_a_mesh_of_eight_gives_the_losses_of_one_device(tiny):
  rows = lay_out(tiny.random_forest(4, trees=16), 40, pad_id=0)
  alone, spread = tiny.setup(), tiny.setup(mesh=meshes.make_mesh(2, 2, 2))
  for _ in range(2):  # the second loss depends on the first update
    alone.state, expected = alone.train_step(alone.state, place(make_batch(rows, 8), alone.mesh))
    spread.state, metrics = spread.train_step(spread.state, place(make_batch(rows, 8), spread.mesh))
    assert sorted(metrics) == sorted(expected)
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
  assert_trees_close(jax.device_get(spread.state.params), jax.device_get(alone.state.params), rtol=1e-3, atol=2e-4)


def test_a_non_finite_gradient_is_skipped_and_counted(tiny):
  forest = tiny.random_forest(9)
  lab = tiny.setup()
  good = make_batch(lay_out(forest, 64, pad_id=0), 2)
  bad = dataclasses.replace(good, gains=np.where(good.targets == good.targets.max(), np.nan, good.gains))
  state, _ = lab.train_step(lab.state, place(good, lab.mesh))
  kept = jax.device_get(state)
  state, metrics = lab.train_step(state, place(bad, lab.mesh))
  state, metrics = lab.train_step(state, place(bad, lab.mesh))
  assert (metrics['skipped'], metrics['skipped_in_a_row'], state.updates) == (2, 2, 1)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), kept.params)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.opt_state), kept.opt_state)
  state, metrics = lab.train_step(state, place(good, lab.mesh))
  assert (metrics['skipped'], metrics['skipped_in_a_row'], state.updates) == (2, 0, 2)


def test_a_step_without_anything_to_train_measures_and_changes_nothing(tiny):
  lab = tiny.setup()
  forest = tiny.random_forest(3, advantages=[1.0, -1.0] * 3)
  state, _ = lab.train_step(lab.state, place(make_batch(lay_out(forest, 64, pad_id=0), 2), lab.mesh))  # there is momentum now
  before = jax.tree.map(np.array, state)
  state, row = lab.train_step(state, place(make_batch(lay_out([], 64, pad_id=0), 2), lab.mesh))
  jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))
  assert np.isnan([row[name] for name in ('kl', 'entropy', 'ratio', 'logprob_gap')]).all()  # null in the row
  assert row['loss'] == row['grad_norm'] == row['tokens_trained'] == row['skipped'] == 0


def boundary_forest(tiny):
  forest = tiny.random_forest(3, advantages=[0.0] * 6)
  for index, tree in enumerate(forest):
    for node in tree.nodes(Role.POLICY):
      node.values = np.full(len(node.tokens), 0.5, np.float32)
      node.returns = np.full(len(node.tokens), index % 2, np.float32)
  return forest


def test_a_critic_moves_the_policys_backbone_at_its_own_rate(tiny):
  """CARL's appendix D: 5e-6 for the head without decay, 5e-7 for the backbone; embeddings are the policy's alone."""
  rows = lay_out(boundary_forest(tiny), 64, pad_id=0, how='step-mean')
  batch = jax.tree.map(jnp.asarray, make_batch(rows, 4, critic=True))
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  config = base.get_config().unlock()
  config.critic.update(enabled=True, shared=True, backbone_rate=1e-3, learning_rate=1e-2)
  config.optim.update(tiny.optim_config(clip_norm=1.0, learning_rate=1.0, eps=1e-30))
  config.dtype = 'float32'

  def moved(coef):
    params = jax.device_put(tiny.random_params(tiny.decoder, 0), transfer.replicated(mesh))
    config.critic.coef = coef
    state, step = open_critic(config, tiny.decoder, params, mesh, 10)
    state = dataclasses.replace(state, params=state.params | {
      'value_head': jax.tree.map(lambda x: x + 0.05, state.params['value_head'])})
    before = jax.device_get(state.params)
    state, _ = step(state, batch)
    moments = [m.shape for m in jax.tree.leaves(state.opt_state)]
    assert before['embedding'].shape not in moments  # frozen
    return jax.tree.map(lambda a, b: float(np.abs(a - b).max()), jax.device_get(state.params), before)

  small, large = moved(0.5), moved(50.0)
  for found in (small, large):
    assert found['embedding'] == 0.0
    assert found['layers']['q'] == pytest.approx(1e-3, rel=0.01)  # Adam's first step
    assert found['value_head']['kernel'] == pytest.approx(1e-2, rel=0.01)


def test_a_frozen_decoder_keeps_its_weights_and_has_no_moments(tiny):
  """Search-R1's critic in CARL's table 5: a linear head on the initial model."""
  rows = lay_out(boundary_forest(tiny), 64, pad_id=0)
  batch = jax.tree.map(jnp.asarray, make_batch(rows, 4, critic=True))
  mesh = meshes.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  config = base.get_config().unlock()
  config.critic.update(enabled=True, learning_rate=1e-2, backbone_rate=0.0)
  params = jax.device_put(tiny.random_params(tiny.decoder, 0), transfer.replicated(mesh))
  state, step = open_critic(config, tiny.decoder, params, mesh, 10)
  assert sum(m.size for m in jax.tree.leaves(state.opt_state)) < 3 * tiny.decoder.hidden_size
  state, row = step(state, batch)
  jax.tree.map(np.testing.assert_array_equal, state.params['decoder'], params)
  assert float(np.abs(np.asarray(state.params['head']['kernel'])).max()) == pytest.approx(1e-2, rel=0.01)
  assert float(row['grad_norm']) > 0


def test_the_critics_error_is_over_boundary_states_alone(tiny):
  rows = lay_out(boundary_forest(tiny), 64, pad_id=0, how='step-mean')
  part = jax.tree.map(lambda x: jnp.asarray(x[0]) if np.ndim(x) else x, make_batch(rows, 8, critic=True))
  head = value_head.initial_mlp(tiny.decoder.hidden_size, jax.random.key(2))
  params = tiny.random_params(tiny.decoder, 0) | {'value_head': head}
  loss = lambda params: steps.critic_loss(params, part, config=tiny.decoder, shared=True, coef=2.0)
  (error, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  assert not grads['embedding'].any()  # the policy's alone: `critic_grad_norm` is that of what is clipped
  assert float(error) == pytest.approx(0.25, rel=1e-5)  # 0.5 in every state, against 0 and 1; the mean of means
  assert int((np.asarray(part.value_weights) > 0).sum()) == 12  # two segments of each of six trees
