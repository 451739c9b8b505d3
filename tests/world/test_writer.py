"""Documents that are honest, or wrong on request, without a language model."""

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.tools.bm25 import BM25
from jaxsearch.tools.simulated import SimulatedSearch
from jaxsearch.world import files as world
from jaxsearch.world.facts import ATTRIBUTES, read_back
from jaxsearch.world.writer import WorldWriter

QUERIES = ['Wuxi', 'population of France', 'Holmium', 'Jacques-Louis Soret', 'Euro', 'capital Japan']


@pytest.fixture(scope='module')
def writer():
  return WorldWriter(world.corpus())


@pytest.fixture(scope='module')
def liar():
  return WorldWriter(world.corpus(), false_facts=True)


@pytest.fixture(scope='module')
def entities():
  return {entity.id: entity for entity in read_back(world.corpus())}


def test_useful_documents_are_what_the_search_finds(writer):
  queries = [*QUERIES, 'xylophone']
  backend, judge = SimulatedSearch(writer, noise_start=0.0), BM25(world.corpus())
  assert backend.search(queries, 3) == judge.search(queries, 3)


@pytest.mark.parametrize('false', [False, True])
def test_noise_is_about_others_or_wrong_in_every_fact(writer, liar, entities, false):
  for query, best in zip(QUERIES, writer.write(QUERIES, 2, [False] * 6, range(6))):
    written = (liar if false else writer).write([query] * 40, 2, [True] * 40, range(40))
    found = [document for documents in written for document in documents]
    assert len(found) == 80 and len({d.text for d in found}) > 10
    for place, document in enumerate(found):
      if false and place % 2 < len(best):
        entity = entities[document.id.removeprefix('false-')]
        assert document.title == entity.title and entity.id in {d.id for d in best}
        for name, value in entity.values.items():  # the same sentences, another value in each
          sentence = ATTRIBUTES[name]['sentence']
          assert sentence.format(title=entity.title, value='').rstrip('.') in document.text
          assert sentence.format(title=entity.title, value=value) not in document.text
      else:
        assert document.text == entities[document.id].text and document.title not in {d.title for d in best}
        assert entities[document.id].type in {entities[d.id].type for d in best}


def test_a_country_under_noise_has_another_capital_in_every_version(liar):
  falsified = [liar.write(['France'], 1, [True], [seed])[0][0].text for seed in range(20)]
  assert not any(value in text for text in falsified for value in ('Paris', '66987244', 'Euro.', '.fr'))
  assert all(text.startswith('France is a country in ') for text in falsified)
  assert len(set(falsified)) == len(falsified)


def test_noise_follows_from_its_seed(writer):
  assert writer.write(QUERIES, 3, [True] * 6, range(6)) == writer.write(QUERIES, 3, [True] * 6, range(6))
  assert writer.write(QUERIES, 3, [True] * 6, range(6)) != writer.write(QUERIES, 3, [True] * 6, range(1, 7))


def test_noise_is_written_where_nothing_is_known(writer):
  assert writer.write(['xylophone', 'xylophone'], 3, [False, True], [1, 1])[0] == []
  assert len({d.title for d in writer.write(['xylophone'], 3, [True], [1])[0]}) == 3


def test_persons_of_several_elements_are_falsified_too(liar, entities):
  several = next(e for e in entities.values() if e.multiple)
  written = liar.write([several.title] * 30, 1, [True] * 30, range(30))
  texts = [document.text for document, in written if document.title == several.title]
  assert texts and not any(f' {value}.' in text for text in texts for _, value in several.multiple)


def test_other_documents_are_refused():
  with pytest.raises(ValueError, match=r"embedded world only: document 1: no known fact in 'Paris"):
    WorldWriter([Document('1', 'Paris', 'Paris, they say, is lovely.')])
