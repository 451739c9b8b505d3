"""Questions from passages by rules, and names that are exchanged."""

import collections
import dataclasses
import random
import re

import pytest
from hypothesis import given, strategies as st

from jaxsearch.data.corpus import Document, first_words
from jaxsearch.data.questions import Question
from recipes import wiki_lookups as lookups

FIRST = 'Anna Boris Carla Dinu Edith Farid Greta Henri Ines Jonas Karin Luca Mara Nils'.split()
LAST = 'Abel Brandt Costa Dufour Eklund Fontana Garcia Horvat Ivanov Jensen Keller Lind Moreau'.split()


def encyclopedia() -> list[Document]:
  """60 people, 40 films by some of them, and a passage about neither."""
  names = random.Random(0).sample([f'{first} {last}' for first in FIRST for last in LAST], 60)
  passages, adjectives = [], ('French', 'Danish')
  for number, name in enumerate(names):
    first, last = name.split()
    day = f'{number % 28 + 1}'
    passages.append((f'{name} (director)' if number % 3 == 0 else name, (
      f'{first} Maria {last} ({day} May {1900 + number} – {day} June {1970 + number}) was a '
      f'{adjectives[number % 2]} film director. {last} was born in Lisbon. {last} is best known for films. '
      f'He moved to Porto in {1931 + number % 7}.')))
  for number in range(40):
    title = f'The {LAST[number % 13]} Affair {number:02}'
    passages.append((title, (f'{title} is a {1930 + number} {adjectives[number % 2]} drama film directed by '
                             f'{names[number]}. It stars nobody in particular.')))
  lived = f'{names[0]} and {names[1]} lived there, and {names[0]}s cousin too.'
  passages.append(('Lisbon', f'Lisbon is a city. {lived}'))
  return [Document(str(number), title, text) for number, (title, text) in enumerate(passages)]


DOCUMENTS = encyclopedia()
MADE = lookups.make(DOCUMENTS, 0, 64)


def test_names_are_exchanged_everywhere_within_their_kind():
  changed = lookups.exchange(DOCUMENTS, 0, 64)
  assert [document.id for document in changed] == [document.id for document in DOCUMENTS]
  before, after = ({entity.passage: entity for entity in lookups.entities(documents, 64)}
                   for documents in (DOCUMENTS, changed))
  assert before.keys() == after.keys()
  new = {entity.name: after[number].name for number, entity in before.items()}
  for kind in ('film', 'person'):
    names = [entity.name for entity in before.values() if entity.kind == kind]
    assert sorted(new[name] for name in names) == sorted(names) and all(new[name] != name for name in names)
  for number, entity in before.items():
    # The rest of the passage is as it was; a director is the one who now has the name.
    expected, facts = ({name: value for name, value in one.facts.items() if name != 'described'}
                       for one in (entity, after[number]))
    if 'director' in expected:
      expected['director'] = new[expected['director']]
    assert facts == expected
    text = changed[int(number)].text
    if entity.kind == 'person':  # neither the longer form at the beginning nor the last name alone is left
      assert text.startswith(f'{new[entity.name]} (') and entity.name.split()[0] + ' Maria' not in text
      old, last = entity.name.split()[-1], new[entity.name].split()[-1]
      assert len(re.findall(rf'\b{last}\b', text)) == 3
      assert old == last or not re.search(rf'\b{old}\b', text)
  first, second = (entity.name for entity in list(before.values())[:2])
  lived = f'{new[first]} and {new[second]} lived there, and {first}s cousin too.'
  assert changed[-1].text == f'Lisbon is a city. {lived}'


def test_every_answer_stands_in_the_passages_that_its_steps_name():
  assert {one.question.metadata['source'] for one in MADE} == {
    'one passage', 'described', 'bridge', 'comparison', 'bridge comparison'}
  assert len({one.question.id for one in MADE}) == len(MADE)
  by_id = {document.id: document for document in DOCUMENTS}
  for one in MADE:
    answer, kind = one.question.golden_answers[0], one.question.metadata['source']
    last = by_id[one.steps[-1].passage]
    assert len(one.steps) == {'bridge': 2, 'comparison': 2, 'bridge comparison': 4}.get(kind, 1)
    for step in one.steps:
      assert step.query == lookups.plain(by_id[step.passage].title) and step.finding.endswith('.')
    if kind == 'described':
      assert answer == one.steps[0].query and answer not in one.question.question
      assert one.question.question.split(' the ', 1)[1].rstrip('?') in first_words(last.text, 64)
    elif 'comparison' not in kind:
      assert answer in first_words(last.text, 64) and answer in one.steps[-1].finding
      assert one.steps[0].query in one.question.question
    assert bool(one.conclusion) == ('comparison' in kind)
    if kind == 'bridge':
      assert one.steps[1].query in by_id[one.steps[0].passage].text
      assert one.steps[1].query not in one.question.question


PERSON, FILM = 'Ada Lind (born 1 May 1900) ', 'Night Sea is a 1950 French drama film '
SONG = '" Blue Hour" is a popular song '


@pytest.mark.parametrize('text, attribute, value', [
  (PERSON + 'is a Danish film director and painter.', 'occupation', 'film director'),
  (PERSON + 'is a Danish painter who moved to Rome.', 'occupation', 'painter'),
  (PERSON + 'is a Danish boxer. She is married to Karl Abel, a poet.', 'spouse', 'Karl Abel'),
  (PERSON + 'was the daughter of Jonas Moreau and Mara Moreau.', 'parent', None),  # two of them
  (PERSON + 'was the daughter of King Jonas.', 'parent', 'King Jonas'),
  (PERSON + 'died suddenly in New Ulm.', 'died in', 'New Ulm'),
  (PERSON + 'graduated from the University of Lund in 1920.', 'school', 'University of Lund'),
  (PERSON + 'plays as a left back for FC Lund.', 'team', 'FC Lund'),
  (PERSON + 'plays for FC St. Pauli.', 'team', None),  # cut in the middle of a name
  (PERSON + 'is a member of the Danish Academy.', 'member', 'Danish Academy'),
  (FILM + 'written and directed by Karl Abel.', 'writer', 'Karl Abel'),
  (FILM + 'produced by Karl Abel, Jonas Moreau and others.', 'producer', None),
  (FILM + 'starring Mara Costa.', 'star', 'Mara Costa'),
  (FILM + 'starring Mara Costa and Nils Lind.', 'star', None),
  (FILM + 'based on the 1940 novel "Sea" by Karl Abel.', 'author', 'Karl Abel'),
  (FILM + 'with Jonas Moreau. The music was composed by Karl Abel.', 'composer', 'Karl Abel'),
  (SONG + 'recorded by the Danish jazz singer Karl Abel.', 'performer', 'Karl Abel'),
  (SONG + 'by American singer-songwriter Karl Abel from 1990.', 'performer', 'Karl Abel'),
  (SONG + 'written by Karl Abel and Jonas Moreau.', 'composer', None),
  (SONG + 'composed by Karl Abel, with words by Jonas Moreau.', 'composer', 'Karl Abel'),
])
def test_what_a_passage_says(text, attribute, value):
  name = next((name for name in ('Night Sea', 'Blue Hour') if name in text), 'Ada Lind')
  entity, = lookups.entities([Document('0', name, text)], 64)
  assert entity.facts.get(attribute) == value
  asked = {one.question.metadata.get('attribute'): one for one in lookups.make([Document('0', name, text)], 0, 64)}
  assert value is None or asked[attribute].question.golden_answers == (value,)
  assert value is None or value in asked[attribute].steps[0].finding


def test_bridges_lead_to_performers_composers_and_relatives():
  born = '(1 May 1900 – 2 June 1970) was a Danish painter. '
  texts = {'Ada Lind': f'Ada Lind {born}She was the daughter of the boxer Karl Abel. She lived in Rome.',
           'Karl Abel': f'Karl Abel {born}He was the son of Mara Costa. He lived in Rome.',
           'Mara Costa': f'Mara Costa {born}She was married to Ines Garcia. She lived in Rome.',
           'Ines Garcia': f'Ines Garcia {born}She lived in Rome.',
           'Blue Hour (song)': SONG + 'by Danish singer Ada Lind, composed by Karl Abel.'}
  documents = [Document(title, title, text) for title, text in texts.items()]
  made = {one.question.question: one for seed in range(200) for one in lookups.make(documents, seed, 64)
          if one.question.metadata['source'] == 'bridge'}
  answers = {text: one.question.golden_answers[0] for text, one in made.items()}
  expected = {
    "When did Ada Lind's father die?": '2 June 1970', 'When was the mother of Karl Abel born?': '1 May 1900',
    'What is the occupation of the wife of Mara Costa?': 'painter',
    'When did the singer of Blue Hour die?': '2 June 1970',
    'When did the composer of song Blue Hour (song) die?': '2 June 1970',
    'Who is the paternal grandmother of Ada Lind?': 'Mara Costa'}
  assert expected.items() <= answers.items()
  assert [step.query for step in made['Who is the paternal grandmother of Ada Lind?'].steps] == [
    'Ada Lind', 'Karl Abel']
  assert [step.finding for step in made["When did Ada Lind's father die?"].steps] == [
    'The father of Ada Lind is Karl Abel.', 'Karl Abel died on 2 June 1970.']


def test_who_has_no_passage_is_replaced_by_somebody_who_has_one():
  missing = [dataclasses.replace(one, text=re.sub(r'directed by \w+ \w+', 'directed by Zoe Nobody', one.text))
             for one in DOCUMENTS]
  assert not [one for one in lookups.make(missing, 0, 64) if one.question.metadata['source'] == 'bridge']
  changed = lookups.exchange(missing, 0, 64)
  entities = {entity.name: entity for entity in lookups.entities(changed, 64)}
  directors = [(one, entities[one.facts['director']]) for one in entities.values() if one.kind == 'film']
  assert len(directors) == 40 and not any('Nobody' in one.text for one in changed)
  assert all(director.kind == 'person' and director.held_out == film.held_out for film, director in directors)
  assert len({director.name for _, director in directors}) > 10


@pytest.mark.parametrize('kind', ['comparison', 'bridge comparison'])
def test_comparisons_are_right(kind):
  facts = {entity.name: entity.facts for entity in lookups.entities(DOCUMENTS, 64)}
  forms = collections.Counter()
  for one in MADE:
    if one.question.metadata['source'] != kind:
      continue
    names, text = [step.query for step in one.steps], one.question.question
    answer, = one.question.golden_answers
    (a, b), of = names[:2], dict(zip(names[:2], names[-2:]))  # their own facts, or those of their directors
    assert a in text and b in text and text.index(a) < text.index(b)
    if kind == 'bridge comparison':
      assert [facts[name]['director'] for name in (a, b)] == names[2:]
      assert not any(name in text for name in names[2:])
    if answer in ('yes', 'no'):
      nations = [facts[of[name]]['nationality'] for name in (a, b)]
      assert answer == ('yes' if nations[0] == nations[1] else 'no')
      assert one.conclusion in (f'Both are {nations[0]}.', f'{nations[0]} is not {nations[1]}.')
      forms['same'] += 1
      continue
    later = re.search('later|recently|younger', text) is not None
    attribute = 'died' if 'died' in text else 'year' if 'year' in facts[of[a]] else 'born'
    years = {name: int(re.search(r'\d{4}', facts[of[name]][attribute])[0]) for name in (a, b)}
    assert answer == (max if later else min)((a, b), key=years.get)
    other = b if answer == a else a
    said = f'{of[answer]} directed {answer}' if kind == 'bridge comparison' else answer
    order = 'later' if later else 'earlier'
    assert one.conclusion == f'{years[answer]} is {order} than {years[other]}: {said}.'
    forms[attribute, later, answer == a] += 1
  expected = 1 + 4 * (3 if kind == 'comparison' else 2)
  assert len(forms) == expected, forms


def test_questions_held_out_share_no_passage_with_those_of_training():
  for kind in {one.question.metadata['source'] for one in MADE}:
    assert {one.held_out for one in MADE if one.question.metadata['source'] == kind} == {False, True}
  steps = {held: {step for one in MADE if one.held_out == held for step in one.steps}
           for held in (False, True)}
  for part in ('passage', 'query', 'finding'):
    assert not {getattr(step, part) for step in steps[False]} & {getattr(step, part) for step in steps[True]}


@given(st.lists(st.sampled_from('abc'), max_size=60), st.integers(1, 3), st.integers(0, 3))
def test_every_beginning_has_the_kinds_in_their_proportions(kinds, a, b):
  questions = [Question(str(number), '', (), {'source': kind}) for number, kind in enumerate(kinds)]
  kept = lookups.mixed(questions, {'a': a, 'b': b})
  assert len(set(kept)) == len(kept) and set(kept) <= set(questions)
  for number in range(len(kept) + 1):
    count = {kind: sum(one.metadata['source'] == kind for one in kept[:number]) for kind in 'abc'}
    assert count['c'] == 0 and abs(count['a'] * b - count['b'] * a) <= max(a, b)
  spare = {kind: kinds.count(kind) - sum(one.metadata['source'] == kind for one in kept) for kind in 'ab'}
  assert spare['a'] < a or (b and spare['b'] < b)
