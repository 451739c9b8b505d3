"""Makes one question of two, by rules: a name in the second that is the answer of the first is replaced by a
description made from the first. MuSiQue was made so from people's questions (Trivedi et al. 2022, section 3).
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from jaxsearch.rewards.match import answer_found
from recipes.wiki_lookups import WORD, Lookup

NAME = rf'{WORD}(?: (?:(?:of|the|de|van|von|and) )*{WORD}){{0,4}}'
# A question for the subject of a sentence: its rest can follow 'the person who' or 'the KIND that'. It does
# not end in a preposition, as 'Who was he married to?' does.
PASSIVE = r'(?:is|was|are|were|has been) (?:[a-z]+ly )?[a-z]+(?:ed|en|nown|ought|orn)'
ACTIVE = r'[a-z]+ed|[a-z]*(?:began|became|built|gave|held|led|lost|made|ran|sang|took|won|wrote)'
OPEN = ''.join(rf'(?<! {word})' for word in ('about', 'at', 'by', 'for', 'from', 'in', 'of', 'on', 'to', 'with'))
SUBJECT = re.compile(
  r'(?:Who|(?:Which|What) (?P<kind>(?!are|did|do|does|had|has|is|other|was|were)[a-z-]+)) '
  rf'(?P<says>(?:{PASSIVE}|{ACTIVE}|(?<=Who )(?:is|was) (?:the|an?)) [^?]+){OPEN}\?')
# Words around a name that is not part of a longer one: a subject after 'did', or any after a preposition.
BEFORE = ('about|after|against|and|around|at|before|between|by|during|for|from|has|in|inside|into|is|near|of|on|'
          'over|than|through|to|under|was|were|when|with|within|would')
AFTER = ('an?|and|are|as|at|before|born|by|during|for|from|had|has|have|in|is|located|on|or|that|the|to|was|were|'
         'when|which|while|who|with|within')
PLACE = (rf'(?:\b(?P<asks>[Dd]id|[Dd]o|[Dd]oes)|\b(?:{BEFORE})) (?P<name>{{name}})'
         rf'(?(asks)(?= [a-z])|(?=\?|, | (?:{AFTER})\b))')


def compose(found: Sequence[Lookup]) -> Iterator[Lookup]:
  """Yields questions of two steps, of kind 'composed', from questions of one.

  Both are held out or neither is; they are about two passages, and no answer stands in what is asked. The
  attribute is the name that is described, so that names take turns.
  """
  described = defaultdict(list)  # name -> (question that it is the answer of, its description)
  for one in found:
    asked, name = SUBJECT.fullmatch(one.question.question), one.question.golden_answers[0]
    if asked and re.fullmatch(NAME, name):
      who = f'{asked["kind"]} that' if asked['kind'] else 'person who'
      described[name].append((one, f'the {who} {asked["says"]}'))
  for two in found:
    text = two.question.question
    for name in described:
      place = f' {name}' in text and re.search(PLACE.format(name=re.escape(name)), text)
      for one, description in described[name] if place else ():
        asked = text[:place.start('name')] + description + text[place.end('name'):]
        apart = one.steps[0].passage != two.steps[0].passage and one.held_out == two.held_out
        if apart and not answer_found((name, *two.question.golden_answers), asked):
          question = dataclasses.replace(two.question, id=f'{two.question.id}_{one.question.id}', question=asked,
                                         metadata={'source': 'composed', 'attribute': name})
          finding = f'{description[0].upper()}{description[1:]} is {name}.'  # its sentence would be long
          steps = (one.steps[0]._replace(query=description, finding=finding), two.steps[0]._replace(query=text))
          yield Lookup(question, steps, held_out=two.held_out)
