"""How a policy acts: how it is asked, how its spans are read, and how results are shown to it.

A tree has a grammar, so that a method knows none by name: it grows spans to `stops`, reads them
(`methods.actions.read`) and shows what the calls gave (`methods.actions.search`). Here is the grammar of
tags.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxsearch.trees import grammar, templates


class Called(NamedTuple):
  """A call of a tool, well-formed."""
  name: str
  arguments: Any


class Malformed(NamedTuple):
  """A call, or a span in place of one, that cannot be served; `message` says to the policy what is wrong."""
  kind: str  # for counting; '' is not counted by kind
  message: str


class Reading(NamedTuple):
  """A policy span as the policy meant it: calls or an answer."""
  thinking: str
  calls: Sequence[Called | Malformed]
  answer: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class Tagged:
  """Searches and answers between tags, as the papers have them.

  Attributes:
    tokenizer: of the policy.
    tags: the method's.
    tools: of the policy by name; tags know the search alone.
    strict: whether a malformed action ends the episode.
  """
  tokenizer: Any
  tags: grammar.Tags = grammar.SEARCH_R1
  tools: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  strict: bool = False
  kinds = ()  # of malformed calls, for counting
  lead = ' '  # before the first word of a reply to `aside`
  opened = ''  # the beginning of a span that the frame before it has already written
  opening = ''  # the frame that opens a turn of the policy

  @property
  def stops(self) -> tuple[str, ...]:
    """Returns the stop strings of a span."""
    return self.tags.stops

  def safe(self, text: str) -> str:
    """Returns text that is inert: no tag, call, frame or special token."""
    return grammar.neutralise(text, self.tokenizer.special_tokens, self.tags)

  def prompt(self, question: str, template: str, chat: bool, tools: bool = True) -> str:
    """Writes the prompt of a question, neutralised; `tools`: whether the policy may call any."""
    return templates.prompt(self.safe(question), template, self.tokenizer if chat else None)

  def closed(self, node: Any) -> bool:
    """Tells whether a span ended its turn, where there are turns."""
    return False

  def aside(self, node: Any, text: str) -> str:
    """Writes an instruction of ours that follows a span."""
    return text

  def read(self, node: Any) -> Reading:
    """Reads a policy span."""
    text = node.text
    thoughts = [each.content for each in grammar.elements(text, self.tags) if each.name == self.tags.think]
    answer = grammar.answer(text, self.tags)
    query = grammar.search_query(text, self.tags) if answer is None else None
    calls = [] if answer is not None else [Malformed('', grammar.invalid_action(self.tags))]
    return Reading(' '.join(thoughts), [Called('search', {'query': query})] if query else calls, answer)

  def observe(self, node: Any, results: Sequence[tuple[Called | Malformed, str]]) -> str:
    """Writes what follows a policy span (None in a demonstration): its calls with what each gave, inert."""
    return ''.join(call.message if isinstance(call, Malformed) else grammar.observation(text, self.tags)
                   for call, text in results)

  def content(self, node: Any) -> str:
    """Returns what a policy span says, without its end; thoughts that no tag of ours holds are left out."""
    return node.text_without_end

  def resume(self, prompt: Any, notes: str) -> str:
    """Writes what stands for a folded context, notes of the policy's, behind the prompt."""
    return f'<context>{self.safe(notes)}</context>\n'

  def retell(self, text: str) -> str:
    """Writes a turn of a demonstration, which is in Search-R1's tags, as the policy would."""
    return text

  def is_turn(self, node: Any, action: str) -> bool:
    """Tells whether a span is a well-formed turn that ends in a 'search' or an 'answer'."""
    return grammar.is_turn(node.text, action, self.tags)


class Coded(Tagged):
  """CARL's: the call is a closed block of Python."""

  @property
  def stops(self) -> tuple[str, ...]:
    return (grammar.FENCE,)

  def read(self, node: Any) -> Reading:
    """Reads the block that a span ends with; the method reads the answer."""
    code = grammar.python_block(node.text_without_end)
    return Reading('', [] if code is None else [Called('python', {'code': code})], None)

  def observe(self, node: Any, results: Sequence[tuple[Called | Malformed, str]]) -> str:
    return ''.join(f'<output>{text}</output>\n' for _, text in results)

  recall = Tagged.resume  # the copy of a context takes the place of what a call gave


def of_tags(tokenizer: Any, tags: grammar.Tags, **settings: Any) -> Tagged:
  """Returns the grammar of a method's tags."""
  return (Coded if tags == grammar.CARL else Tagged)(tokenizer, tags, **settings)
