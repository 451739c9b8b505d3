"""Policies: their rollouts, their weights."""

from jaxsearch.commands.command import (
  CHECKPOINT,
  CORPUS,
  LIMIT,
  QUESTIONS,
  check_inputs,
  command,
  flag,
  load_questions,
  open_agent,
  print_figures,
  progress_of,
  sampling_of,
)
from jaxsearch.config_check import from_saved, to_saved
from jaxsearch.flags import TRAINED, UsageError, copy_fields, place, policy
from jaxsearch.parallel import memory


@command('quickstart', CHECKPOINT, QUESTIONS, CORPUS, flag('--out', 'JSONL file to write', place(), required=True),
         flag('--n', 'rollouts for each question; 5 if not given', int, '>= 1', default=5),
         flag('--keep', 'most demonstrations of a question; all right ones if not given', int, '>= 1'),
         flag('--temperature', 'of sampling; config.sampler.temperature if not given', float, '>= 0'), LIMIT, examples=(
           '--checkpoint runs/quickstart --out demonstrations.jsonl',
           '--config search_r1_grpo --n 10 --keep 2 --limit 500 --out demonstrations.jsonl'))
def sample(config, flags) -> None:
  """Sample rollouts and keep the right ones as demonstrations for sft."""
  if flags.keep is not None and flags.keep > flags.n:
    raise UsageError(f'--keep={flags.keep} means nothing with --n={flags.n}: there are no more chains of a question')
  check_inputs(config, flags)
  temperature = sampling_of(flags, config.sampler.temperature).temperature
  from jaxsearch.training import rejection
  questions = load_questions(config, flags.questions or config.data.questions, flags.limit)
  agent, key = open_agent(config, flags, questions)
  with progress_of(len(questions) * flags.n, 'chains') as report:
    groups = rejection.sample(agent, questions, flags.n, key, temperature=temperature, on_progress=report)
  selected = rejection.select(groups, flags.keep)
  rejection.write(flags.out, [tree for group in selected for tree in group])
  print_figures(rejection.figures(groups, selected) | {'out': flags.out})


@command('quickstart',
         flag('--checkpoint', 'run folder, a checkpoint in it, or an adapter', policy, required=True),
         flag('--out', 'folder to write', place(folder=True), required=True),
         flag('--dtype', 'of the weights: float32 or bfloat16; as they are if not given', choices=('float32', 'bfloat16')),
         flag('--adapter', 'write only the adapter of a run with config.lora: a folder for --checkpoint, without the base', bool),
         examples=('--checkpoint runs/quickstart --out policy',
                   '--checkpoint runs/quickstart/checkpoints/20 --out policy --dtype bfloat16'))
def export(config, flags) -> None:
  """Write a checkpoint as a Hugging Face folder.

  Its jaxsearch.json holds the config, so that the folder serves as --checkpoint like the run itself.
  """
  import jax

  from jaxsearch import __version__
  from jaxsearch.evaluation.agents import tokenizer_of
  from jaxsearch.models import hub
  from jaxsearch.models.decoder import Decoder
  from jaxsearch.training.checkpoint import load_params, save_adapter
  if flags.adapter:
    host = save_adapter(flags.checkpoint, flags.out, flags.dtype or None)
    print(f'step {host["step"]} written to {flags.out}')
    return
  model_config, params, host = load_params(flags.checkpoint, base=config.model)
  trained = from_saved(host['config'])
  copy_fields(TRAINED, config, trained)
  run = {'jaxsearch': __version__, 'jax': jax.__version__, 'step': host['step'],
         'config': to_saved(trained) | {'tokenizer': ''}}  # the folder has its own
  with memory.named('writing the weights', 'set --dtype bfloat16'):
    hub.save(Decoder(model_config, params=params), flags.out, tokenizer_of(config, host, flags.checkpoint),
             dtype=flags.dtype or None, run=run)
  print(f'step {host["step"]} written to {flags.out}')
