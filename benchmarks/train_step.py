"""Speed of a GRPO update on search rollouts: tokens a second, against the machine's arithmetic and against a peer.

    python benchmarks/train_step.py [--rollouts 12] [--steps 3] [--peer /path/to/python-with-tunix]
    python benchmarks/train_step.py --preset qwen2.5-0.5b --dtype bfloat16

The rollouts are ragged, as in multi-turn search: a prompt of 64 tokens, then 1 to 6 turns of 32 generated and 96 retrieved
tokens; only generated tokens are trained on. Tokens of rollouts count, padding does not. `share_of_limit` is the arithmetic that
the update needs (no recomputation, no padding, no logits without a loss), divided by its time and by the speed of the fastest
matrix product in the same run. With --peer the same rollouts go through the GRPO loss and trainer step of google-tunix in another
process, padded as its learner pads them, in a float32 Qwen2 of the same size. Ends with one JSON line.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

PROMPT, GENERATED, RETRIEVED, TURNS = 64, 32, 96, 6
SIZES = dict(vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=2,
             head_dim=64, qkv_bias=True, tie_embeddings=True)


def rollouts(number: int, vocab_size: int = SIZES['vocab_size']) -> list[tuple[np.ndarray, np.ndarray]]:
  """(token ids, which of them were generated) of each rollout; the same in every process."""
  rng = np.random.default_rng(0)
  found = []
  for turns in rng.permutation(np.arange(number) % TURNS + 1):
    generated = np.concatenate([np.zeros(PROMPT, bool)] + [np.arange(GENERATED + RETRIEVED) < GENERATED] * int(turns))
    found.append((rng.integers(1, vocab_size, len(generated)), generated))
  return found


def needed_flops(data, sizes=SIZES) -> float:
  """Multiplications and additions of forward (1) and backward (2) passes: weights, causal attention, logits with a loss."""
  D, L, heads = sizes['hidden_size'], sizes['num_layers'], sizes['num_heads'] * sizes['head_dim']
  kv = sizes['num_kv_heads'] * sizes['head_dim']
  layer = D * (2 * heads + 2 * kv) + 3 * D * sizes['intermediate_size']
  forward = 0
  for tokens, generated in data:
    T = len(tokens)
    forward += 2 * L * layer * T + 2 * L * heads * T * T + 2 * D * sizes['vocab_size'] * int(generated.sum())
  return 3.0 * forward


def best_seconds(step, steps: int) -> float:
  """The fastest of `steps` calls, after one that compiles."""
  step()
  times = []
  for _ in range(steps):
    start = time.perf_counter()
    step()
    times.append(time.perf_counter() - start)
  return min(times)


def machine_flops(dtype: str, sizes=()) -> float:
  """Operations a second of the fastest matrix product among a few sizes."""
  best = 0.0
  for size in sizes or ((512, 1024, 2048) if jax.default_backend() == 'cpu' else (4096, 8192)):
    # Random: of equal numbers products are faster on GPUs.
    a = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), dtype)
    product = jax.jit(jnp.dot)
    best = max(best, 2 * size**3 / best_seconds(lambda: product(a, a).block_until_ready(), 8))
  return best


def open_update(data, config, row_length: int = 0, micro_rows: int = 1):
  """(jitted update, its state, the rollouts as a batch, share of padding) of a decoder with random float32 weights.

  Rows have `row_length` tokens, or as many as the longest rollout.
  """
  import ml_collections

  from jaxsearch import setup
  from jaxsearch.models.architecture import initial_params
  from jaxsearch.parallel import mesh as meshes
  from jaxsearch.training import batch as batches, sft, state as states, step as training
  from jaxsearch.trees.layout import lay_out
  from jaxsearch.trees.tree import Role

  forest = [sft.demonstration(tokens, generated) for tokens, generated in data]
  rng = np.random.default_rng(1)
  for tree in forest:
    for node in tree.nodes(Role.POLICY):
      node.sampler_logprobs, node.advantages = rng.normal(-9, 0.1, len(node.tokens)).tolist(), float(rng.normal())
  rows = lay_out(forest, row_length or max(tree.count() for tree in forest), pad_id=0)
  mesh = meshes.make_mesh(devices=jax.devices()[:1])
  params = jax.jit(lambda key: initial_params(config, key), out_shardings=setup.param_shardings(config, mesh))(
    jax.random.key(0))
  optim = ml_collections.ConfigDict(dict(learning_rate=1e-6, schedule='constant', lr_warmup_updates=0, b1=0.9, b2=0.99,
                                         eps=1e-8, weight_decay=0.0, clip_norm=1.0))
  loss_fn = lambda params, batch: training.policy_loss(
    params, batch, config=config, temperature=1.0, chunk=1024, clip_low=0.2, clip_high=0.2, dual_clip=None,
    kl_coef=0.04, entropy_coef=0.0)
  optimizer, update = training.make_update(loss_fn, params, optim, 1, mesh=mesh, dtype=config.dtype)
  batch = batches.place(batches.make_batch(rows, micro_rows), mesh)
  batch = dataclasses.replace(batch, ref_logprobs=batch.sampler_logprobs)
  return update, states.create_state(params, optimizer, mesh), batch, 1 - float(rows.real.mean())


def ours(data, steps: int, config) -> dict:
  """Seconds of an update, and the share of padding in its rows."""
  update, state, batch, padded = open_update(data, config)

  def step():
    nonlocal state
    state, metrics = update(state, batch)
    metrics['loss'].block_until_ready()

  return {'seconds': best_seconds(step, steps), 'padded_share': padded}


def tunix(data, steps: int) -> dict:
  """The same for tunix: its model, its GRPO loss, its trainer's step, AdamW behind a clip."""
  import optax
  from flax import nnx
  from tunix.models.qwen2 import model as qwen2
  from tunix.rl import algo_core
  from tunix.rl.grpo import grpo_learner
  from tunix.sft import peft_trainer

  config = qwen2.ModelConfig(
    num_layers=SIZES['num_layers'], vocab_size=SIZES['vocab_size'], embed_dim=SIZES['hidden_size'],
    hidden_dim=SIZES['intermediate_size'], num_heads=SIZES['num_heads'], head_dim=SIZES['head_dim'],
    num_kv_heads=SIZES['num_kv_heads'], rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True)
  length = max(len(tokens) for tokens, _ in data) - PROMPT
  completions, mask = np.zeros((2, len(data), length), np.int32)
  for row, (tokens, generated) in enumerate(data):
    completions[row, :len(tokens) - PROMPT] = tokens[PROMPT:]
    mask[row, :len(tokens) - PROMPT] = generated[PROMPT:]
  rng = np.random.default_rng(1)
  logprobs = jnp.asarray(rng.normal(-9, 0.1, completions.shape), jnp.float32)
  prompts = jnp.asarray(np.stack([tokens[:PROMPT] for tokens, _ in data]), jnp.int32)
  example = grpo_learner.TrainExample(
    prompt_ids=prompts, prompt_mask=prompts != 0, completion_ids=jnp.asarray(completions),
    completion_mask=jnp.asarray(mask), advantages=jnp.asarray(rng.normal(size=len(data)), jnp.float32),
    ref_per_token_logps=logprobs, old_per_token_logps=logprobs)
  settings = grpo_learner.GRPOConfig(num_generations=len(data), beta=0.04, epsilon=0.2)
  settings.temperature = 1.0
  model = qwen2.Qwen2(config, rngs=nnx.Rngs(0))
  trainer = peft_trainer.PeftTrainer(
    model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6)),
    peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9))
  trainer.with_loss_fn(lambda model, train_example, algo_config: algo_core.grpo_loss_fn(
    model, train_example, algo_config=settings, pad_id=0, eos_id=-1), has_aux=True)
  trainer.with_gen_model_input_fn(lambda example: {'train_example': example, 'algo_config': None})
  update, _ = trainer.jit_train_and_eval_step()
  return {'seconds': best_seconds(lambda: jax.block_until_ready(update(example)[0]), steps)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--rollouts', type=int, default=12)
  parser.add_argument('--steps', type=int, default=3, help='updates timed; the fastest counts')
  parser.add_argument('--preset', help='a model of jaxsearch/models/architecture.py; the peer has none')
  parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'), help='of activations')
  parser.add_argument('--peer', default='', help='a Python with google-tunix')
  parser.add_argument('--as-peer', action='store_true', help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.as_peer:
    print(json.dumps(tunix(rollouts(arguments.rollouts), arguments.steps)))
    return
  from jaxsearch.models.architecture import DecoderConfig, preset
  config = preset(arguments.preset) if arguments.preset else DecoderConfig(**SIZES)
  config = dataclasses.replace(config, dtype=arguments.dtype, remat='full' if arguments.preset else 'none')
  data, sizes = rollouts(arguments.rollouts, config.vocab_size), dataclasses.asdict(config)
  tokens = sum(len(ids) for ids, _ in data)
  limit, found = machine_flops(arguments.dtype), ours(data, arguments.steps, config)
  result = {
    'tokens_per_second': tokens / found['seconds'], 'share_of_limit': needed_flops(data, sizes) / found['seconds'] / limit,
    'limit_gflops': limit / 1e9, 'tokens': tokens, 'padded_share': found['padded_share'],
  }  # fmt: skip
  if arguments.peer:
    command = [arguments.peer, __file__, '--as-peer', '--rollouts', str(arguments.rollouts), '--steps', str(arguments.steps)]
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    peer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    seconds = json.loads(peer.stdout.strip().split('\n')[-1])['seconds']
    result |= {'tunix_tokens_per_second': tokens / seconds, 'times_tunix': seconds / found['seconds']}
  print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == '__main__':
  main()
