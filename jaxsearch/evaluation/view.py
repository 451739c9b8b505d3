"""`jaxsearch view`: the rollouts of runs, and of results of eval and bench, as one page that needs nothing else.

The page (view.html) holds an index of all questions and the rollouts themselves in blocks of gzipped JSON lines; it unpacks a
block when it is looked at or searched, so that a hundred megabytes open at once. Served (`app`), it fetches the index anew while
a run trains, and each block when it is wanted.
"""

import base64
import collections
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxsearch.data.jsonl import DataError
from jaxsearch.training import rollouts, row_files

TEMPLATE = pathlib.Path(__file__).with_name('view.html')
BLOCK = 1 << 18  # characters of records, about, in a block made here
LARGEST = 400 << 20  # bytes of a page: browsers refuse strings above half a gigabyte
SHOWN = ('reward', 'em', 'f1', 'searches', 'tokens', 'stop', 'prediction')  # of a rollout, in the index


class Source:
  """The rollouts of one run folder, or of a result (or unfinished result) of eval or bench.

  `entries` is the index: for each question at a step what is shown in the table, and `at`, the block, first line and number of
  its records. Raises DataError for what is neither, OSError.
  """

  def __init__(self, path: str):
    self.path, self.generation, self._config = pathlib.Path(path), 0, {}
    self._seen: list = []  # of the files: what tells whether they have changed
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
    seen = [(stat.st_mtime_ns, stat.st_size) if (stat := _stat(self.path / name)) else None for name in names]
    if seen == self._seen:
      return
    self._seen = seen
    if not self.path.is_dir():
      groups = collections.defaultdict(list)
      for record in _results(self.path):
        groups[record.get('benchmark', record.get('source', '')), record['id']].append(record)
      self._answered, self._made = _packed('answered', ((None, None, group) for group in groups.values()))
      self.generation += 1
      return
    self._answered, self._made = _packed('held out', (
      (row['step'], row['temperature'], [sample]) for row in row_files.read(self.path / 'evaluations.jsonl')
      for sample in row.get('samples', ())))
    file = self.path / rollouts.FILE
    start, last = self._members[-1] if self._members else (0, 0)
    known = next(rollouts.members(file, start), None) if self._members else (0, 0, [])
    if known is None or known[1] != last or (known[2] and known[2][0]['step'] != self._trained[-1]['step']):  # it was resumed
      self._members, self._trained, last = [], [], 0
      self.generation += 1
    for start, end, records in rollouts.members(file, last):
      if records:
        self._trained.append(_entry('training', records[0]['step'], None, records, f't{len(self._members)}', 0))
        self._members.append((start, end))

  def block(self, name: str) -> bytes:
    """A gzip member of JSON lines. Raises IndexError, OSError."""
    kind, number = name[0], int(name[1:])
    if kind == 'a':
      return self._made[number]
    start, end = self._members[number]
    with open(self.path / rollouts.FILE, 'rb') as file:
      file.seek(start)
      return file.read(end - start)

  def index(self, wanted: Callable[[Mapping], bool] = lambda entry: True) -> dict[str, Any]:
    """What the page knows of all questions; those that are not `wanted` have no records behind them."""
    return {'name': self.path.resolve().name, 'path': str(self.path), 'version': self.version, 'generation': self.generation,
            'about': {name: self._config[name] for name in ('method', 'model', 'seed', 'steps') if name in self._config},
            'shown': SHOWN, 'entries': [entry if wanted(entry) else entry | {'at': None} for entry in self.entries]}


def _packed(kind: str, groups: Iterable[tuple[int | None, float | None, list[dict]]]) -> tuple[list[dict], list[bytes]]:
  """(entries, blocks) of (step, temperature, records of a question)."""
  entries, blocks, waiting, size = [], [], [], 0
  for step, temperature, records in groups:
    entries.append(_entry(kind, step, temperature, records, f'a{len(blocks)}', len(waiting)))
    waiting += records
    size += sum(len(span['text']) for record in records for span in record['spans'])
    if size > BLOCK:
      blocks.append(rollouts.pack(waiting))
      waiting, size = [], 0
  return entries, blocks + [rollouts.pack(waiting)] * bool(waiting)


def _stat(path: pathlib.Path) -> os.stat_result | None:
  return path.stat() if path.exists() else None


def _results(path: pathlib.Path) -> list[dict]:
  """The records of a result of eval or bench, finished or not."""
  fault = DataError(f'{path}: neither a run folder nor a result of jaxsearch eval or bench')
  try:
    if path.name.endswith('.jsonl'):
      found = [row['record'] for row in row_files.read(path) if 'record' in row]
    else:
      found = json.loads(path.read_bytes())['predictions']
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise fault from error
  if not isinstance(found, list) or not all(map(_is_record, found)):
    raise fault
  return found


def _is_record(one: Any) -> bool:
  """Whether the page can show it."""
  return (isinstance(one, dict) and all(isinstance(one.get(name), str) for name in ('id', 'question'))
          and all(isinstance(one.get(name), list) for name in ('golden_answers', 'spans'))
          and all(isinstance(span, dict) and isinstance(span.get('text'), str) for span in one['spans']))


def _entry(kind: str, step: int | None, temperature: float | None, records: Sequence[Mapping], block: str, line: int) -> dict:
  first = records[0]
  failed = [sum('failure' in call for span in record['spans'] for call in span.get('calls', ())) for record in records]
  return {'kind': kind, 'step': step, 'temperature': temperature, 'id': first['id'], 'question': first['question'],
          'golds': first['golden_answers'], 'source': first.get('benchmark', first.get('source', '')),
          'rollouts': [[record.get(name) for name in SHOWN] + [count] for record, count in zip(records, failed)],
          'at': [block, line, len(records)]}


def choose(source: Source, steps: tuple[int, int] | None, most: int | None) -> Callable[[Mapping], bool]:
  """Which entries get their rollouts into the page: those of these steps (first, last), at most so many questions of each."""
  counts, kept = collections.Counter(), set()
  for entry in source.entries:
    where = entry['kind'], entry['step'], entry['temperature']
    inside = steps is None or entry['step'] is None or steps[0] <= entry['step'] <= steps[1]
    if inside and (most is None or counts[where] < most):
      counts[where] += 1
      kept.add(id(entry))
  return lambda entry: id(entry) in kept


def page(sources: Sequence[Source], steps: tuple[int, int] | None = None, most: int | None = None) -> bytes:
  """The page with everything in it. Raises ValueError if it is too large for a browser."""
  parts, size = [], 0

  def add(name: str, data: bytes) -> None:
    nonlocal size
    encoded = base64.b64encode(data)
    size += len(encoded)
    parts.append(b'<script type="text/plain" id="%s">%s</script>\n' % (name.encode(), encoded))

  for number, source in enumerate(sources):
    index = source.index(choose(source, steps, most))
    add(f'index-{number}', zlib.compress(json.dumps(index, ensure_ascii=False).encode(errors='replace'), wbits=31))
    for block in sorted({entry['at'][0] for entry in index['entries'] if entry['at']}):
      add(f'block-{number}-{block}', source.block(block))
      if size > LARGEST:
        raise ValueError(f'{source.path}: too large for a page; choose with --steps or --most, or look at it with --serve')
  return _filled(b''.join(parts), len(sources), live=False)


def _filled(data: bytes, number: int, live: bool) -> bytes:
  head, tail = TEMPLATE.read_bytes().split(b'<!-- data -->')
  return head + data + b'<script>const RUNS = %d, LIVE = %s</script>\n' % (number, b'true' if live else b'false') + tail


def app(sources: Sequence[Source]):
  """A Starlette application that serves the page, for this machine alone. Needs the extra `serve`."""
  from starlette.applications import Starlette
  from starlette.exceptions import HTTPException
  from starlette.middleware import Middleware
  from starlette.middleware.trustedhost import TrustedHostMiddleware
  from starlette.responses import HTMLResponse, JSONResponse, Response
  from starlette.routing import Route

  async def show(request) -> Response:
    return HTMLResponse(_filled(b'', len(sources), live=True))

  def find(request) -> Source:
    run = request.path_params['run']
    if run >= len(sources):
      raise HTTPException(404)
    return sources[run]

  # not on threads: one request at a time reads and changes a source
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

  return Starlette(
    routes=[Route('/', show), Route('/index/{run:int}', index), Route('/block/{run:int}/{block}', block)],
    middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=['127.0.0.1', 'localhost'])])  # no page of another site may read
