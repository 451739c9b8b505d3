"""The tool `find`: where words stand in a document."""

import bisect
import functools
import itertools
import re

from pydantic import Field

from jaxsearch.tools.calls import Call, Tools
from jaxsearch.tools.open_document import read, wrapped
from jaxsearch.tools.tool import NOTHING, Arguments, declare
from jaxsearch.trees.tree import Node

MOST, AROUND = 10, 1  # places that are shown; lines before and after each


class FindArguments(Arguments):
  """Finds words in a document; shows the lines around each place, with the number of the first."""
  document: str = Field(description='The id of the document, as in the results of a search, or its title.')
  words: str = Field(pattern=r'\S', description='Words as they follow each other there, in any case.')


def find(tools: Tools, node: Node, name: str, words: str) -> str:
  """Returns the lines around the first places of words in a document; they may span lines."""
  title, paragraphs = read(tools, node, name)
  lines, text = wrapped(paragraphs), '\n'.join(paragraphs)  # lines may break words
  solid = list(itertools.accumulate((not letter.isspace() for letter in text), initial=0))
  starts = list(itertools.accumulate((len(''.join(line.split())) for line in lines), initial=0))
  pattern = re.compile(r'\s+'.join(map(re.escape, words.split())), re.IGNORECASE)
  places = (bisect.bisect_right(starts, solid[match.start()]) for match in pattern.finditer(text))
  firsts = itertools.islice(dict.fromkeys(max(place - AROUND, 1) for place in places), MOST)
  shown = ['\n'.join([f'Line {first}:', *lines[first - 1:first + 2 * AROUND]]) for first in firsts]
  return '\n\n'.join([title, *shown] if shown or not lines else [title, NOTHING])


TOOL = declare('find', FindArguments, lambda node, arguments, show: [
  Call(functools.partial(find, node=node, name=arguments.document, words=arguments.words), node, 'find',
       f'{arguments.words} in {arguments.document}', show)], opens=True)
