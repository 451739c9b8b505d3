"""Questions made from encyclopedia passages by rules, without a model, and passages under exchanged names.

`entities` reads what the first sentences of a passage say of a film, a song or a person; `make` asks for
these facts: about one passage, over a bridge to the passage of a person whom it names (`BRIDGES`), in a
comparison of two, or of the directors of two. Every question has the steps that lead to its answer, so that
chains of searches can be written from it (wiki_chains.py).

Passages collected for a benchmark are those that its questions are about. So `exchange` swaps the names of
the films, songs and people in them, everywhere at once, and replaces a director, performer or parent who has
no passage by someone who has one. No benchmark asks what is then asked, and the answers are not true, so
that a policy learns to read an answer instead of remembering it.
"""

import dataclasses
import functools
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxsearch.data.corpus import Document, first_words
from jaxsearch.data.questions import Question

MONTHS = 'January|February|March|April|May|June|July|August|September|October|November|December'
DATE = rf'\d{{1,2}} (?:{MONTHS}) \d{{3,4}}|(?:{MONTHS}) \d{{1,2}}, \d{{3,4}}'
WORD = r"(?:(?:[A-Z]\.)+|[A-Z][\w’'-]+)"
NAME = rf'{WORD}(?: (?:de |van |von |der |del |la |di )*{WORD}){{1,3}}'
FILM = re.compile(r"^.{1,90}?\bis an? (?P<year>\d{4}) (?P<adjective>[A-Z]\w+)?[^.]{0,80}?\bfilm\b")
SONG = re.compile(r'^["“] ?.{1,90}?["”] (?:is|was) an? [^.]{0,80}?\bsong\b')
DIRECTOR = re.compile(rf'\bdirected by (?P<director>{NAME})(?=[,.;]|$| (?!and [A-Z]|[A-Z&]))')
BORN = re.compile(rf'^.{{2,80}}?\(\s*(?:[^()]{{0,60}}?\bborn (?:[^()0-9]{{0,40}})?)?(?P<born>{DATE})'
                  rf'(?:[^()]{{0,60}}?(?P<died>{DATE}))?')
PLACE = re.compile(r"\bborn(?: on [^.]{5,20},?| \d{4},?)? in "
                   r"(?P<place>[A-Z][\w’'-]+(?: [A-Z][\w’'-]+){0,2})(?=[,.; ])")
NAMES = rf'{WORD}(?: (?:(?:of|the|de|van|von) )*{WORD}){{0,4}}'
# What may follow a complete name, which is neither the start of 'English professor' nor one of several.
ENDS = (r'(?<!\bSt)(?=[.,;]|$| and (?![A-Z])|'
        r' (?:as|at|between|for|from|in|on|since|that|to|until|when|where|which|who|with)\b)')
ALONE = NAME + r'(?!, (?:and )?[A-Z])'  # no list of names
TRADE = r'[a-z][a-z-]+(?: (?!(?:and|best|by|for|from|in|known|of|on|who|with)\b)[a-z-]+){0,2}'
# (kind, attribute) -> what stands before its value in a passage, and what the value looks like.
SAID = {
  ('film', 'writer'): (r'written (?:and directed )?by', ALONE),
  ('film', 'producer'): (r'produced by', ALONE),
  ('film', 'star'): (r'(?:starring|stars)', ALONE),
  ('film', 'author'): (r'based (?:up)?on [^.]{0,60}?\b(?:book|novel|play|story) [^.]{0,40}?\bby', NAME),
  ('film', 'composer'): (r'(?:music|score|soundtrack)\b[^.]{0,40}? by(?: [a-z]+)*', ALONE),
  ('song', 'performer'): (r'(?:song|recorded|performed|sung)(?: [a-z]+){0,3} by(?: the)?'
                          r'(?:(?: [A-Z][a-z-]+)?(?: [a-z/-]+)+)?', ALONE),
  ('song', 'composer'): (r'(?:composed|written|music) by', ALONE),
  ('person', 'occupation'): (r'(?:is|was) an? (?:[A-Z][a-z-]+ )+', TRADE),
  ('person', 'spouse'): (r'(?:married(?: to)?|(?:wife|husband|widow) of)(?: the)?(?: [a-z]+)*', NAME),
  ('person', 'parent'): (r'(?:son|daughter) of(?: the)?(?: [a-z]+)*', NAME),
  ('person', 'died in'): (r'died (?:[^.,()]{0,30} )?in', NAMES),
  ('person', 'school'): (r'(?:educated at|studied at|graduated from|graduate of|attended)(?: the)?', NAMES),
  ('person', 'team'): (r'(?:plays|played) (?:as an? [a-z -]{3,30} )?for(?: the)?', NAMES),
  ('person', 'member'): (r'member of the', NAMES),
}
NATIONALITY = re.compile(r'\b(?:is|was) an? (?P<adjective>[A-Z][a-z]+) [a-z]')
DESCRIBED = re.compile(r'^[^.]{0,140}?\b(?P<verb>is|was) (?:an?|the) '
                       r'(?P<description>[^()"]{35,150}?)\.(?: |$)')
COMMON = 12  # an adjective said of at least this many people in the corpus counts as a nationality
# Kind -> the facts that name a person, to whose passage a bridge leads.
BRIDGES = {'film': ('director', 'composer'), 'song': ('performer', 'composer'),
           'person': ('parent', 'spouse')}
KIN = {'parent': {'he': 'father', 'she': 'mother'}, 'spouse': {'he': 'husband', 'she': 'wife'}}
RELATIVES = [relative for of in KIN.values() for relative in of.values()]
HELD_OUT = 10  # one name in so many is held out of training
BRITISH = {'British', 'English', 'Scottish', 'Welsh'}  # neither the same nor different


class Step(NamedTuple):
  """A passage that a question needs: its id, its name (the query that finds it), and what it says, as a
  sentence."""
  passage: str
  query: str
  finding: str


@dataclasses.dataclass(frozen=True)
class Lookup:
  """A question, the steps to its answer, and what follows from them; `held_out` if its names are held out of
  training."""
  question: Question
  steps: tuple[Step, ...]
  conclusion: str = ''
  held_out: bool = False


@dataclasses.dataclass(frozen=True)
class Entity:
  """A film, a song or a person, and what the beginning of its passage says of it: attribute -> value.

  `title` is the name with what the passage's title has in brackets, `pronoun` 'he' or 'she', for a person."""
  passage: str
  name: str
  kind: str
  facts: dict[str, str]
  title: str = ''
  pronoun: str = ''

  @property
  def held_out(self) -> bool:
    """Tells whether questions about it are held out: a film's with its director's, to whom bridges lead, and
    a song's with its performer's."""
    return held_out(self.facts.get('director', self.facts.get('performer', self.name)))


def plain(title: str) -> str:
  """A title without what it has in brackets at the end: 'Duel (film)' is 'Duel'."""
  return re.sub(r'\s*\([^()]*\)$', '', title).strip()


def entities(documents: Sequence[Document], words: int) -> list[Entity]:
  """Finds films, songs and people by the first `words` words of their passages; names that occur twice or
  have a single word are left out."""
  found, adjectives = {}, Counter()
  for document in documents:
    name, text = plain(document.title), first_words(document.text, words)
    film, born, pronoun = FILM.match(text), BORN.match(text), ''
    if ' ' not in name or not name[0].isalnum():  # one word stands for other things too
      continue
    if film and text.startswith(name):
      director = DIRECTOR.search(text)
      facts = {'year': film['year'], 'nationality': film['adjective'],
               'director': director and director['director']}
      entity = Entity(document.id, name, 'film', facts)
    elif SONG.match(text) and text[1:].lstrip().startswith(name):
      entity = Entity(document.id, name, 'song', {})
    elif born and _is_person(name, text):
      place, adjective = PLACE.search(text), NATIONALITY.search(text)
      facts = {'born': born['born'], 'died': born['died'], 'place': place and place['place'],
               'nationality': adjective and adjective['adjective']}
      men, women = (len(re.findall(rf'\b(?:{one})\b', document.text, re.I)) for one in ('he|his', 'she|her'))
      pronoun = 'he' if men > women else 'she' if women > men else ''
      entity = Entity(document.id, name, 'person', facts)
      adjectives[facts['nationality']] += 1
    else:
      continue
    for (kind, attribute), (before, value) in SAID.items():
      if kind == entity.kind and (said := re.search(rf'\b{before} ?(?P<value>{value}){ENDS}', text)):
        if not set(said['value'].split()) & set(name.split()):
          entity.facts[attribute] = said['value']
    described = DESCRIBED.match(text)
    if described and not set(name.split()) & set(described['description'].split()):
      entity.facts['described'] = f'{described["verb"]} the {described["description"]}'
    entity = dataclasses.replace(entity, title=document.title, pronoun=pronoun)
    found[name] = None if name in found else entity
  known = {adjective for adjective, number in adjectives.items() if adjective and number >= COMMON}
  usable = lambda fact: fact[1] and (fact[0] != 'nationality' or fact[1] in known)
  return [dataclasses.replace(entity, facts=dict(filter(usable, entity.facts.items())))
          for entity in found.values() if entity]


def _is_person(name: str, text: str) -> bool:
  """Tells whether a passage begins with the first word of a name, as a longer form of the name does."""
  own = name.split()
  return own[0][0].isupper() and own[-1][0].isupper() and text.startswith(own[0])


def exchange(documents: Sequence[Document], seed: int, words: int) -> list[Document]:
  """The passages with the names of films exchanged among films, those of songs among songs, of people among
  people, in titles and texts.

  In a person's own passage the longer form at its beginning and the last name alone are replaced too. Then a
  person whom a fact of BRIDGES names and who has no passage is replaced in that passage by one who has.
  """
  rng, new, found = random.Random(seed), {}, entities(documents, words)
  groups = defaultdict(list)
  for entity in found:  # a director gets a name that can be read as one
    odd = entity.kind == 'person' and re.fullmatch(NAME, entity.name) is None
    groups[entity.kind, odd].append(entity.name)
  if len(groups['person', True]) == 1:  # a name alone would be exchanged with itself
    groups['person', False] += groups.pop(('person', True))
  for _, names in sorted(groups.items()):
    order = rng.sample(sorted(names), len(names))
    new |= dict(zip(order, order[1:] + order[:1]))
  people = {entity.passage: entity.name for entity in found if entity.kind == 'person'}
  starts = defaultdict(list)
  for name in sorted(new, key=len, reverse=True):
    starts[re.match(r'\w*', name)[0]].append(name)

  def changed(text: str) -> str:
    parts, done = [], 0
    for word in re.finditer(r'\w+', text):
      if word.start() >= done:
        for name in starts.get(word[0], ()):
          end = word.start() + len(name)
          if text.startswith(name, word.start()) and not text[end:end + 1].isalnum():
            parts += text[done:word.start()], new[name]
            done = end
            break
    return ''.join([*parts, text[done:]])

  def of(document: Document) -> Document:
    name, text = people.get(document.id), changed(document.text)
    if name:
      head = re.match(r'[^(]*?(?=\s*\()', text)[0]
      last = rf'(?<!\w){re.escape(name.split()[-1])}(?!\w)'
      text = new[name] + re.sub(last, lambda _: new[name].split()[-1], text[len(head):])
    return dataclasses.replace(document, title=changed(document.title), text=text)

  return _bridged([of(document) for document in documents], rng, words)


def _bridged(documents: Sequence[Document], rng: random.Random, words: int) -> list[Document]:
  """Replaces each person whom a fact of `BRIDGES` names and who has no passage by one who has, so that there
  are bridges: held-out entities get held-out people, the others the rest."""
  found = entities(documents, words)
  people = {held: [one.name for one in found if one.kind == 'person' and one.held_out == held]
            for held in (False, True)}
  known, texts = set(people[False] + people[True]), {one.id: one.text for one in documents}
  for entity in found:
    for attribute in BRIDGES[entity.kind]:
      name, others = entity.facts.get(attribute), people[entity.held_out]
      if name and name not in known and others and (new := rng.choice(others)) != entity.name:
        texts[entity.passage] = re.sub(rf'\b{re.escape(name)}\b', new, texts[entity.passage])
  return [dataclasses.replace(one, text=texts[one.id]) for one in documents]


def make(documents: Sequence[Document], seed: int, words: int) -> list[Lookup]:
  """All questions that the rules find, none with the text of another, in an order that only `seed` decides.

  Args:
    words: the answer stands in this many first words of a passage.
  """
  rng = random.Random(seed)
  found = {entity.name: entity for entity in entities(documents, words)}
  people = {name: entity for name, entity in found.items() if entity.kind == 'person'}
  directors = {film.name: people[name] for film in found.values()
               if (name := film.facts.get('director')) in people}
  related = {name: _related(entity, people) for name, entity in found.items()}
  made = [one for entity in related.values() for one in _about(entity, people, related, rng)]
  made += _comparisons(list(found.values()), directors, rng)
  times = Counter(one.question.question for one in made)  # a description can be that of two people
  made = [one for one in made if times[one.question.question] == 1]
  rng.shuffle(made)
  return [dataclasses.replace(one, question=dataclasses.replace(one.question, id=f'lookup_{number}'))
          for number, one in enumerate(made)]


def _related(entity: Entity, people: Mapping[str, Entity]) -> Entity:
  """The entity with a 'father' or 'mother', a 'husband' or 'wife', where the passage of the person tells."""
  named = lambda attribute, value: KIN.get(attribute, {}).get(people[value].pronoun, attribute)
  facts = {named(attribute, value) if value in people else attribute: value
           for attribute, value in entity.facts.items()}
  return dataclasses.replace(entity, facts=facts)


def _about(entity: Entity, people: Mapping[str, Entity], related: Mapping[str, Entity],
           rng: random.Random) -> Iterator[Lookup]:
  """A question for each fact of an entity, and for each of the people whom it names."""
  for attribute, value in entity.facts.items():
    if attribute == 'described':
      yield _lookup('described', DESCRIPTION[entity.kind].format(value), entity,
                    (entity.name, ''), [Step(entity.passage, entity.name, f'{entity.name} {value}.')])
      continue
    if not (attribute == 'nationality' and entity.kind == 'film'):
      form = rng.choice(ASKED[entity.kind, attribute][0])
      text = form.format(name=entity.name)
      yield _lookup('one passage', text, entity, (value, ''), [_step(entity, attribute)], attribute)
    forms = RELATED.get((entity.kind, attribute))
    if not forms or value not in people or people[value].held_out != entity.held_out:
      continue
    for asked, answer in related[value].facts.items():
      if asked == 'described':
        continue
      name = rng.choice(forms).format(name=rng.choice((entity.name, entity.title)))
      text = rng.choice(ASKED['person', asked][0]).format(name=name)
      if (attribute, asked) in INFERRED:
        text = f'Who is the {INFERRED[attribute, asked]} of {entity.name}?'
      if answer not in text and 'director' not in answer:  # that is in the question
        steps = [_step(entity, attribute), _step(related[value], asked)]
        turn = asked if attribute == 'director' else attribute  # of whom most is asked, as in 2WikiMultiHopQA
        yield _lookup('bridge', text, entity, (answer, ''), steps, turn)


def _comparisons(found: Sequence[Entity], directors: Mapping[str, Entity],
                 rng: random.Random) -> Iterator[Lookup]:
  """Each film and person with one other in each comparison that it has the fact for, and each film by its
  director."""
  for compared, attribute, forms, compare in COMPARED:
    bridge = compared == 'director'
    of = directors if bridge else {one.name: one for one in found if one.kind == compared}
    able = [one for one in found if one.name in of and attribute in of[one.name].facts]
    rng.shuffle(able)
    for held in (False, True):  # the names of a comparison are held out together
      own = [one for one in able if one.held_out == held]
      for two in zip(own[::2], own[1::2]):
        names, whose = [one.name for one in two], [of[one.name] for one in two]
        said = names
        if bridge:
          said = [f'{director.name} directed {name}' for director, name in zip(whose, names)]
        if whose[0] != whose[1] and (result := compare([one.facts[attribute] for one in whose], names, said)):
          steps = [_step(one, 'director') for one in two if bridge] + [_step(one, attribute) for one in whose]
          kind = 'bridge comparison' if bridge else 'comparison'
          yield _lookup(kind, rng.choice(forms).format(*names), two[0], result, steps)


def _step(entity: Entity, attribute: str) -> Step:
  _, finding = ASKED[entity.kind, attribute]
  return Step(entity.passage, entity.name, finding.format(name=entity.name, value=entity.facts[attribute]))


def _lookup(kind: str, question: str, about: Entity, result: tuple[str, str], steps: Sequence[Step],
            attribute: str = '') -> Lookup:
  answer, conclusion = result
  metadata = {'source': kind} | ({'attribute': attribute} if attribute else {})
  return Lookup(Question('', question, (answer,), metadata), tuple(steps), conclusion, about.held_out)


def mixed(questions: Sequence[Question], shares: Mapping[str, float]) -> list[Question]:
  """Returns the longest list with kinds in these proportions; every beginning of it has them too.

  Questions of kinds without a share are left out; [] where a kind with one is absent.
  """
  shares = {kind: share for kind, share in shares.items() if share}
  there = Counter(question.metadata.get('source') for question in questions)
  most = min((there[kind] / share for kind, share in shares.items()), default=0)
  seen, placed = Counter(), []
  for question in questions:
    kind = question.metadata.get('source')
    if kind in shares:
      placed.append(((seen[kind] + 0.5) / shares[kind], question))
      seen[kind] += 1
  return [question for place, question in sorted(placed, key=lambda pair: pair[0]) if place <= most]


def held_out(name: str) -> bool:
  """Tells whether a name, or the text of a question, is one of those held out of training, for choices."""
  return zlib.crc32(name.encode()) % HELD_OUT == 0


# Comparisons: two values, the names to choose from, what to say of each -> (answer, conclusion); None if
# neither is the answer.
def _ordered(values: Sequence[str], names: Sequence[str], said: Sequence[str], best: Callable,
             word: str) -> tuple[str, str] | None:
  years = [int(re.search(r'\d{3,4}', value)[0]) for value in values]
  place = years.index(best(years))
  if years[0] == years[1]:
    return None
  return names[place], f'{years[place]} is {word} than {years[1 - place]}: {said[place]}.'


_earlier = functools.partial(_ordered, best=min, word='earlier')
_later = functools.partial(_ordered, best=max, word='later')


def _same(values: Sequence[str], names: Sequence[str], said: Sequence[str]) -> tuple[str, str] | None:
  del names, said
  a, b = values
  if a != b and {a, b} <= BRITISH:
    return None
  return ('yes', f'Both are {a}.') if a == b else ('no', f'{a} is not {b}.')


DESCRIPTION = {'film': 'Which film {}?', 'song': 'Which song {}?', 'person': 'Who {}?'}
# (kind, attribute) -> ways to name a person by it.
RELATED: dict[tuple[str, str], Sequence[str]] = {
  ('film', 'director'): ('the director of film {name}', 'the director of the film {name}',
                         'the person who directed {name}'),
  ('film', 'composer'): ('the composer of film {name}', 'the person who wrote the music of {name}'),
  ('song', 'performer'): ('the performer of song {name}', 'the performer of the song {name}',
                          'the singer of {name}'),
  ('song', 'composer'): ('the composer of song {name}', 'the person who wrote the song {name}'),
} | {('person', kin): (f"{{name}}'s {kin}", f'the {kin} of {{name}}') for kin in RELATIVES}
# (relation, what is asked of that relative) -> the one word for both.
INFERRED = {
  ('father', 'father'): 'paternal grandfather', ('father', 'mother'): 'paternal grandmother',
  ('mother', 'father'): 'maternal grandfather', ('mother', 'mother'): 'maternal grandmother',
  ('husband', 'father'): 'father-in-law', ('wife', 'father'): 'father-in-law',
  ('husband', 'mother'): 'mother-in-law', ('wife', 'mother'): 'mother-in-law'}
# (kind, attribute) -> (ways to ask, what was found as a sentence)
ASKED: dict[tuple[str, str], tuple[Sequence[str], str]] = {
  ('film', 'director'): (('Who directed the film {name}?', 'Who is the director of {name}?'),
                         'The director of {name} is {value}.'),
  ('film', 'year'): (('In what year did the film {name} come out?', 'When was the film {name} released?'),
                     '{name} came out in {value}.'),
  ('film', 'nationality'): ((), '{name} is {value}.'),
  ('film', 'writer'): (('Who wrote the film {name}?', 'Who is the screenwriter of {name}?'),
                       '{name} was written by {value}.'),
  ('film', 'producer'): (('Who produced the film {name}?', 'Who is the producer of {name}?'),
                         '{name} was produced by {value}.'),
  ('film', 'star'): (('Who starred in the film {name}?', 'Which actor is the star of {name}?'),
                     '{name} stars {value}.'),
  ('film', 'author'): (('Who wrote what the film {name} is based on?',
                        'Which author wrote the story that {name} is based on?'),
                       '{name} is based on the work of {value}.'),
  ('film', 'composer'): (('Who wrote the music of the film {name}?', 'Who is the composer of {name}?'),
                         'The composer of {name} is {value}.'),
  ('song', 'performer'): (('Who performs the song {name}?', 'Who is the performer of {name}?'),
                          'The performer of {name} is {value}.'),
  ('song', 'composer'): (('Who wrote the song {name}?', 'Who is the composer of {name}?'),
                         'The composer of {name} is {value}.'),
  ('person', 'occupation'): (('What is the occupation of {name}?', 'What is {name} by profession?'),
                             '{name} is by profession {value}.'),
  ('person', 'spouse'): (('Who is {name} married to?', 'Who is the spouse of {name}?'),
                         '{name} is married to {value}.'),
  ('person', 'parent'): (('Who is the father or mother of {name}?', 'Whose child is {name}?'),
                         '{name} is a child of {value}.'),
  ('person', 'died in'): (('Where did {name} die?', 'What is the place of death of {name}?',
                           'Where was the place of death of {name}?'),
                          '{name} died in {value}.'),
  ('person', 'school'): (('Where did {name} study?', 'Where did {name} graduate from?',
                          'Which school or university did {name} go to?'),
                         '{name} studied at {value}.'),
  ('person', 'team'): (('For which team does {name} play?', 'Which club does {name} play for?'),
                       '{name} plays for {value}.'),
  ('person', 'member'): (('What is {name} a member of?', 'Which body or group does {name} belong to?'),
                         '{name} is a member of {value}.'),
  ('person', 'born'): (('When was {name} born?', 'What is the date of birth of {name}?',
                        "When is {name}'s birthday?"),
                       '{name} was born on {value}.'),
  ('person', 'died'): (('When did {name} die?', 'What is the date of death of {name}?'),
                       '{name} died on {value}.'),
  ('person', 'place'): (('Where was {name} born?', 'What is the place of birth of {name}?'),
                        '{name} was born in {value}.'),
  ('person', 'nationality'): (('What nationality is {name}?', 'What is the nationality of {name}?',
                               'Which country is {name} from?', 'Which country {name} is from?'),
                              '{name} is {value}.'),
}
ASKED |= {('person', kin): ((f'Who is the {kin} of {{name}}?', f"Who is {{name}}'s {kin}?"),
                            f'The {kin} of {{name}} is {{value}}.') for kin in RELATIVES}
Compare = Callable[[Sequence[str], Sequence[str], Sequence[str]], tuple[str, str] | None]
# With 'director', {} are the two films whose directors are compared.
COMPARED: Sequence[tuple[str, str, Sequence[str], Compare]] = (
  ('film', 'year', ('Which film came out first, {} or {}?', 'Which film was released earlier, {} or {}?'),
   _earlier),
  ('film', 'year', ('Which film came out later, {} or {}?',
                    'Which film was released more recently, {} or {}?'), _later),
  ('film', 'nationality', ('Are both films, {} and {}, from the same country?',), _same),
  ('person', 'born', ('Who was born first, {} or {}?', 'Who is older, {} or {}?'), _earlier),
  ('person', 'born', ('Who was born later, {} or {}?', 'Who is younger, {} or {}?'), _later),
  ('person', 'died', ('Who died first, {} or {}?', 'Who died earlier, {} or {}?'), _earlier),
  ('person', 'died', ('Who died later, {} or {}?',), _later),
  ('person', 'nationality', ('Are {} and {} of the same nationality?',
                             'Do {} and {} have the same nationality?'), _same),
  ('director', 'born', ('Which film has the director who was born earlier, {} or {}?',
                        'Which film has the older director, {} or {}?'), _earlier),
  ('director', 'born', ('Which film has the director who was born later, {} or {}?',
                        'Which film has the younger director, {} or {}?'), _later),
  ('director', 'died', ('Which film has the director who died first, {} or {}?',
                        'Which film has the director who died earlier, {} or {}?'), _earlier),
  ('director', 'died', ('Which film has the director who died later, {} or {}?',), _later),
  ('director', 'nationality', ('Do the directors of the films {} and {} have the same nationality?',
                               'Are the directors of both films, {} and {}, from the same country?'), _same),
)
