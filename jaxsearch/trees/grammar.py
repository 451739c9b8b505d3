"""The tags of a search agent: reads actions and answers, writes observations, makes retrieved text harmless.

A policy span ends in an action, `<search> query </search>` or `<answer> answer </answer>`, and the
environment replies with `<information>`; every paper has its own names. Reading is strict: a tag is exactly
`<name>` or `</name>`, an element holds no other tag. Writing is careful: what a tool returned can neither act
as one of our tags nor become a special token.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxsearch.data.corpus import Document


class Tags(NamedTuple):
  """Names of the tags, without brackets. The defaults are Search-R1's (arXiv 2503.09516)."""
  think: str = 'think'
  search: str = 'search'
  observation: str = 'information'
  answer: str = 'answer'
  others: tuple[str, ...] = ()   # further elements that the policy writes

  @property
  def names(self) -> tuple[str, ...]:
    return self.think, self.search, self.observation, self.answer, *self.others

  @property
  def stops(self) -> tuple[str, str]:
    """Returns the stop strings: the ends of the two actions."""
    return f'</{self.search}>', f'</{self.answer}>'


SEARCH_R1 = Tags()
EVIDENCE = 'original_evidence'
R_SEARCH = Tags(observation='observation', others=(EVIDENCE,))  # arXiv 2506.04185
RESEARCH = Tags(observation='result')  # ReSearch, arXiv 2503.19470
CARL = Tags(observation='output', others=('context',))  # arXiv 2605.27788
# What begins or ends a turn in the usual chat templates: for texts shown to a model whose tokenizer is not
# known here.
CONTROL = ('<|', '<s>', '</s>', '<bos>', '<eos>', '[INST]', '[/INST]', '<start_of_turn>', '<end_of_turn>')
NOTHING = 'No documents were found.\n'
FENCE = '\n```\n'  # ends a block; that of a block of Python ends an invoke segment


# Reading policy text.

class Element(NamedTuple):
  """A well-formed `<name>content</name>` and where it stands in its text."""
  name: str
  content: str     # stripped
  start: int
  end: int


@functools.lru_cache(16)  # a span is read for thoughts, query and answer
def elements(text: str, tags: Tags = SEARCH_R1) -> tuple[Element, ...]:
  """Returns the well-formed elements: an opening tag whose next tag of any kind is its own closing tag."""
  places = list(re.finditer(f'<(/?)({"|".join(map(re.escape, tags.names))})>', text))
  return tuple(
    Element(opening[2], text[opening.end():closing.start()].strip(), opening.start(), closing.end())
    for opening, closing in itertools.pairwise(places)
    if not opening[1] and closing[1] and opening[2] == closing[2])


def search_query(text: str, tags: Tags = SEARCH_R1) -> str | None:
  """Returns the query that a policy span ends with; None without one, or if it is empty.

  The token that completes `</search>` may carry a little more (`>.` or `>\\n` are single tokens of large
  vocabularies), so trailing characters that are neither part of a word nor `<` are allowed.
  """
  last = next(reversed(elements(text, tags)), None)
  ends_in_search = last and last.name == tags.search and re.fullmatch(r'[^\w<]*', text[last.end:])
  return last.content or None if ends_in_search else None


def answer(text: str, tags: Tags = SEARCH_R1) -> str | None:
  """Returns the last well-formed answer in policy text; None if there is none or it is empty."""
  answers = [element.content for element in elements(text, tags) if element.name == tags.answer]
  return answers[-1] or None if answers else None


def is_turn(text: str, action: str, tags: Tags = SEARCH_R1) -> bool:
  """Tells whether a span is a thought and an action that is not empty, white space between them alone.

  Characters that are no part of a word may follow the action, since the token that closes it may carry them.
  """
  found = elements(text, tags)
  if [element.name for element in found] != [tags.think, action]:
    return False
  think, acted = found
  around = text[:think.start] + text[think.end:acted.start]
  return bool(acted.content and not around.strip() and re.fullmatch(r'[^\w<]*', text[acted.end:]))


def python_block(text: str) -> str | None:
  """Returns the last closed block of Python; None without one, if it is empty, or if words follow it."""
  blocks = list(re.finditer(r'(?:^|\n)```python[ \t]*\n(|.*?\n)```[ \t]*(?=\n|$)', text, re.DOTALL))
  if not blocks or re.search(r'\w', text[blocks[-1].end():]):
    return None
  return blocks[-1][1].removesuffix('\n') if blocks[-1][1].strip() else None


def context_block(text: str) -> tuple[str, bool]:
  """Returns (content of `<context>`, whether it was closed); ('', False) if none was opened."""
  match = re.search(r'<context>(.*?)(</context>|$)', text, re.DOTALL)
  return (match[1].strip(), bool(match[2])) if match else ('', False)


# Writing observations. `special_tokens` are those of the tokenizer, as text.

def information(documents: Sequence[Document], special_tokens: Iterable[str], tags: Tags = SEARCH_R1) -> str:
  """Writes the observation with retrieved documents, best first, in Search-R1's format, neutralised."""
  safe = functools.partial(neutralise, special_tokens=tuple(special_tokens), tags=tags)
  return observation(listed(documents, safe) or NOTHING, tags)


def listed(documents: Sequence[Document], safe: Callable[[str], str] = str) -> str:
  """Writes one line per document; `safe` is applied to titles and texts."""
  lines = ''
  for number, document in enumerate(documents, start=1):
    title = document.title.strip()
    lines += f'Doc {number}{f"(Title: {safe(title)})" if title else ":"} {safe(document.text.strip())}\n'
  return lines


def invalid_action(tags: Tags = SEARCH_R1) -> str:
  """Writes the observation after a span that ended in neither a search nor an answer."""
  return ('\nThat was not a valid action. '
          f'To search, I write the query between <{tags.search}> and </{tags.search}>. '
          f'To finish, I write the answer between <{tags.answer}> and </{tags.answer}>. I try again.\n')


def observation(body: str, tags: Tags) -> str:
  """Writes what a tool gave, which is inert, between the tags of an observation."""
  return f'\n<{tags.observation}>{body}</{tags.observation}>\n'


# Making retrieved text harmless.

def neutralise(text: str, special_tokens: Iterable[str] = (), tags: Tags = SEARCH_R1) -> str:
  """Overwrites the first character of our tags and of special tokens in `text`, so that they are inert.

  Tags are found in any case, with spaces, slashes or attributes inside, closed or not; both kinds also under
  Unicode compatibility forms, accents and invisible characters, which some tokenizers normalise away. Nothing
  is removed, and the new character is in no tag and no special token, so no new one can arise. Added tokens
  of spaces or invisible characters alone control nothing and stay.
  """
  hostile, inert = _hostile(tuple(special_tokens), tags)
  if not hostile.search(text.translate(_FOLDS)):
    return text
  folds = [_FOLDS[ord(character)] for character in text]
  origin = [index for index, fold in enumerate(folds) for _ in fold]     # folded index -> index in the text
  starts = {origin[match.start()] for match in hostile.finditer(''.join(folds))}
  return ''.join(inert if index in starts else character for index, character in enumerate(text))


@functools.lru_cache
def _hostile(special_tokens: tuple[str, ...], tags: Tags) -> tuple[re.Pattern, str]:
  """Returns the pattern of tags and special tokens in folded text, and the character that overwrites them."""
  folded = [''.join(map(_fold, token)) for token in special_tokens]
  names = '|'.join(re.escape(''.join(map(_fold, name))) for name in tags.names)
  pattern = '|'.join([rf'<[ /\\]*(?:{names})', *(re.escape(token) for token in folded if token.strip())])
  inert = next((c for c in '([{‹«' if not any(c in token for token in folded)), None)
  if inert is None:
    raise ValueError('every candidate for the neutral character is part of a special token')
  return re.compile(f'(?={pattern})'), inert     # a lookahead, since occurrences may overlap


def _fold(character: str) -> str:
  """Folds a character as a lenient reader does: compatibility form, no case or accent, '' if invisible."""
  if character.isspace():
    return ' '
  decomposed = unicodedata.normalize('NFKD', character).casefold()
  category = unicodedata.category  # C: controls, formats, private use, what is not assigned
  return ''.join(c for c in decomposed if category(c)[0] != 'C' and category(c) not in ('Mn', 'Me'))


class _Folds(dict):
  """Holds `_fold` of the characters seen so far, by their numbers: what `str.translate` takes."""

  def __missing__(self, number: int) -> str:
    self[number] = _fold(chr(number))
    return self[number]


_FOLDS = _Folds()
