"""Indexes in folders: built, killed and resumed, refused, searched."""

import dataclasses
import gzip
import json
import os

import filelock
import numpy as np
import pytest

from jaxsearch.data.corpus import indexed, join_contents, read_corpus
from jaxsearch.data.jsonl import DataError
from jaxsearch.tools import index, index_build, sparse
from jaxsearch.tools.bm25 import BM25
from tests.tools.test_bm25 import random_corpus


class StandIn:
  """An encoder that makes vectors at once: texts with the same words are near."""
  width = 64

  def __init__(self, name='stand-in'):
    self.identity, self.calls = {'hash': name, 'folder': 'nowhere', 'recipe': 'none'}, 0

  def passages(self, texts):
    self.calls += 1
    vectors = np.zeros((len(texts), self.width), np.float32)
    for row, text in enumerate(texts):
      for word in text.split():
        vectors[row, int(word[1:]) % self.width if word[1:].isdigit() else 0] += 1
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1)

  queries = passages


@pytest.fixture
def corpus(tmp_path, monkeypatch):
  monkeypatch.setattr(sparse, 'BLOCK', 16)
  monkeypatch.setattr(index_build, 'ENCODED', 8)
  passages = random_corpus(60)[0]
  path = tmp_path / 'corpus.jsonl'
  records = [{'id': one.id, 'contents': join_contents(one.title, one.text)} for one in passages]
  path.write_text('\n'.join(map(json.dumps, records)) + '\n\n')
  return path, passages


def content(folder):
  """File -> bytes of an index."""
  return {str(file.relative_to(folder)): file.read_bytes()
          for file in sorted(folder.rglob('*')) if file.is_file()}


def test_bm25_ranks_as_in_memory(corpus, tmp_path):
  path, passages = corpus
  index_build.build(path, tmp_path / 'out', 'bm25')
  searched, judge = index.Index(tmp_path / 'out'), BM25(passages)
  for query in ('w0', 'w3 w17 w120', 'w1 w2 w200', 'none'):
    ours, theirs = searched.search([query], 7)[0], judge.search([query], 7)[0]
    assert [dataclasses.replace(one, score=0.0) for one in ours] == [
      dataclasses.replace(one, score=0.0) for one in theirs]
    assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-8)


@pytest.mark.parametrize('depth', [2, 100])
def test_a_hybrid_index_adds_scores(corpus, tmp_path, monkeypatch, depth):
  """BM25 + 12 * cosine over the first `depth` of both; exact where only BM25 found a passage."""
  monkeypatch.setattr(index, 'DEPTH', depth)
  path, passages = corpus
  index_build.build(path, tmp_path / 'out', 'hybrid', encoder=StandIn())
  both, judge = index.Index(tmp_path / 'out', encoder=StandIn()), BM25(passages)
  ids = [one.id for one in passages]
  vectors = StandIn().passages([indexed(one) for one in passages])
  vectors = vectors.astype(np.float16).astype(np.float32)
  for queries in (['w3 w17 w45', 'w250', 'w1 w2'], ['xylophone w9 w9 w9']):
    for query, (numbers, scores) in zip(queries, both.rank(queries, 2)):
      cosine = vectors @ StandIn().queries([query])[0]
      by_words = {ids.index(one.id): one.score for one in judge.search([query], depth)[0]}
      nearest = np.argsort(-cosine, kind='stable')[:depth].tolist()
      lowest = min(by_words.values()) if len(by_words) >= depth else 0.0
      expected = {number: by_words.get(number, lowest) + 12 * cosine[number]
                  for number in {*by_words, *nearest}}
      assert scores == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-4)
      assert [expected[number] for number in numbers.tolist()] == pytest.approx(scores, abs=1e-4)


def test_as_many_passages_are_found_as_were_asked_for_with_their_scores(corpus, tmp_path):
  path, passages = corpus
  for kind in ('hybrid', 'dense'):
    index_build.build(path, tmp_path / kind, kind, encoder=StandIn())
  both, alone = (index.Index(tmp_path / kind, encoder=StandIn()) for kind in ('hybrid', 'dense'))
  numbers, _ = both.rank(['w250'], 2)[0]
  assert [one.id for one in both.search(['w250'], 2)[0]] == [passages[number].id for number in numbers[:2]]
  cosines = StandIn().passages([indexed(one) for one in passages]) @ StandIn().queries(['w250'])[0]
  assert [one.score for one in alone.search(['w250'], 3)[0]] == pytest.approx(np.sort(cosines)[::-1][:3], abs=1e-3)


def test_lists_for_approximate_search_are_added_and_searched(corpus, tmp_path):
  """All passages are in one list, which is searched whole: the same as exact search."""
  path, out = corpus[0], tmp_path / 'out'
  index_build.build(path, out, 'hybrid', encoder=StandIn())
  queries = ['w3 w17 w45', 'w250', 'xylophone']
  exact = index.Index(out, encoder=StandIn()).rank(queries, 5)
  expected, encoder = index_build.estimate(path, 'hybrid', StandIn(), approximate=True), StandIn()
  manifest = index_build.build(path, out, 'hybrid', encoder=encoder, approximate=True)
  assert encoder.calls == 0
  assert manifest['approximate'] == {'lists': 1, 'probes': 1, 'recall3': 1.0, 'sample': 61}
  assert expected['bytes_on_devices'] == 0 and expected['bytes_cached'] > manifest['files']['lists.faiss']
  before = content(out)
  for again in (True, False):
    assert index_build.build(path, out, 'hybrid', encoder=encoder, approximate=again) == manifest
  assert content(out) == before
  for (numbers, scores), (_, judge) in zip(index.Index(out, encoder=StandIn()).rank(queries, 5), exact):
    # Ties may be in another order.
    assert scores[:5] == pytest.approx(judge[:5], abs=2e-2) and len(set(numbers[:5])) == 5
  (out / 'lists.faiss').unlink()  # not cut short: the indexes above still have it mapped
  (out / 'lists.faiss').write_bytes(b'short')
  with pytest.raises(DataError, match=r'lists\.faiss: 5 bytes, but manifest\.json says'):
    index.Index(out, encoder=StandIn())


class Killed(BaseException):
  pass


def killed_at(stop):
  """A `report` that is killed at its `stop`-th call."""
  calls = iter(range(stop))

  def report(*at):
    if next(calls, None) is None:
      raise Killed
  return report


@pytest.mark.parametrize('stop', (2, 4, 5, 9))
def test_killed_anywhere_and_resumed_it_is_the_same_index(corpus, tmp_path, stop):
  """A scan begins anew, encoding goes on."""
  path, out = corpus[0], tmp_path / 'out'
  steps, note = [], lambda *at: steps.append(at)
  index_build.build(path, tmp_path / 'whole', 'hybrid', encoder=StandIn(), report=note)
  assert len(steps) == 4 + 1 + 8
  with pytest.raises(Killed):
    index_build.build(path, out, 'hybrid', encoder=StandIn(), report=killed_at(stop))
  with pytest.raises(DataError, match=r'out: the index is half-built: rerun `jaxsearch index`'):
    index.Index(out, encoder=StandIn())
  if stop > 5:
    with pytest.raises(DataError, match='half-built index of another corpus or with other settings'):
      index_build.build(path, out, 'hybrid', encoder=StandIn('other'))
    # as a kill in the middle of a block leaves it
    with open(out / 'vectors.float16', 'ab') as file:
      file.write(b'half of a blo')
  encoder, resumed = StandIn(), []
  index_build.build(path, out, 'hybrid', encoder=encoder, report=lambda *at: resumed.append(at))
  assert resumed == steps[stop if stop >= 5 else 0:] and encoder.calls == 13 - max(stop, 5)
  assert content(out) == content(tmp_path / 'whole')


def test_a_copy_that_lost_vectors_is_encoded_again_with_the_encoder_in_another_place(corpus, tmp_path):
  path, out, elsewhere = corpus[0], tmp_path / 'out', StandIn()
  elsewhere.identity['folder'] = 'elsewhere'
  with pytest.raises(Killed):
    index_build.build(path, out, 'hybrid', encoder=StandIn(), report=killed_at(8))
  os.truncate(out / 'vectors.float16', 1500)  # a block has 1024 bytes
  index_build.build(path, out, 'hybrid', encoder=elsewhere)
  index_build.build(path, tmp_path / 'whole', 'hybrid', encoder=elsewhere)
  assert content(out) == content(tmp_path / 'whole')


def test_gzipped_it_is_the_same_corpus_and_a_whole_index_is_not_built_again(corpus, tmp_path):
  path, _ = corpus
  packed = tmp_path / 'corpus.jsonl.gz'
  packed.write_bytes(gzip.compress(path.read_bytes()))
  plain, other = (index_build.build(name, tmp_path / name.suffix, 'bm25') for name in (path, packed))
  assert plain['corpus_hash'] == other['corpus_hash'] and plain['passages'] == 61
  assert BM25(read_corpus(path)).known == {'corpus': plain['corpus_hash'], 'index': 'bm25'}
  before, fail = content(tmp_path / '.gz'), lambda *at: pytest.fail('built again')
  assert index_build.build(packed, tmp_path / '.gz', 'bm25', report=fail) == other
  assert content(tmp_path / '.gz') == before


LINE = '{"id": "%s", "contents": "A\\nB"}\n'


@pytest.mark.parametrize(('text', 'reason'), [
  (LINE % 1 + 'nonsense\n', r'corpus\.jsonl:2: bad JSON'),
  (LINE % 1 + '{"id": "2"}\n', r"corpus\.jsonl:2: no key 'contents'"),
  ('\n', r'corpus\.jsonl: no documents in it')])
def test_a_bad_corpus_is_named_and_mended_is_built(corpus, tmp_path, text, reason):
  path, _ = corpus
  path.write_text(text)
  with pytest.raises(DataError, match=reason):
    index_build.build(path, tmp_path / 'out', 'bm25')
  with pytest.raises(DataError, match='half-built'):
    index.Index(tmp_path / 'out')
  path.write_text(LINE % 1 + LINE % 2 + LINE % 3)
  assert index_build.build(path, tmp_path / 'out', 'bm25')['passages'] == 3


def test_folders_that_hold_something_else(corpus, tmp_path):
  path, out = corpus[0], tmp_path / 'out'
  with pytest.raises(DataError, match='no index here'):
    index.Index(out)
  index_build.build(path, out, 'dense', encoder=StandIn())
  for build in (dict(kind='bm25'), dict(kind='dense', encoder=StandIn('other')),
                dict(kind='dense', encoder=StandIn(), precision='int8')):
    with pytest.raises(DataError, match='out: holds an index of another corpus or with other settings'):
      index_build.build(path, out, **build)
  with pytest.raises(DataError, match='another encoder'):
    index.Index(out, encoder=StandIn('other'))
  with pytest.raises(DataError, match=r'its encoder is not at nowhere.*search\.encoder'):
    index.Index(out)
  manifest = (out / 'manifest.json').read_text()
  (out / 'manifest.json').write_text(manifest.replace('"format": 3', '"format": 1'))
  with pytest.raises(DataError, match='an index of another version of jaxsearch; build it again'):
    index.Index(out)
  (out / 'manifest.json').write_text(manifest)
  os.truncate(out / 'passages.jsonl', 100)
  with pytest.raises(DataError, match=r'passages\.jsonl: 100 bytes, but manifest\.json says'):
    index.Index(out, encoder=StandIn())
  with pytest.raises(DataError, match=r"holds 'corpus.jsonl' and is no index"):
    index_build.build(path, tmp_path, 'bm25')
  with filelock.FileLock(out / 'lock'), pytest.raises(DataError, match='another process is building'):
    index_build.build(path, out, 'dense', encoder=StandIn())


def test_the_estimate_is_near_what_is_built(corpus, tmp_path):
  path, _ = corpus
  expected = index_build.estimate(path, 'hybrid', StandIn(), 'int8')
  manifest = index_build.build(path, tmp_path / 'out', 'hybrid', encoder=StandIn(), precision='int8')
  assert expected['passages'] == 61 and expected['bytes_on_devices'] == 61 * 68
  assert expected['bytes_on_disk'] == pytest.approx(sum(manifest['files'].values()), rel=0.25)
