"""Reading a model's text by the rules of each paper: boxes, well-formed chains, the scores of judges.

`spans` are the texts of the POLICY nodes, in order: a tag in a template or in a passage never counts, and no
element reaches across an observation.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxsearch.trees import grammar


def only_box(spans: Sequence[str], name: str) -> str | None:
  """Returns the content of `<name>…</name>` if the policy wrote both tags exactly once, else None."""
  if any(sum(span.count(tag) for span in spans) != 1 for tag in (f'<{name}>', f'</{name}>')):
    return None
  matches = (re.search(f'<{re.escape(name)}>(.*?)</{re.escape(name)}>', span, re.DOTALL) for span in spans)
  return next((match[1].strip() for match in matches if match), None)


def last_boxed(text: str) -> str | None:
  r"""Returns the `unwrapped` content of the last balanced `\boxed{…}` (CARL, appendix C); None if empty.

  `\{` and `\}` are text.
  """
  opened, last, content = [], -1, ''
  for mark in re.finditer(r'(\\boxed\s*)?\{|\}|\\(?!\\boxed\s*\{).', text, re.DOTALL):
    if mark[0] == '}' and opened:
      if (opening := opened.pop())[1] and opening.end() > last:
        last, content = opening.end(), text[opening.end():mark.start()]
    elif mark[0] == '{' or mark[1]:
      opened.append(mark)
  return unwrapped(content) or None


def unwrapped(text: str) -> str:
  r"""Strips a text and LaTeX's wrappers around words, nested too: `\text{…}`, `\boxed{…}`; `~` is a space."""
  wrapper = r'\\(?:boxed|emph|text|math)(?:rm|bf|it|sf|tt|up|normal)?\s*\{([^{}]*)\}'
  while (shorter := re.sub(wrapper, r'\1', text)) != text:
    text = shorter
  return text.replace('~', ' ').strip()


def chain_format(spans: Sequence[Any], is_turn: Callable[[Any, str], bool] = grammar.is_turn) -> float:
  """Returns 1.0 if every span is `<think>…</think>` and a search, the last one an answer instead; else 0.0.

  Search-R1's `is_valid_sequence` (`qa_em_format.py`), CuSearch's binary format indicator. `is_turn` is that
  of another grammar, about its spans.
  """
  actions = ['search'] * (len(spans) - 1) + ['answer']
  return float(bool(spans) and all(map(is_turn, spans, actions)))


def r_search_format(spans: Sequence[str], searched: bool, *, gamma_evidence: float = 0.2,
                    gamma_answer: float = 0.2) -> float:
  """Returns R-Search's format reward, `(1 - I_S)(g_e + g_a I_A) + I_S (g_e I_E + g_a I_A)` (eq. 5).

  I_S is `searched`, whether anything was retrieved; without retrieval no evidence is required, and g_e is
  granted. I_E is exactly one box of evidence, I_A exactly one box `<answer>`.
  """
  return (gamma_evidence * (not searched or only_box(spans, grammar.EVIDENCE) is not None)
          + gamma_answer * (only_box(spans, 'answer') is not None))


def research_format(spans: Sequence[str], *, boxed: bool = True) -> float:
  r"""Returns 1.0 if a chain follows ReSearch's template (section 2.3, `validate_format` of its code).

  Thoughts open and close equally often, at least once; every search is closed in the span that opens it;
  there is exactly one answer, which with `boxed` holds a non-empty `\boxed{…}`; the policy wrote no result
  tags itself.
  """
  opened, closed = (sum(span.count(tag) for span in spans) for tag in ('<think>', '</think>'))
  search = re.compile('<search>(?:(?!</?search>).)*</search>', re.DOTALL)
  left_over = any(re.search('</?(?:search|result)>', search.sub('', span)) for span in spans)
  answer = only_box(spans, 'answer')
  answered = answer is not None and (not boxed or last_boxed(answer) is not None)
  return float(opened == closed > 0 and not left_over and answered)


def judge_score(reply: str) -> int | None:
  """Reads the score -1, 0 or +1 of SLATE's judge: the last `<score>…</score>`, or the whole reply."""
  tagged = re.findall('<score>(.*?)</score>', reply, re.DOTALL)
  score = (tagged[-1] if tagged else reply).strip().replace('\N{MINUS SIGN}', '-')
  return int(score) if re.fullmatch(r'[+-]?1|[+-]?0', score) else None


def useful_collections(reply: str, collections: int) -> int | None:
  r"""Reads how many collections Search-R2's judge found useful: the number after the last `Final Answer`.

  It may stand in a `\boxed{…}`, between signs such as `$2$`, `` `2` `` and `**2**`, and before words. None
  without it.
  """
  _, *after = re.split('Final Answer', reply, flags=re.IGNORECASE)
  text = last_boxed(after[-1]) or unwrapped(after[-1]) if after else ''
  number = re.match(r'[^\w-]*([0-9]{1,9})(?![\w%]|\.[0-9]|\s*[-/,]\s*[0-9])', text)
  return int(number[1]) if number and int(number[1]) <= collections else None
