"""What a model's text holds, by the rules of each paper: answers, boxes, well-formed chains, judge's scores.

Everything here reads *spans*: the texts that the model itself wrote, in order, cut where an observation was
inserted. Prompt and retrieved text are not in them, so an example in the prompt's template or a tag in a
passage can count neither for the format nor as an answer, and no element reaches across an observation. A
rollout has them as its POLICY nodes; `policy_spans` cuts them out of a flat transcript. Whether an answer is
right is `rewards/match.py`.
"""

import re
from collections.abc import Sequence

from jaxsearch.trees import grammar


def policy_spans(transcript: str, prompt: str = '', tags: grammar.Tags = grammar.SEARCH_R1) -> list[str]:
  """Cuts a flat transcript into the spans of the model.

  Args:
    transcript: prompt, model text and observations in one string.
    prompt: what the transcript starts with and what does not count.
    tags: whose `observation` tag surrounds what was retrieved. An observation ends at its first closing tag:
      retrieved text has to be neutralised (`grammar.neutralise`). One that never ends reaches to the end of
      the transcript.

  Raises:
    ValueError: if the transcript does not start with the prompt.
  """
  if not transcript.startswith(prompt):
    raise ValueError(f'policy_spans: the transcript does not start with the prompt {prompt[:60]!r}…')
  observation = rf'<{re.escape(tags.observation)}>.*?(?:</{re.escape(tags.observation)}>|\Z)'
  return [span for span in re.split(observation, transcript[len(prompt):], flags=re.DOTALL) if span.strip()]


def last_answer(spans: Sequence[str], tags: grammar.Tags = grammar.SEARCH_R1) -> str | None:
  """Search-R1's answer: the last well-formed `<answer>` of the model, None without one.

  The reference (`qa_em.py`) reads the whole transcript, prompt included, and therefore asks for two answers
  at least and takes the last one, which may stand in a retrieved passage. Here the example in the prompt is
  never looked at.
  """
  answers = (grammar.answer(span, tags) for span in reversed(_spans(spans)))
  return next((found for found in answers if found is not None), None)


def only_box(spans: Sequence[str], name: str) -> str | None:
  """The stripped content of `<name>…</name>` if the model wrote both tags exactly once, else None."""
  spans = _spans(spans)
  if any(sum(span.count(tag) for span in spans) != 1 for tag in (f'<{name}>', f'</{name}>')):
    return None
  found = (re.search(f'<{re.escape(name)}>(.*?)</{re.escape(name)}>', span, re.DOTALL) for span in spans)
  return next((match[1].strip() for match in found if match), None)


def last_boxed(text: str) -> str | None:
  r"""The content of the last complete `\boxed{…}`, where braces balance; None without one or if it is empty.

  CARL's answers (appendix C). Escaped braces, `\{` and `\}`, are text.
  """
  for opening in reversed(list(re.finditer(r'\\boxed\s*\{', text))):
    depth = 1
    for brace in re.finditer(r'\\.|[{}]', text[opening.end():], re.DOTALL):
      depth += {'{': 1, '}': -1}.get(brace[0], 0)
      if not depth:
        return text[opening.end():opening.end() + brace.start()].strip() or None
  return None


def chain_format(
    spans: Sequence[str], tags: grammar.Tags = grammar.SEARCH_R1, *, require_think: bool = True
) -> float:
  """1.0 if every span is `<think>…</think>` and a search, in the last one an answer instead; else 0.0.

  Search-R1's `is_valid_sequence` (`qa_em_format.py`), which is the binary format indicator of CuSearch:
  nothing but white space between the elements, no tag unclosed, no action empty. Characters that are no part
  of a word may follow the action, since the token that closes it may carry them.

  Args:
    spans: what the model wrote.
    tags: the names of the tags.
    require_think: False accepts an action without `<think>` before it, too.
  """
  spans = _spans(spans)
  last = len(spans) - 1
  actions = (tags.answer if index == last else tags.search for index in range(len(spans)))
  return float(bool(spans) and all(
      _is_turn(span, action, tags, require_think) for span, action in zip(spans, actions)))


def _is_turn(span, action, tags, require_think) -> bool:
  found = grammar.elements(span, tags)
  names = [element.name for element in found]
  if names != [tags.think, action] and (require_think or names != [action]):
    return False
  ends = [0, *(element.end for element in found)]
  outside = [span[end:element.start] for end, element in zip(ends, found)]
  return bool(found[-1].content) and not ''.join(outside).strip() and bool(
      re.fullmatch(r'[^\w<]*', span[found[-1].end:]))


def cusearch_reward(f1: float, format_score: float, weight: float = 0.2) -> float:
  """`F1 (1 - w) + w format` (CuSearch, eq. 3)."""
  return f1 * (1.0 - weight) + weight * format_score


def r_search_format(
    spans: Sequence[str],
    searched: bool,
    *,
    evidence: str = 'original_evidence',
    answer: str = 'answer',
    gamma_evidence: float = 0.2,
    gamma_answer: float = 0.2,
) -> float:
  """R-Search's format reward, `(1 - I_S)(g_e + g_a I_A) + I_S (g_e I_E + g_a I_A)` (eq. 5).

  Args:
    spans: what the model wrote.
    searched: I_S, whether anything was retrieved. Where nothing was, no evidence is asked for, and g_e is
      given.
    evidence: the tag of I_E: exactly one box of evidence.
    answer: the tag of I_A: exactly one box with the answer.
    gamma_evidence: g_e.
    gamma_answer: g_a.

  Returns:
    One of 0, g_e, g_a, g_e + g_a.
  """
  has_evidence = not searched or only_box(spans, evidence) is not None
  return gamma_evidence * has_evidence + gamma_answer * (only_box(spans, answer) is not None)


def research_format(spans: Sequence[str], tags: grammar.Tags = grammar.RESEARCH, *, boxed: bool = True) -> float:
  r"""1.0 if a chain is written as ReSearch's template wants it (section 2.3, and `validate_format` of its code), else 0.0.

  Thoughts open and close equally often, once at least; every search is closed where it was opened; there is exactly one
  answer; and no result is made up.

  Args:
    spans: what the model wrote.
    boxed: whether the answer has to hold a `\boxed{…}` that is not empty.
  """
  spans = _spans(spans)
  opened, closed = (sum(span.count(tag) for span in spans) for tag in (f'<{tags.think}>', f'</{tags.think}>'))
  served = [re.sub(f'<{tags.search}>(?:(?!</?{tags.search}>).)*</{tags.search}>', '', span, flags=re.DOTALL) for span in spans]
  left_over = re.compile(f'</?{tags.search}>|</?{tags.observation}>')
  answer = only_box(spans, tags.answer)
  return float(opened == closed > 0 and not any(map(left_over.search, served)) and answer is not None
               and (not boxed or last_boxed(answer) is not None))


def judge_score(reply: str, tag: str = 'score') -> int | None:
  """The score -1, 0 or +1 of SLATE's judge: the last `<score>…</score>`, or a reply that is only the number.

  None if there is no such score: numbers in the reasoning before it are never taken for one.
  """
  tagged = re.findall(rf'<{re.escape(tag)}>(.*?)</{re.escape(tag)}>', reply, re.DOTALL)
  score = (tagged[-1] if tagged else reply).strip().replace('\N{MINUS SIGN}', '-')
  return int(score) if re.fullmatch(r'[+-]?1|[+-]?0', score) else None


def useful_collections(reply: str, collections: int) -> int | None:
  """How many collections Search-R2's judge found useful: the number after the last `Final Answer:`.

  None if there is no such line, or if the number is not one from 0 to `collections`.
  """
  found = re.findall(r'Final Answer:?[*\s:]*(\S+)', reply, re.IGNORECASE)
  number = found[-1].strip('*.') if found else ''
  return int(number) if re.fullmatch('[0-9]+', number) and int(number) <= collections else None


def flawed_step(reply: str, steps: int) -> int | None:
  """The first flawed step that Search-R2's refiner names, 0 for none: the integer that its review starts with.

  None if there is no such number, or if it is not one from 0 to `steps`.
  """
  found = re.match(r'\s*([0-9]+)(?![\w.,])', reply)
  return int(found[1]) if found and int(found[1]) <= steps else None


def _spans(spans: Sequence[str]) -> list[str]:
  """A bare string is one span, not its letters."""
  return [spans] if isinstance(spans, str) else list(spans)
