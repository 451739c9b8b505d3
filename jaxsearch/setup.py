"""Opens what a config names: policy, tokenizer, questions, tools, services, sampler."""

import dataclasses
import functools
import hashlib
import heapq
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxsearch import methods, registry
from jaxsearch.config_check import from_saved
from jaxsearch.data import sources
from jaxsearch.data.questions import Question
from jaxsearch.methods import folding
from jaxsearch.models import gguf_files, hub, lora
from jaxsearch.models.architecture import (
  PRESETS,
  DecoderConfig,
  initial_params,
  parameter_axes,
  parameter_shapes,
  preset,
)
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.parallel import memory, mesh as meshes, transfer
from jaxsearch.rewards import judge
from jaxsearch.sampler.assistants import Assistant, Scorer, first_requests
from jaxsearch.sampler.driver import Agent, Grow
from jaxsearch.sampler.engine import Engine
from jaxsearch.sampler.requests import Generate, Sampling, Tools
from jaxsearch.tools import SearchBackend, SearchBySource, faults, find_backend, find_tool
from jaxsearch.tools.dynamic_batcher import DynamicBatcher
from jaxsearch.tools.noise import NoisySearch
from jaxsearch.tools.python_sandbox import PythonSandbox
from jaxsearch.trees import grammar, grammars, native

RANDOM = 'random:'
SHORT = 16  # tokens of a thought of a few words and a query; a policy that cannot write as many says nothing
LONGEST = 100  # longest questions, whose prompts are measured first; all prompts are if one does not fit


@memory.named('loading the policy', memory.STATE)
def load_policy(config: ConfigDict, mesh: Mesh) -> tuple[DecoderConfig, dict]:
  """Returns (model_config, parameters laid out on `mesh`) of `config.model`.

  Parameters are float32 master weights, or in the compute dtype if `config.optim.master_weights` is off or
  they are frozen under an adapter. Raises NotFinite if one has a value that is not.
  """
  dtype = param_dtype(config)
  if config.model.startswith(RANDOM):
    model_config = _as_run(config, preset(config.model.removeprefix(RANDOM)))
    create = lambda key: initial_params(model_config, key, jnp.dtype(dtype))
    placed = param_shardings(model_config, mesh)
    return model_config, jax.jit(create, out_shardings=placed)(jax.random.key(config.seed))
  model_config, params = _load_weights(config.model, config.dtype, dtype, mesh)
  return _as_run(config, model_config), params


def param_dtype(config: ConfigDict | Mapping[str, Any]) -> str:
  """Returns the dtype in which `load_policy` keeps parameters."""
  return 'float32' if config['optim']['master_weights'] and not config['lora']['rank'] else config['dtype']


def _load_weights(name: str, dtype: str, param_dtype: str, mesh: Mesh) -> tuple[DecoderConfig, dict]:
  """Returns (decoder that computes in `dtype`, parameters) of a model in files, or an adapter on its base."""
  path = model_path(name)
  if hub.is_adapter(path):
    model_config, params, _ = load_adapted(path, mesh)
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    return dataclasses.replace(model_config, dtype=dtype), params
  decoder = hub.load(path, dtype, param_dtype=param_dtype, mesh=mesh)
  transfer.check_finite(decoder.params, name)
  return decoder.config, decoder.params


def load_adapted(folder: str | pathlib.Path, mesh: Mesh,
                 base: str | None = '') -> tuple[DecoderConfig, dict, dict[str, Any]]:
  """Returns (decoder, parameters on `mesh`, `hub.read_run`) of an adapter, merged into its base."""
  model_config, adapter, run = hub.load_adapter(folder)
  base = base_of(run, base, folder)
  placed, _ = adapter_layout(from_saved(run['config']), model_config, mesh)
  adapter = jax.tree.map(transfer.place, adapter, placed)
  return model_config, merge_with_base(adapter, run, base, mesh), run


def base_of(run: Mapping[str, Any], named: str | None, folder: str | pathlib.Path) -> str:
  """Returns the base model of a run or adapter in `folder`: its config's if it ships with us, else `named`.

  `named` is what the user's config says: the folder may come from anyone, so it does not decide what is
  opened on this machine. With None it does. Raises ValueError if `named` is no model of the user's.
  """
  theirs = run['config'].get('model', '')
  if named is None or registry.is_shipped(theirs) or pathlib.Path(folder) in registry.POLICIES.values():
    return theirs
  if not named or registry.is_shipped(named):
    raise ValueError(
      f'{folder} began with model={theirs!r}, and a checkpoint does not say what is opened here: set '
      '--config.model to it, or `jaxsearch export` an adapter with its base')
  return named


def merge_with_base(adapter: dict, run: Mapping[str, Any], base: str, mesh: Mesh) -> dict:
  """Returns a policy's parameters from its adapter on `mesh` and the model `base` that its run began with.

  Raises ValueError if the base is another now, NotFinite for values that are not finite.
  """
  config = from_saved(run['config'] | {'model': base})
  model_config, base = load_policy(config, mesh)
  hub.check_base(run, hub.fingerprint(base), config.model)
  params = merger(config, model_config, mesh)(base, adapter)
  transfer.check_finite(params, f'{config.model} with its adapter')
  return params


def architecture(config: ConfigDict) -> DecoderConfig:
  """Returns the decoder of `config.model`; if no such folder is here, the preset that fits its name."""
  name, path = config.model.removeprefix(RANDOM), model_path(config.model)
  if name == config.model and pathlib.Path(path).exists():
    is_adapter = hub.is_adapter(path)
    return _as_run(config, hub.load_adapter(path)[0] if is_adapter else hub.architecture(path))
  plain = lambda text: re.sub('[^a-z0-9.]', '', pathlib.Path(text).name.lower())
  known = [model for model in PRESETS if plain(name).startswith(plain(model))]
  if not known:
    raise ValueError(f'model={config.model!r}: no such folder, and its name is none of {", ".join(PRESETS)}')
  return _as_run(config, preset(max(known, key=len)))


def _as_run(config: ConfigDict, model_config: DecoderConfig) -> DecoderConfig:
  check_positions(config, model_config, f'model={config.model!r}')
  return dataclasses.replace(model_config, dtype=config.dtype, remat=config.remat, attention=config.attention)


def check_positions(config: ConfigDict, model_config: DecoderConfig, name: str) -> None:
  """Raises ValueError if the sampler's paths may be longer than a model has positions."""
  if config.sampler.length > model_config.max_position:
    raise ValueError(f'sampler.length={config.sampler.length} is more than the {model_config.max_position} '
                     f'positions of {name}')


def param_shardings(model_config: DecoderConfig, mesh: Mesh) -> dict:
  """Returns the layout of a decoder's parameters on `mesh`."""
  return meshes.shardings(parameter_axes(model_config), parameter_shapes(model_config), mesh)


def model_path(name: str) -> str | pathlib.Path:
  """Returns the path of a model's weights; models of the world and shipped policies have names."""
  if name.startswith(gguf_files.PACKAGE):
    return gguf_files.in_package(name)
  return registry.find('models', name) if name in registry.ENTRIES['models'] else registry.policy_path(name)


def tokenizer_path(name: str) -> str | pathlib.Path:
  """Returns the path of a model's tokenizer: the world's, that of an adapter's base, or its own."""
  if name in registry.ENTRIES['models'] or name.startswith(RANDOM):
    return registry.find('tokenizers', 'world')
  path = model_path(name)
  if hub.is_adapter(path):
    run = hub.read_run(path)
    return tokenizer_of(run, base_of(run, '', path), path)
  return path


def tokenizer_of(run: Mapping[str, Any], base: str, folder: str | pathlib.Path) -> str | pathlib.Path:
  """Returns the tokenizer path of a run whose base model is `base`; ValueError if it named another."""
  if theirs := run['config'].get('tokenizer', ''):
    raise ValueError(f'{folder} was trained with tokenizer={theirs!r}, and a checkpoint does not say what is '
                     'opened here: set --config.tokenizer')
  return tokenizer_path(base)


def load_tokenizer(config: ConfigDict) -> Tokenizer:
  """Loads the tokenizer that `config.tokenizer` names, else the model's own."""
  return Tokenizer.load(config.tokenizer or tokenizer_path(config.model))


def new_adapter(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh) -> dict:
  """Creates the adapter that `config.lora` describes; float32 unless `config.optim.master_weights` is off."""
  dtype = jnp.dtype('float32' if config.optim.master_weights else config.dtype)
  create = lambda key: lora.initial_adapter(model_config, config.lora.rank, config.lora.targets, key, dtype)
  placed, _ = adapter_layout(config, model_config, mesh)
  return jax.jit(create, out_shardings=placed)(jax.random.fold_in(jax.random.key(config.seed), 0))


def adapter_layout(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh) -> tuple[dict, dict]:
  """Returns (shardings, shapes) of the adapter that `config.lora` describes."""
  shapes = lora.adapter_shapes(model_config, config.lora.rank, config.lora.targets)
  return meshes.shardings(lora.adapter_axes(model_config, config.lora.targets), shapes, mesh), shapes


def merger(config: ConfigDict, model_config: DecoderConfig, mesh: Mesh) -> Callable[[dict, dict], dict]:
  """Returns the compiled (base, adapter) -> parameters of the policy, in the layout of the base."""
  merge = functools.partial(lora.merge, alpha=config.lora.alpha)
  return jax.jit(merge, out_shardings=param_shardings(model_config, mesh))


def load_questions(config: ConfigDict, name: str) -> list[Question]:
  """Loads the questions of `name`, see data/sources.py; `config.data` selects among those of the world."""
  questions = sources.load_questions(name, hops=config.data.hops, arithmetic=config.data.arithmetic)
  faulty = 'irrelevant' in (config.grow.get('fault'), config.eval.grow.get('fault'))
  return faults.with_others(questions) if faulty else questions


@memory.named('reading and indexing the passages',
              'take fewer passages (data.corpus), or set search.engine=sparse')
def open_backend(config: ConfigDict, corpus: str = '', mesh: Mesh | None = None) -> SearchBackend:
  """Opens the search back end of `config.search`; `corpus` takes the place of `config.data.corpus`."""
  search, corpus = config.search, corpus or config.data.corpus
  backend = find_backend(search.backend)
  reads = backend.corpus(search)
  generator = functools.partial(_generator, config.dtype, mesh)
  opened = functools.partial(backend.open, seed=config.seed, generator=generator)
  if not search.by_source:
    documents = sources.load_corpus(corpus) if reads else None
    back_end = opened(search, corpus=documents)
    return NoisySearch(back_end, documents, search.noise, search.noise_each,
                       seed=config.seed) if search.noise else back_end
  corpora = sources.load_corpora(corpus) if reads else {}
  parts = {source: opened(search, corpus=documents) for source, documents in corpora.items()}

  def find_part(source: str | None) -> SearchBackend:
    if source is None or (reads and source not in parts):
      raise ValueError(f'there is nothing to search for questions of {source or "no source"}')
    allowed = r'[\w-]+' if re.search(r'//[^/]*\{source}', search.url) else r'[\w-]+([./][\w-]+)*'
    if not re.fullmatch(allowed, str(source)):  # questions choose neither a host nor a folder above
      raise ValueError(f'a source {source!r} fits into no address or path')
    filled = {name: value.replace('{source}', str(source)) if isinstance(value, str) else value
              for name, value in search.items()}
    return parts[source] if reads else opened(ConfigDict(filled), corpus=None)

  return SearchBySource(find_part)


def _generator(dtype: str, mesh: Mesh | None, model: str, temperature: float) -> Callable:
  """Returns (prompts, seeds) -> replies of a model on a sampler of its own, for search.writer 'model'."""
  engine = _frozen_engine(ConfigDict(dict(model=model, slots=16, length=1024)), dtype, mesh)
  if engine.tokenizer.chat_template is None:
    raise ValueError(f"{model} cannot be search.writer 'model': without a chat template it follows no "
                     'instruction')
  if jax.default_backend() != 'cpu':  # few programs; compiled on demand, they would fail the first searches
    engine.compile_all()
  assistant = Assistant(engine, max_tokens=512, stop=(), chat=True, temperature=temperature)
  batched = DynamicBatcher(lambda items: assistant(*zip(*items)))
  return lambda prompts, seeds: batched(list(zip(prompts, seeds)))


def load_assistant(settings: ConfigDict, dtype: str, mesh: Mesh | None = None) -> Assistant:
  """Loads the frozen model of a config group such as `reader`, greedy, on a sampler of its own."""
  engine = _frozen_engine(settings, dtype, mesh)
  return Assistant(engine, settings.max_tokens, tuple(settings.stop), settings.chat)


def _frozen_engine(settings: ConfigDict, dtype: str, mesh: Mesh | None) -> Engine:
  mesh = mesh or meshes.of_host()
  model_config, params = _load_weights(settings.model, dtype, dtype, mesh)
  tokenizer = Tokenizer.load(tokenizer_path(settings.model))
  length = min(settings.length, model_config.max_position)  # what does not fit fails by name
  engine = Engine(model_config, tokenizer, slots=settings.slots, length=length, mesh=mesh)
  engine.load(params)
  return engine


def load_judge(settings: ConfigDict, dtype: str, mesh: Mesh | None = None) -> Callable:
  """Loads the judge of a config group `judge`, see rewards/judge.py."""
  if settings.kind in registry.ENTRIES['judges']:
    return judge.erring(registry.find('judges', settings.kind), settings.errors, settings.lenient)
  if settings.kind == 'local':
    return judge.LanguageJudge(load_assistant(settings, dtype, mesh), settings.templates)
  from jaxsearch.tools.chat import Chat
  chat = Chat(settings.url, settings.model, max_tokens=settings.max_tokens, timeout=settings.timeout,
              concurrency=settings.concurrency, cache=settings.cache or None)
  return judge.LanguageJudge(chat.replies, settings.templates, settings.concurrency)


def _when_asked(load: Callable) -> Callable:
  """Wraps `load` so that a service is loaded when it is first called, since most runs never call it."""
  def put_off(*args):
    opened = functools.cache(lambda: load(*args))
    return lambda items: opened()(items)
  return put_off


SERVICES = {'reader': load_assistant, 'judge': load_judge, 'second_judge': load_judge,  # how each is opened
            'classifier': _when_asked(load_assistant),
            'refiner': _when_asked(lambda *group: Scorer(_frozen_engine(*group)))}


def open_tools(config: ConfigDict, corpus: str = '', mesh: Mesh | None = None,
               services: Sequence[str] = ()) -> Tools:
  """Opens search back end, sandbox, and the `services` by name, each from the config group of that name."""
  offered = {name: find_tool(name) for name in config.tools}
  if config.mcp.servers:
    from jaxsearch.tools.mcp_client import open_servers
    offered |= open_servers(config.mcp, offered)
  search = open_backend(config, corpus, mesh)
  if opening := [name for name, tool in offered.items() if tool.opens]:
    if hasattr(search, 'open'):
      search.open('')  # reads the names of all documents; of millions it takes longer than a call may
    elif not config.search.by_source:
      raise ValueError(f"tools: {opening[0]!r} opens documents, which search.backend="
                       f"{config.search.backend!r} does not: take 'bm25' or 'index'")
  slowest = max(config.search.timeout, config.mcp.timeout, config.python.seconds)
  return Tools(
    search=search, topk=config.search.topk, python=PythonSandbox(**config.python),
    services={name: SERVICES[name](config[name], config.dtype, mesh) for name in services},
    deadline=max(60.0, 2 * slowest),  # calls wait for a worker, too
    workers=config.sampler.tool_workers, max_observation=config.sampler.max_observation,
    answer_reserve=max(32, config.grow.get('context_tokens', 0)), words=config.search.words, offered=offered)


def answering_services(config: ConfigDict) -> list[str]:
  """Returns the services that answers depend on; judges and readers of trained methods serve training."""
  method, settings = methods.find_method(config.method), dict(config.grow) | dict(config.eval.grow)
  if not hasattr(method, 'credit'):
    return list(getattr(method, 'SERVICES', ()))
  return ['refiner'] if settings.get('refiner') == 'frozen' and 'refiner' in config else []


def weights_folder(config: ConfigDict) -> pathlib.Path:
  """Returns where new weights are written for servers: a folder of this run alone."""
  if config.sampler.folder:
    return pathlib.Path(config.sampler.folder, hashlib.sha256(config.out.encode()).hexdigest()[:12])
  return pathlib.Path(config.out, 'weights')


def open_engine(config: ConfigDict, model_config: DecoderConfig, tokenizer: Tokenizer,
                mesh: Mesh | None = None) -> Any:
  """Opens the engine of `config.sampler`, ours or one on servers, without parameters yet."""
  sampler = config.sampler
  if sampler.engine != 'jax':
    from jaxsearch.sampler.remote import RemoteEngine
    return RemoteEngine(
      sampler.engine, model_config, tokenizer, urls=sampler.urls, slots=sampler.slots, length=sampler.length,
      folder=weights_folder(config), timeout=sampler.timeout,
      episode_deadline=sampler.episode_deadline)
  others = {'temperature', 'max_observation', 'tool_workers', 'release',  # of sampling, tools and the loop
            'engine', 'urls', 'folder', 'timeout'}  # of engines on servers
  settings = {name: value for name, value in sampler.items() if name not in others}
  return Engine(model_config, tokenizer, mesh=mesh or meshes.of_host(), **settings)


def make_agent(config: ConfigDict, engine: Engine, tools: Tools, /, **changes) -> Agent:
  """Returns the agent of a config; `changes` are of the arguments of `grow`."""
  grammar = open_grammar(config, engine.tokenizer, tools, **changes)
  return Agent(engine, bind_grow(config, **changes), tools, Sampling(config.sampler.temperature), grammar)


def open_chat_agent(config: ConfigDict, url: str, model: str, corpus: str = '') -> Agent:
  """Opens the agent of a config with the model `model` of the chat server at `url` for its policy."""
  from jaxsearch.sampler.chat_policy import ChatServer
  from jaxsearch.tools.chat import Chat
  chat = Chat(url, model, timeout=300.0)  # a large model thinks for minutes
  server = ChatServer(chat, model, load_tokenizer(config), config.sampler.length, config.sampler.slots)
  tools = open_tools(config, corpus, services=answering_services(config))
  return make_agent(config, server, tools, **dict(config.eval.grow) | of_server(config))


def of_server(config: ConfigDict) -> dict[str, Any]:
  """Returns the arguments of `grow` that differ for a chat server, which has the chat template."""
  speaks = config.grow.get('grammar', 'tags') != 'tags'
  return ({'chat': False} if 'chat' in config.grow else {}) | ({'grammar': native.SERVER} if speaks else {})


def bind_grow(config: ConfigDict, /, **changes) -> Grow:
  """Returns the method's `grow` with its arguments bound."""
  settings = dict(config.grow) | changes
  bound = {name: value for name, value in settings.items() if name not in native.SETTINGS}
  return functools.partial(folding.folding, methods.find_method(config.method).grow, **bound)


def open_grammar(config: ConfigDict, tokenizer: Tokenizer, tools: Tools | None = None, /,
                 **changes) -> grammars.Tagged:
  """Opens the grammar of `config.grow` with the method's own tools, else those that `tools` offers.

  Raises ValueError if the tokenizer does not have it.
  """
  method, settings = methods.find_method(config.method), dict(config.grow) | changes
  speech = {name: settings[name] for name in native.SETTINGS if name in settings}
  if tools is None or not tools.offered or hasattr(method, 'TOOLS'):
    offered = {name: find_tool(name) for name in getattr(method, 'TOOLS', config.tools or ('search',))}
  else:
    offered = tools.offered
  opened = native.open_grammar(tokenizer, getattr(method, 'TAGS', grammar.SEARCH_R1), offered, **speech)
  if (called := (*config.tools, *config.mcp.servers)) and not isinstance(opened, native.Native):
    raise ValueError(f"tools={called!r} are called, which the chat template of "
                     f"{config.tokenizer or config.model} does not say how: set grow.grammar='hermes', say")
  return opened


def check_room(config: ConfigDict, tokenizer: Tokenizer, questions: Sequence[Question],
               say: Callable[[str], None], /, **changes) -> None:
  """Says how many prompts leave the policy no room for a token, and how many less than a whole span.

  `changes` are of the arguments of `grow`. Raises ValueError if no prompt leaves room for a short span, or if
  `grow.chat` is set and there is no chat template.
  """
  if (dict(config.grow) | changes).get('chat') and tokenizer.chat_template is None:
    name = config.tokenizer or config.model
    raise ValueError(f'grow.chat=True: the tokenizer of {name} has no chat template')
  length, speech = config.sampler.length, open_grammar(config, tokenizer, **changes)
  measured = functools.partial(_first_span, bind_grow(config, **changes), speech)
  longest = heapq.nlargest(LONGEST, questions, lambda question: len(question.question))
  if all(sum(measured(question)) <= length for question in longest):
    return
  prompts, spans = np.array([measured(question) for question in questions]).T
  room, leaves = length - prompts, f'sampler.length={length} leaves'
  if np.all(room < np.minimum(spans, SHORT)):
    raise ValueError(f'{leaves} no room to write after any prompt: they have {prompts.min()} to '
                     f'{prompts.max()} tokens, and a short span has {min(spans.max(), SHORT)}')
  short = {'no room to write': room <= 0, f'less than grow.max_tokens={spans.max()}': room < spans}
  for what, few in short.items():
    if few.any():
      say(f'{leaves} {what} after the prompts of {few.sum()} of {len(questions)} questions '
          f'(up to {prompts.max()} tokens)')


def _first_span(grow: Grow, speech: grammars.Tagged, question: Question) -> tuple[int, int]:
  """Returns how many tokens precede the policy's first span, and the most it may have; 0, 0 without one."""
  try:
    first = first_requests(grow, question, speech.tokenizer, speech)
  except Exception:  # the rollout names it
    return 0, 0
  generate = (request for request in first if isinstance(request, Generate))
  return max(((request.node.length, request.max_tokens) for request in generate), default=(0, 0))
