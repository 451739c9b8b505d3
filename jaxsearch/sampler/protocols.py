"""How servers of other projects take and give token ids: what is sent, how a reply is read, new weights.

Each protocol is a class of functions. `generate` and `score` return JSON bodies for `path`; `read` and
`read_scores` take replies apart, raising LookupError, TypeError, AttributeError or ValueError for other
shapes; `load` lists the posts (path, body) by which a server takes the weights in a folder and calls them
`label`.

Servers give log-probabilities at temperature 1 without truncation, so training needs temperature 1, and
top-p and top-k are sent as off: a server may otherwise take them from the model's generation_config.json.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxsearch.sampler.requests import Sampling


class Reply(NamedTuple):
  """Tokens with log-probabilities; `cached` tokens of the prompt were not computed again; `label` of the
  weights that sampled them, None where the server does not say."""
  tokens: list[int]
  logprobs: list[float | None]  # None: the server left it out
  cached: int
  label: str | None


class Vllm:
  """vLLM 0.32, `vllm serve` (vllm-tpu has the same server): vllm/entrypoints/scale_out/token_in_token_out.

  Needs --enable-scale-out; VLLM_SERVER_DEV_MODE=1 to take weights; --enable-prompt-tokens-details to say what
  was cached.
  """
  path = '/inference/v1/generate'
  needs = 'vLLM 0.32 or newer, started with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out'
  stops = True  # it stops at strings, with all tokens in the reply

  @staticmethod
  def generate(ids: Sequence[int], most: int, sampling: Sampling, seed: int, stop: Sequence[str],
               ends: Sequence[int]) -> dict:
    # ignore_eos: the only end tokens are `ends`. Special tokens are kept: a stop string may be one.
    return {'token_ids': ids, 'sampling_params': vars(sampling) | {
      'top_p': 1.0, 'top_k': 0, 'max_tokens': most, 'seed': seed, 'logprobs': 0, 'stop': stop,
      'stop_token_ids': ends, 'ignore_eos': True, 'skip_special_tokens': False}}

  @staticmethod
  def read(reply: Any) -> Reply:
    choice, = reply['choices']
    cached = (reply['usage'].get('prompt_tokens_details') or {}).get('cached_tokens') or 0
    versions = choice.get('weight_versions') or [{'version': None}]
    return Reply(choice['token_ids'], [token['logprob'] for token in choice['logprobs']['content']], cached,
                 versions[0]['version'])

  @staticmethod
  def score(ids: Sequence[int], target: Sequence[int]) -> dict:
    return {'token_ids': [*ids, *target],
            'sampling_params': {'max_tokens': 1, 'logprobs': 0, 'prompt_logprobs': 0}}

  @staticmethod
  def read_scores(reply: Any, target: Sequence[int]) -> Reply:
    found = reply['prompt_logprobs'][-len(target):]
    scores = [logprobs[str(token)]['logprob'] for token, logprobs in zip(target, found, strict=True)]
    return Vllm.read(reply)._replace(tokens=target, logprobs=scores)

  @staticmethod
  def load(folder: str, label: str) -> list[tuple[str, dict]]:
    return [('/collective_rpc', {'method': 'reload_weights', 'kwargs': {'weights_path': folder}}),
            ('/reset_prefix_cache', {}), ('/update_weight_version', {'new_version': label})]


class Sglang:
  """SGLang 0.5.23: python/sglang/srt/managers/io_struct.py, tokenizer_manager.py."""
  path = '/generate'
  needs = 'SGLang 0.5.23 or newer, started without --skip-tokenizer-init'
  stops = True

  @staticmethod
  def generate(ids: Sequence[int], most: int, sampling: Sampling, seed: int, stop: Sequence[str],
               ends: Sequence[int]) -> dict:
    return {'input_ids': ids, 'return_logprob': True, 'sampling_params': vars(sampling) | {
      'top_p': 1.0, 'top_k': -1, 'max_new_tokens': most, 'sampling_seed': seed, 'stop': stop or None,
      'stop_token_ids': ends}}

  @staticmethod
  def read(reply: Any) -> Reply:
    about = reply['meta_info']  # `output_ids` may lack the token that it stopped at
    found = about['output_token_logprobs']
    return Reply([token for _, token, *_ in found], [logprob for logprob, *_ in found],
                 about.get('cached_tokens', 0), about.get('weight_version'))

  @staticmethod
  def score(ids: Sequence[int], target: Sequence[int]) -> dict:
    return {'input_ids': [*ids, *target], 'return_logprob': True, 'logprob_start_len': len(ids) - 1,
            'sampling_params': {'max_new_tokens': 0}}

  @staticmethod
  def read_scores(reply: Any, target: Sequence[int]) -> Reply:
    found = {(place, token): logprob for place, (logprob, token, *_) in enumerate(
      reply['meta_info']['input_token_logprobs'][-len(target):])}
    return Sglang.read(reply)._replace(tokens=target, logprobs=[found[key] for key in enumerate(target)])

  @staticmethod
  def load(folder: str, label: str) -> list[tuple[str, dict]]:
    return [('/update_weights_from_disk', {'model_path': folder, 'weight_version': label})]


class LlamaCpp:
  """llama.cpp's server (xllamacpp 2026.10): tools/server/README.md. It takes no new weights.

  It omits the log-probabilities of a stop string's tokens, so no stop strings are sent. It also omits those
  of tokens that end within a character: another request asks for them, with those of all other tokens.
  """
  path = '/completion'
  needs = "llama.cpp's server of 2026 or newer"
  stops = False

  @staticmethod
  def generate(ids: Sequence[int], most: int, sampling: Sampling, seed: int, stop: Sequence[str] = (),
               ends: Sequence[int] = ()) -> dict:
    return vars(sampling) | {'prompt': ids, 'n_predict': most, 'seed': seed, 'n_probs': 1,
                             'return_tokens': True, 'samplers': ['temperature']}

  @staticmethod
  def read(reply: Any) -> Reply:
    found, tokens = list(reply.get('completion_probabilities', ())), reply['tokens']
    logprobs = [found.pop()['logprob'] if found and found[-1]['id'] == token else None
                for token in reversed(tokens)]  # the last token of a character has the log-probability
    if found:
      raise ValueError(f'log-probabilities of other tokens than {tokens}')
    return Reply(tokens, logprobs[::-1], reply['timings']['cache_n'], None)

  @staticmethod
  def score(ids: Sequence[int], target: Sequence[int]) -> dict:
    """Scores the first token alone: forced by a bias, which the log-probability does not count."""
    return LlamaCpp.generate(ids, 1, Sampling(), 0) | {'logit_bias': [[target[0], 1e6]]}

  @staticmethod
  def read_scores(reply: Any, target: Sequence[int]) -> Reply:
    return LlamaCpp.read(reply)

  @staticmethod
  def score_all(ids: Sequence[int], end: int) -> dict:
    """Scores every token of the vocabulary; forces `end`, a token of whole characters."""
    return LlamaCpp.score(ids, [end]) | {'n_probs': 2**20}

  @staticmethod
  def read_all(reply: Any, token: int) -> Reply:
    first, = reply['completion_probabilities']
    logprobs = {each['id']: each['logprob'] for each in first['top_logprobs']}
    return LlamaCpp.read(reply)._replace(tokens=[token], logprobs=[logprobs[token]])

  @staticmethod
  def load(folder: str, label: str) -> list[tuple[str, dict]]:
    return []


PROTOCOLS = {'vllm': Vllm, 'sglang': Sglang, 'llama_cpp': LlamaCpp}
