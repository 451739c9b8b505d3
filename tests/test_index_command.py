"""`jaxsearch index`, and what a config makes of its folder."""

import json
import sys

import pytest

from jaxsearch import cli, flags
from jaxsearch.commands import retrieval
from jaxsearch.setup import open_backend
from jaxsearch.tools import find_backend, http_server
from tests.tools.test_index import StandIn


@pytest.fixture
def folder(tmp_path, capsys):
  for name, town in (('hotpotqa', 'Paris'), ('nq', 'Lyon')):
    records = [{'id': str(i), 'contents': f'"{town} {i}"\n{town} is town number {i}.'} for i in range(5)]
    (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, records)))
    assert cli.main(['index', f'--corpus={tmp_path}/{name}.jsonl', f'--out={tmp_path}/indexes/{name}']) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result['passages'] == 5 and len(result['corpus_hash']) == 64
  return tmp_path


def config(*overrides):
  return flags.parse('train', [f'--config.search.{override}' for override in ('backend=index', *overrides)],
                     'base').config


def test_an_estimate_builds_nothing(folder, capsys):
  assert cli.main(['index', f'--corpus={folder}/nq.jsonl', f'--out={folder}/none', '--estimate']) == 0
  figures = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert figures['passages'] == 5 and figures['bytes_on_disk'] > 0 and not (folder / 'none').exists()


def test_approximate_search_says_what_it_finds(folder, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(retrieval, '_load_encoder', lambda config, flags: StandIn())
  arguments = ['index', f'--corpus={folder}/nq.jsonl', f'--out={tmp_path}/out', '--kind=dense']
  assert cli.main(arguments) == 0 and 'approximate_recall3' not in capsys.readouterr().out
  assert cli.main([*arguments, '--approximate']) == 0
  assert json.loads(capsys.readouterr().out)['approximate_recall3'] == 1.0
  assert cli.main(['index', f'--corpus={folder}/nq.jsonl', f'--out={tmp_path}/other', '--approximate']) == 2
  assert '--approximate means nothing with --kind bm25' in capsys.readouterr().err
  monkeypatch.setitem(sys.modules, 'faiss', None)
  monkeypatch.delitem(sys.modules, 'jaxsearch.tools.approximate')
  monkeypatch.delattr('jaxsearch.tools.approximate', raising=False)
  assert cli.main([*arguments, '--approximate']) == 2
  assert "faiss-cpu: pip install 'jaxsearch[retrieval]'" in capsys.readouterr().err


def test_a_question_is_searched_for_in_the_index_of_its_source(folder):
  backend = open_backend(config(f'index={folder}/indexes/{{source}}', 'by_source=True'))
  assert [backend.of(source).search(['number 3'], 1)[0][0].title
          for source in ('nq', 'hotpotqa')] == ['Lyon 3', 'Paris 3']
  with pytest.raises(ValueError, match='no index here'):
    backend.of('musique')
  identity = find_backend('index').identity
  alone = {source: identity(config(f'index={folder}/indexes/{source}').search) for source in ('hotpotqa', 'nq')}
  assert identity(config(f'index={folder}/indexes/{{source}}').search) == {'sources': alone}
  by_file = identity(config(f'index={folder}/{{source}}').search)  # sources of joined files: 'indexes/nq'
  assert by_file == {'sources': {f'indexes/{source}': part for source, part in alone.items()}}


def test_serve_serves_an_index(folder, monkeypatch):
  served = {}
  monkeypatch.setattr(http_server, 'search_app', lambda backend,
                      **rest: served.update(backend=backend, **rest))
  monkeypatch.setattr(http_server, 'run', lambda *given: served.update(ran=True))
  assert cli.main(['serve', f'--index={folder}/indexes/nq', '--port=0']) == 0
  assert served['ran'] and served['backend'].search(['number 2'], 1)[0][0].title == 'Lyon 2'
  assert len(served['backend'].known) == 2 and served['limits'].threads == 4


def test_a_server_has_no_sources(folder, capsys):
  assert cli.main(['serve', f'--corpus={folder}/nq.jsonl', '--port=0', '--config.search.by_source=True']) == 2
  assert 'has no source: set search.by_source=False' in capsys.readouterr().err
