"""How a search agent writes: tags, prompts, observations, and retrieved text made harmless.

A span of the policy ends in an action, `<search> query </search>` or `<answer> answer </answer>`, and the
environment replies with `<information>`. Reading is strict (a tag is exactly `<name>` or `</name>`, an
element holds no other tag) and looks at policy text only. Writing is careful: what a tool returned can
neither act as one of our tags nor become a special token. The names of the tags are data, since every paper
has its own. When to search and when to stop is decided by the methods.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jaxsearch.trees.tree import Node, Role


@dataclasses.dataclass(frozen=True)
class Tags:
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
    """Stop strings: the ends of the two actions."""
    return f'</{self.search}>', f'</{self.answer}>'


SEARCH_R1 = Tags()
EVIDENCE = 'original_evidence'
R_SEARCH = Tags(observation='observation', others=(EVIDENCE,))  # arXiv 2506.04185
RESEARCH = Tags(observation='result')  # ReSearch, arXiv 2503.19470
CARL = Tags(observation='output', others=('context',))  # arXiv 2605.27788
FENCE = '\n```\n'  # ends a block of Python, and with it an invoke segment

# Doubled braces, since the prompts are filled in like all others.
_CARL = ('You {may} use a Python code block to help answer this question. Use search(query) for retrieval or write arithmetic '
         'code. After seeing tool output, write a <context> block extracting the relevant information, then provide your '
         'answer inside \\boxed{{{{}}}}.')
PROMPTS = {
    # Search-R1, table 1; the question stands where {question} is.
    'search_r1': (
        'Answer the given question. You must conduct reasoning inside <think> and </think> first '
        'every time you get new information. After reasoning, if you find you lack some knowledge, '
        'you can call a search engine by <search> query </search> and it will return the top searched'
        ' results between <information> and </information>. You can search as many times as your '
        'want. If you find no further external knowledge needed, you can directly provide the answer '
        'inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing'
        ' </answer>. Question: {question}\n'),
    # R-Search, table 1; the question is appended.
    'r_search': (
        'You are a helpful assistant that can solve the given question step by step. For each step, '
        'start by explaining your thought process. If additional information is needed, provide a '
        'specific query enclosed in <search> and </search>. The system will return the top search '
        'results within <observation> and </observation>. You can perform multiple searches as '
        'needed. When you know the final answer, use <original_evidence> and </original_evidence> to'
        ' provide all potentially relevant original information from the observations. Ensure the '
        'information is complete and preserves the original wording without modification. If no '
        'searches were conducted or observations were made, omit the evidence section. Finally, '
        'provide the final answer within <answer> and </answer> tags. Question: {question}\n'),
    # Search-R1's baseline R1, from its code (`scripts/data_process/nq.py`): reasoning, no search.
    'r1': (
        'Answer the given question. You should first have a reasoning process in mind and then provides '
        'the answer. Show your reasoning in <think> </think> tags and return the final answer in <answer>'
        ' </answer> tags, for example <answer> Beijing </answer>. Question: {question}\n'),
    # ReSearch, table 1, the template for base models, as its code has it.
    'research': (
        'A conversation between User and Assistant. The user asks a question, and the assistant solves it.'
        ' The assistant first thinks about the reasoning process in the mind and then provides the user '
        'with the answer. During thinking, the assistant can invoke the wikipedia search tool to search '
        'for fact information about specific topics if needed. The reasoning process and answer are '
        'enclosed within <think> </think> and <answer> </answer> tags respectively, and the search query '
        'and result are enclosed within <search> </search> and <result> </result> tags respectively. For '
        'example, <think> This is the reasoning process. </think> <search> search query here </search> '
        '<result> search result here </result> <think> This is the reasoning process. </think> <answer> '
        'The final answer is \\[ \\boxed{{answer here}} \\] </answer>. In the last part of the answer, the '
        'final exact answer is enclosed within \\boxed{{}} with latex format. User: {question}. Assistant:'),
    # StepSearch, table 4.
    'step_search': (
        '## Background\nYou are a deep AI research assistant. I will give you a single-hop or multi-hop '
        "question. You don't have to answer the question now, but you should first think about your "
        'research plan or what to search for next. You can use search to fill in knowledge gaps.\n'
        '## Response format: Your output format should be one of the following two formats:\n'
        '<think>your thinking process</think>\n<answer>your answer after getting enough information'
        '</answer>\nor\n<think>your thinking process</think>\nuse <search>search keywords</search> to '
        'search for information. For example, <think> plan to search: (Q1) (Q2) (Q3) ... </think> '
        '<search> (Q1) question </search> <think> reasoning ... </think> <answer> Beijing </answer>.\n'
        'The search engine will return the results contained in <information> and </information>.\n'
        'Please follow the loop of think, search, information, think, search, information, and answer '
        'until the original question is finally solved.\nNote: The retrieval results may not contain the '
        'answer or contain noise. You need to tell whether there is a golden answer. If not, you need to '
        'correct the search query and search again. Question:{question}\n'),
    # CARL, appendix C: no tool, a tool by all means, a tool at will, several calls by all means.
    'carl_direct': (
        'Answer the following question directly. Do not use any tools or code. Provide your answer inside '
        '\\boxed{{}}.\nQuestion: {question}\n'),
    'carl_forced': _CARL.format(may='must') + '\nQuestion: {question}\n',
    'carl': _CARL.format(may='may optionally') + '\nQuestion: {question}\n',
    'carl_multi_hop': (
        _CARL.format(may='must') + ' This question may require multiple search steps. You may call tools more than '
        'once.\nQuestion: {question}\n'),
    # For small policies trained on the format: every token of the prompt is paid for by every rollout.
    'world': 'Question: {question}\n',
    'world_direct': 'Question, without search: {question}\n',
    'world_evidence': 'Question, with evidence: {question}\n',
    'world_carl': 'Question, with code: {question}\n',
    'world_carl_direct': 'Question, by heart: {question}\n',
    'world_carl_forced': 'Question, with code by all means: {question}\n',
}


def prompt(question: str, template: str = 'search_r1') -> str:
  """The prompt of a question. Raises ValueError for a template that `PROMPTS` does not have."""
  if template not in PROMPTS:
    raise ValueError(f'unknown prompt template {template!r}, expected one of {", ".join(sorted(PROMPTS))}')
  return PROMPTS[template].format(question=question.strip())


EVIDENCE_PROMPTS = {
    # R-Search, table 5.
    'r_search': (
        'Answer the question based on the given passages. Only give me the answer and do not output any '
        'other words.\nThe following are given passages: {evidence}\nQuestion: {question}\nAnswer:'),
    'world': '{evidence}\nQuestion: {question}\nAnswer:',
}


def evidence_prompt(question: str, evidence: str, template: str = 'r_search') -> str:
  """What the frozen reader of R-Search's evidence reward is asked."""
  return EVIDENCE_PROMPTS[template].format(question=question.strip(), evidence=evidence.strip())


REVIEW_PROMPTS = {
    # What table 12 of Search-R2 asks, behind the transcript instead of around it, so that its cache is kept.
    'search_r2': (
        '\n\nNow you are the reviewer of the reasoning above. Its steps, each a thought with its search or its answer, are '
        'numbered from 1 to {steps} in order. Name the earliest flawed step as one integer; 0 means that all steps are '
        'acceptable.\nEarliest flawed step:'),
    'world': '\nFlawed step, 0 to {steps}:',
}


def review_prompt(steps: int, template: str = 'search_r2') -> str:
  """What Search-R2's refiner is asked behind a draft of so many steps."""
  return REVIEW_PROMPTS[template].format(steps=steps)


# Reading what the policy wrote.


@dataclasses.dataclass(frozen=True)
class Element:
  """A well-formed `<name>content</name>` and where it stands in its text."""
  name: str
  content: str     # stripped
  start: int
  end: int


def elements(text: str, tags: Tags = SEARCH_R1) -> list[Element]:
  """Well-formed elements in order: an opening tag whose next tag of any kind is its own closing tag."""
  found = list(re.finditer(f'<(/?)({"|".join(map(re.escape, tags.names))})>', text))
  return [Element(opening[2], text[opening.end():closing.start()].strip(), opening.start(), closing.end())
          for opening, closing in itertools.pairwise(found)
          if not opening[1] and closing[1] and opening[2] == closing[2]]


def search_query(text: str, tags: Tags = SEARCH_R1) -> str | None:
  """The query that a policy span ends with; None if its last element is no search, empty or not at the end.

  The token that completes `</search>` may carry a little more (`>.` or `>\\n` are single tokens of large
  vocabularies), so trailing characters that are neither part of a word nor `<` are allowed.
  """
  last = next(reversed(elements(text, tags)), None)
  if last is None or last.name != tags.search or not re.fullmatch(r'[^\w<]*', text[last.end:]):
    return None
  return last.content or None


def answer(text: str, tags: Tags = SEARCH_R1) -> str | None:
  """Content of the last well-formed answer in policy text, None where there is none or it is empty."""
  answers = [element.content for element in elements(text, tags) if element.name == tags.answer]
  return answers[-1] or None if answers else None


def answer_of(leaf: Node, tags: Tags = SEARCH_R1) -> str | None:
  """The last answer that the policy gave on the path to `leaf`; prompts and observations do not count.

  Policy spans that follow each other directly are read as one text: no element reaches across an observation.
  """
  spans = [node for node in leaf.path() if node.tokens]
  runs = [[token for node in run for token in node.tokens]
          for role, run in itertools.groupby(spans, key=lambda node: node.role) if role is Role.POLICY]
  texts = (leaf.tree.tokenizer.decode(run) for run in reversed(runs))
  return next((found for text in texts if (found := answer(text, tags)) is not None), None)


def python_block(text: str) -> str | None:
  """The program that a policy span ends with: its last closed block of three backquotes and `python`.

  None if there is none, it is empty, or words follow it.
  """
  blocks = list(re.finditer(r'(?:^|\n)```python[ \t]*\n(.*?)\n```[ \t]*(?=\n|$)', text, re.DOTALL))
  if not blocks or re.search(r'\w', text[blocks[-1].end():]):
    return None
  return blocks[-1][1] if blocks[-1][1].strip() else None


def context_block(text: str) -> tuple[str, bool]:
  """(what stands in `<context>`, whether it was closed); ('', False) where none was begun."""
  found = re.search(r'<context>(.*?)(</context>|$)', text, re.DOTALL)
  return (found[1].strip(), bool(found[2])) if found else ('', False)


# Writing what the environment replies.


class HasText(Protocol):
  """What a retrieved document needs to have here; see `jaxsearch.tools`."""
  title: str
  text: str


def information(documents: Sequence[HasText], special_tokens: Iterable[str], tags: Tags = SEARCH_R1) -> str:
  """The observation that shows retrieved documents, in the wording of Search-R1, neutralised.

  Args:
    documents: best first; none at all is said in so many words.
    special_tokens: the tokenizer's, as text.
  """
  safe = functools.partial(neutralise, special_tokens=tuple(special_tokens), tags=tags)
  return _observation(listed(documents, safe) or 'No documents were found.\n', tags)


def listed(documents: Sequence[HasText], safe: Callable[[str], str] = str) -> str:
  """Documents a line each; `safe` is applied to titles and texts."""
  return ''.join(f'Doc {number}(Title: {safe(document.title.strip())}) {safe(document.text.strip())}\n'
                 for number, document in enumerate(documents, start=1))


def output(text: str, special_tokens: Iterable[str]) -> str:
  """The observation that shows what a program printed (CARL), neutralised."""
  return f'<output>{neutralise(text.strip(), special_tokens, CARL)}</output>\n'


def context(text: str, special_tokens: Iterable[str]) -> str:
  """The clean copy of a context that the policy wrote (CARL): what stays when the output goes."""
  return f'<context>{neutralise(text, special_tokens, CARL)}</context>\n'


def failure(reason: str, special_tokens: Iterable[str], tags: Tags = SEARCH_R1) -> str:
  """The observation after a tool that failed. The reason may quote a server, so it is neutralised too."""
  return _observation(f'The search failed: {neutralise(reason.strip(), special_tokens, tags)}\n', tags)


def invalid_action(tags: Tags = SEARCH_R1) -> str:
  """The observation after a span that ended in neither a search nor an answer."""
  return ('\nThat was not a valid action. '
          f'To search, I write the query between <{tags.search}> and </{tags.search}>. '
          f'To finish, I write the answer between <{tags.answer}> and </{tags.answer}>. I try again.\n')


def _observation(body: str, tags: Tags) -> str:
  return f'\n<{tags.observation}>{body}</{tags.observation}>\n'


# Making retrieved text harmless.


def neutralise(text: str, special_tokens: Iterable[str] = (), tags: Tags = SEARCH_R1) -> str:
  """Makes our tags and the tokenizer's special tokens in `text` inert: overwrites their first characters.

  Tags are found in any case, with spaces, slashes or attributes inside, closed or not; both kinds are also
  found under Unicode compatibility forms, accents and invisible characters, which some tokenizers normalise
  away. As nothing is removed, and the character written occurs in no tag and no special token, no new one
  can arise; doing it again changes nothing. Added tokens of nothing but spaces or invisible characters, which
  some vocabularies have, control nothing and stay.
  """
  hostile, inert = _hostile(tuple(special_tokens), tags)
  folds = [_fold(character) for character in text]
  origin = [index for index, fold in enumerate(folds) for _ in fold]     # folded index -> index in the text
  starts = {origin[match.start()] for match in hostile.finditer(''.join(folds))}
  return ''.join(inert if index in starts else character for index, character in enumerate(text))


@functools.lru_cache
def _hostile(special_tokens: tuple[str, ...], tags: Tags) -> tuple[re.Pattern, str]:
  """The pattern of tags and special tokens in folded text, and the character that overwrites their starts."""
  folded = [''.join(map(_fold, token)) for token in special_tokens]
  names = '|'.join(re.escape(''.join(map(_fold, name))) for name in tags.names)
  pattern = '|'.join([rf'<[ /\\]*(?:{names})', *(re.escape(token) for token in folded if token.strip())])
  inert = next((c for c in '([{‹«' if not any(c in token for token in folded)), None)
  if inert is None:
    raise ValueError('every candidate for the neutral character is part of a special token')
  return re.compile(f'(?={pattern})'), inert     # a lookahead, since occurrences may overlap


@functools.lru_cache(maxsize=65536)
def _fold(character: str) -> str:
  """A character as a lenient reader sees it: compatibility form, no case or accent, '' if invisible."""
  if character.isspace():
    return ' '
  decomposed = unicodedata.normalize('NFKD', character).casefold()
  return ''.join(c for c in decomposed if unicodedata.category(c) not in ('Cc', 'Cf', 'Mn', 'Me'))
