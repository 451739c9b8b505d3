"""`jaxsearch view`: the rollouts of runs and of results as one page that needs nothing else.

The page (view.html) holds an index of all questions and the rollouts themselves in blocks of gzipped JSON
lines; it unpacks a block when it is looked at or searched, so that a hundred megabytes open at once. Served
(`app`), it fetches the index anew while a run trains, and each block when it is wanted.
"""

import base64
import collections
import json
import pathlib
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation.results import read_predictions
from jaxsearch.files import read_json
from jaxsearch.training import rollout_file, row_files

FOLDER = pathlib.Path(__file__).parent
LARGEST = 400 << 20  # bytes of a page: browsers refuse strings above half a gigabyte
SHOWN = ('reward', 'em', 'f1', 'searches', 'tokens', 'stop', 'prediction')  # of a rollout, in the index


class Source:
  """The rollouts of one run folder, or of a result (or unfinished result) of eval or bench.

  Raises DataError for what is neither, OSError.

  Attributes:
    entries: the index: of each question at a step what the table shows, and `at`, the number of its block.
    blocks: gzipped JSON lines, a record each.
    generation: rises with every change of these.
  """

  def __init__(self, path: str):
    self.path, self.generation, self._about, self._seen = pathlib.Path(path), 0, {}, None
    if self.path.is_dir():
      if not any((self.path / name).exists() for name in (rollout_file.FILE, 'evaluations.jsonl')):
        raise DataError(f'{path}: no rollouts in it: not a run folder, or a run with config.rollouts=0')
      config = self.path / 'config.json'
      settings = read_json(config) if config.exists() else {}
      self._about = {name: settings[name] for name in ('method', 'model', 'seed', 'steps')
                     if name in settings}
    self.refresh()

  def refresh(self) -> None:
    """Reads the files again if one has changed."""
    names = ('evaluations.jsonl', rollout_file.FILE) if self.path.is_dir() else ('',)
    seen = [(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None
            for file in map(self.path.joinpath, names)]
    if self._seen and (seen == self._seen or not any(seen)):  # a bench that ends removes its part
      return
    self._seen, self.entries, self.blocks = seen, [], []
    self.generation += 1
    if not self.path.is_dir():
      groups = collections.defaultdict(list)
      for record in read_predictions(self.path):
        groups[record.get('benchmark', record.get('source', '')), record['id']].append(record)
      for group in groups.values():
        self._enter('answered', None, None, group, rollout_file.pack(group))
      return
    if (file := self.path / rollout_file.FILE).exists():
      with open(file, 'rb') as packed:
        for start, end, records in rollout_file.members(file):
          packed.seek(start)
          if records:
            self._enter('training', records[0]['step'], None, records, packed.read(end - start))
    for row in row_files.read(self.path / 'evaluations.jsonl'):
      for sample in row.get('samples', ()):
        self._enter('held out', row['step'], row['temperature'], [sample], rollout_file.pack([sample]))

  def _enter(self, kind: str, step: int | None, temperature: float | None, records: Sequence[Mapping],
             block: bytes) -> None:
    """Adds an entry and its block."""
    first, shown = records[0], []
    for record in records:
      calls = [call for span in record['spans'] for call in span.get('calls', ())]
      shown.append([record.get(name) for name in SHOWN] + [sum('failure' in call for call in calls)])
    self.entries.append({
      'kind': kind, 'step': step, 'temperature': temperature, 'id': first['id'],
      'question': first['question'], 'golds': first['golden_answers'],
      'source': first.get('benchmark', first.get('source', '')), 'rollouts': shown, 'at': len(self.blocks)})
    self.blocks.append(block)

  def index(self, steps: tuple[int, int] | None = None, most: int | None = None) -> dict[str, Any]:
    """Returns what the page knows of all questions; `at` is None beyond `steps` or `most` of a step."""
    counts, entries = collections.Counter(), []
    for entry in self.entries:
      place = entry['kind'], entry['step'], entry['temperature']
      chosen = steps is None or entry['step'] is None or steps[0] <= entry['step'] <= steps[1]
      counts[place] += chosen
      chosen = chosen and (most is None or counts[place] <= most)
      entries.append(entry if chosen else entry | {'at': None})
    return {'name': self.path.resolve().name, 'path': str(self.path), 'generation': self.generation,
            'about': self._about, 'shown': SHOWN, 'entries': entries}


def page(sources: Sequence[Source], steps: tuple[int, int] | None = None, most: int | None = None) -> bytes:
  """Returns the page with the rollouts that `Source.index` chooses; ValueError if it is too large."""
  parts = []
  for number, source in enumerate(sources):
    index = source.index(steps, most)
    text = json.dumps(index, ensure_ascii=False).encode(errors='replace')
    packed = {f'index-{number}': zlib.compress(text, wbits=31)}
    packed |= {f'block-{number}-{entry["at"]}': source.blocks[entry['at']] for entry in index['entries']
               if entry['at'] is not None}
    parts += [f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode()}</script>\n'
              for name, data in packed.items()]
    if sum(map(len, parts)) > LARGEST:
      raise ValueError(f'{source.path}: too large for a page; choose with --steps or --most, '
                       'or look at it with --serve')
  return _filled(''.join(parts), len(sources), live=False).encode(errors='replace')


def _filled(data: str, number: int, live: bool) -> str:
  text = lambda name: (FOLDER / name).read_text(encoding='utf-8')
  template = text('view.html')
  for name in ('rollout.css', 'rollout.js'):
    template = template.replace(f'/* {name} */', text(name))
  constants = f'<script>const RUNS = {number}, LIVE = {str(live).lower()}</script>\n'
  return template.replace('<!-- data -->', data + constants)


def app(sources: Sequence[Source]):
  """Returns a Starlette application that serves the page, for this machine alone. Needs the extra `serve`."""
  from starlette.applications import Starlette
  from starlette.middleware import Middleware
  from starlette.middleware.trustedhost import TrustedHostMiddleware
  from starlette.responses import HTMLResponse, JSONResponse, Response
  from starlette.routing import Route

  server = secrets.token_hex(8)  # a page of an earlier server on this port has other rollouts

  def knows(request, source: Source) -> bool:
    """Tells whether the page that asks has the index of this generation."""
    asked = request.query_params
    return asked.get('server', server) == server and asked.get('generation') == str(source.generation)

  # not on threads: one request at a time reads and changes a source
  async def show(request) -> Response:
    return HTMLResponse(_filled('', len(sources), live=True))

  async def index(request) -> Response:
    source = sources[request.path_params['run']]
    source.refresh()
    unchanged = knows(request, source)
    return Response(status_code=204) if unchanged else JSONResponse(source.index() | {'server': server})

  async def block(request) -> Response:
    source = sources[request.path_params['run']]
    if not knows(request, source):
      return Response(status_code=409)
    return Response(source.blocks[request.path_params['block']], media_type='application/gzip')

  async def missing(request, error) -> Response:
    return Response(status_code=404)

  routes = [Route('/', show), Route('/index/{run:int}', index), Route('/block/{run:int}/{block:int}', block)]
  no_other_site = Middleware(TrustedHostMiddleware, allowed_hosts=['127.0.0.1', 'localhost'])
  return Starlette(routes=routes, middleware=[no_other_site], exception_handlers={IndexError: missing})
