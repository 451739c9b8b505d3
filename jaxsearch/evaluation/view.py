"""`jaxsearch view`: the rollouts of runs, and of results of eval and bench, as one page that needs nothing else.

The page (view.html) holds an index of all questions and the rollouts themselves in blocks of gzipped JSON lines; it
unpacks a block when it is looked at or searched, so that a hundred megabytes open at once. Served (`app`), it
fetches the index anew while a run trains, and each block when it is wanted.
"""

import base64
import collections
import json
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxsearch.data.jsonl import DataError
from jaxsearch.evaluation.results import read_predictions
from jaxsearch.training import rollouts, row_files

FOLDER = pathlib.Path(__file__).parent
BLOCK = 1 << 18  # characters of records, about, in a block made here
LARGEST = 400 << 20  # bytes of a page: browsers refuse strings above half a gigabyte
SHOWN = ('reward', 'em', 'f1', 'searches', 'tokens', 'stop', 'prediction')  # of a rollout, in the index


class Source:
  """The rollouts of one run folder, or of a result (or unfinished result) of eval or bench.

  `entries` is the index: for each question at a step what is shown in the table, and `at`, the block, first line and
  number of its records. Raises DataError for what is neither, OSError.
  """

  def __init__(self, path: str):
    self.path, self.generation, self._config = pathlib.Path(path), 0, {}
    self._seen: list = []  # size and time of the files as they were read
    self._members: list[tuple[int, int]] = []  # of the file of rollouts: from where to where
    self._made: list[bytes] = []  # blocks of what is in no such file
    self._trained: list[dict] = []
    self._answered: list[dict] = []
    if self.path.is_dir():
      config = self.path / 'config.json'
      self._config = json.loads(config.read_text(encoding='utf-8')) if config.exists() else {}
      if not any((self.path / name).exists() for name in (rollouts.FILE, 'evaluations.jsonl')):
        raise DataError(f'{path}: no rollouts in it: not a run folder, or one of a run with config.rollouts=0')
    self.refresh()

  @property
  def entries(self) -> list[dict]:
    return self._trained + self._answered

  @property
  def version(self) -> str:
    """Changes with the index."""
    return f'{self.generation}.{len(self._members)}.{len(self._answered)}'

  def refresh(self) -> None:
    """Reads what was written since; everything, if what was read before is not there any more."""
    names = ('evaluations.jsonl', rollouts.FILE) if self.path.is_dir() else ('',)
    seen = [(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None
            for file in map(self.path.joinpath, names)]
    if seen == self._seen and any(seen):
      return
    self._seen = seen
    if self.path.is_dir():
      self._answered, self._made = _packed('held out', (
        (row['step'], row['temperature'], [sample]) for row in row_files.read(self.path / 'evaluations.jsonl')
        for sample in row.get('samples', ())))
      self._read_rollouts()
      return
    groups = collections.defaultdict(list)
    for record in read_predictions(self.path):
      groups[record.get('benchmark', record.get('source', '')), record['id']].append(record)
    self._answered, self._made = _packed('answered', ((None, None, group) for group in groups.values()))
    self.generation += 1

  def _read_rollouts(self) -> None:
    """Reads what was appended to the rollouts of training."""
    file, (start, last) = self.path / rollouts.FILE, self._members[-1] if self._members else (0, 0)
    if self._members:
      _, end, records = next(rollouts.members(file, start), (0, None, []))
      if end != last or (records and records[0]['step'] != self._trained[-1]['step']):  # the run was resumed
        self._members, self._trained, last = [], [], 0
        self.generation += 1
    for start, end, records in rollouts.members(file, last):
      if records:
        self._trained.append(_entry('training', records[0]['step'], None, records, f't{len(self._members)}', 0))
        self._members.append((start, end))

  def block(self, name: str) -> bytes:
    """Returns a gzip member of JSON lines. Raises IndexError, ValueError, OSError."""
    kind, number = name[0], int(name[1:])
    if kind == 'a':
      return self._made[number]
    start, end = self._members[number]
    with open(self.path / rollouts.FILE, 'rb') as file:
      file.seek(start)
      return file.read(end - start)

  def index(self, wanted: Callable[[Mapping], bool] = lambda entry: True) -> dict[str, Any]:
    """Returns what the page knows of all questions; those that are not `wanted` have no records behind them."""
    about = {name: self._config[name] for name in ('method', 'model', 'seed', 'steps') if name in self._config}
    return {'name': self.path.resolve().name, 'path': str(self.path), 'version': self.version,
            'generation': self.generation, 'about': about, 'shown': SHOWN,
            'entries': [entry if wanted(entry) else entry | {'at': None} for entry in self.entries]}


def _packed(kind: str, groups: Iterable[tuple[int | None, float | None, list[dict]]]) -> tuple[list[dict], list[bytes]]:
  """Returns (entries, blocks) of (step, temperature, records of a question)."""
  entries, blocks, waiting, size = [], [], [], 0
  for step, temperature, records in groups:
    entries.append(_entry(kind, step, temperature, records, f'a{len(blocks)}', len(waiting)))
    waiting += records
    size += sum(len(span['text']) for record in records for span in record['spans'])
    if size > BLOCK:
      blocks.append(rollouts.pack(waiting))
      waiting, size = [], 0
  return entries, blocks + [rollouts.pack(waiting)] * bool(waiting)


def _entry(kind: str, step: int | None, temperature: float | None, records: Sequence[Mapping], block: str,
           line: int) -> dict:
  first, shown = records[0], []
  for record in records:
    calls = [call for span in record['spans'] for call in span.get('calls', ())]
    shown.append([record.get(name) for name in SHOWN] + [sum('failure' in call for call in calls)])
  return {'kind': kind, 'step': step, 'temperature': temperature, 'id': first['id'], 'question': first['question'],
          'golds': first['golden_answers'], 'source': first.get('benchmark', first.get('source', '')),
          'rollouts': shown, 'at': [block, line, len(records)]}


def choose(source: Source, steps: tuple[int, int] | None, most: int | None) -> Callable[[Mapping], bool]:
  """Returns which entries get their rollouts into the page.

  Those of these steps (first, last), at most so many questions of each.
  """
  counts, kept = collections.Counter(), set()
  for entry in source.entries:
    place = entry['kind'], entry['step'], entry['temperature']
    inside = steps is None or entry['step'] is None or steps[0] <= entry['step'] <= steps[1]
    if inside and (most is None or counts[place] < most):
      counts[place] += 1
      kept.add(id(entry))
  return lambda entry: id(entry) in kept


def page(sources: Sequence[Source], steps: tuple[int, int] | None = None, most: int | None = None) -> bytes:
  """Returns the page with everything in it. Raises ValueError if it is too large for a browser."""
  parts, size = [], 0

  def add(name: str, data: bytes) -> None:
    nonlocal size
    encoded = base64.b64encode(data)
    size += len(encoded)
    parts.append(b'<script type="text/plain" id="%s">%s</script>\n' % (name.encode(), encoded))

  for number, source in enumerate(sources):
    index = source.index(choose(source, steps, most))
    text = json.dumps(index, ensure_ascii=False).encode(errors='replace')
    add(f'index-{number}', zlib.compress(text, wbits=31))
    for block in sorted({entry['at'][0] for entry in index['entries'] if entry['at']}):
      add(f'block-{number}-{block}', source.block(block))
      if size > LARGEST:
        raise ValueError(f'{source.path}: too large for a page; choose with --steps or --most, '
                         'or look at it with --serve')
  return _filled(b''.join(parts), len(sources), live=False)


def _filled(data: bytes, number: int, live: bool) -> bytes:
  """Returns the template with the shared style and script, and this data."""
  template = (FOLDER / 'view.html').read_bytes()
  for name in ('rollout.css', 'rollout.js'):
    template = template.replace(f'/* {name} */'.encode(), (FOLDER / name).read_bytes())
  head, tail = template.split(b'<!-- data -->')
  constants = f'<script>const RUNS = {number}, LIVE = {str(live).lower()}</script>\n'
  return head + data + constants.encode() + tail


def app(sources: Sequence[Source]):
  """Returns a Starlette application that serves the page, for this machine alone. Needs the extra `serve`."""
  from starlette.applications import Starlette
  from starlette.exceptions import HTTPException
  from starlette.middleware import Middleware
  from starlette.middleware.trustedhost import TrustedHostMiddleware
  from starlette.responses import HTMLResponse, JSONResponse, Response
  from starlette.routing import Route

  def find(request) -> Source:
    run = request.path_params['run']
    if run >= len(sources):
      raise HTTPException(404)
    return sources[run]

  # not on threads: one request at a time reads and changes a source
  async def show(request) -> Response:
    return HTMLResponse(_filled(b'', len(sources), live=True))

  async def index(request) -> Response:
    source = find(request)
    source.refresh()
    same = request.query_params.get('version') == source.version
    return Response(status_code=204) if same else JSONResponse(source.index())

  async def block(request) -> Response:
    source = find(request)
    if request.query_params.get('generation') != str(source.generation):
      return Response(status_code=409)  # the page has an old index
    try:
      return Response(source.block(request.path_params['block']), media_type='application/gzip')
    except (IndexError, ValueError) as error:
      raise HTTPException(404) from error

  routes = [Route('/', show), Route('/index/{run:int}', index), Route('/block/{run:int}/{block}', block)]
  no_other_site = Middleware(TrustedHostMiddleware, allowed_hosts=['127.0.0.1', 'localhost'])
  return Starlette(routes=routes, middleware=[no_other_site])
