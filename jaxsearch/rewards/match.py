"""Matching of answers with golds: exact match, substring match, token F1, and as a number.

Pure functions of strings, used as rewards and as metrics. The normalisation is SQuAD's (evaluate-v1.1.py),
also that of Search-R1 (`qa_em.py`), HotpotQA (`hotpot_evaluate_v1.py`) and FlashRAG: lower case, no ASCII
punctuation, no articles, single spaces, in this order.

Rules that every function here shares:
  * `golds` is a sequence of accepted answers, or one bare string, which is one gold and not its letters;
  * a gold that normalises to nothing ('', 'the', '?') matches only a prediction that does so too;
  * `prediction=None` means that there was no answer, and matches nothing.
"""

import collections
import re
import string
from collections.abc import Iterable
from fractions import Fraction

RULES = 'exact', 'numeric', 'stated'  # of `matches`
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')
# HotpotQA's rule: a closed answer is right or wrong; sharing a word with a longer one earns nothing.
_CLOSED_ANSWERS = frozenset({'yes', 'no', 'noanswer'})
# A sign belongs to the number unless something stands before it ('3-4', 'covid-19').
_CURRENCY = re.compile(r'(?:(?<!\w)([-+])\s?)?\\?[$€£¥₹]\s*')
_NUMBER = re.compile(r'''
  (?<![\w^])(?<!\^\{)                        # the 2 of km2, CO2, m^2 or m^{2} is no number
  (?P<number>[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![.\w])\.[0-9]+)
             (?:[eE](?P<exponent>[-+]?[0-9]+)(?!\w))?)
  (?:\s?/\s?(?P<divisor>[0-9]+)(?![.,]?[0-9]))?
  (?P<percent>\s*(?:\\?%|per\s?cent\b))?''', re.VERBOSE)
_TIMES_POWER = re.compile(r'(?<=[0-9])\s*(?:\\times|\\cdot|[x*×·])\s*10\s?\^\s?\{?([-+]?[0-9]+)\}?')
_POWER = re.compile(r'(?<![\w.,])10\s?\^\s?\{?([-+]?[0-9]+)\}?')
_FRACTION = re.compile(r'(?<![0-9])\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}')
# Characters; far above any answer, and far below what takes long to compute with.
_LONGEST_NUMBER, _LONGEST_EXPONENT = 100, 4


def normalize_answer(text: str) -> str:
  """Returns lower case without ASCII punctuation and a/an/the, with single spaces."""
  return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
  """Returns 1.0 where the normalised prediction equals a normalised gold, else 0.0."""
  return _best(prediction, golds, lambda answer, gold: float(answer == gold))


def substring_match(prediction: str | None, golds: str | Iterable[str]) -> float:
  """Returns 1.0 where the normalised prediction contains a normalised gold (Search-R1's `subem_check`)."""
  return _best(prediction, golds, lambda answer, gold: float(gold in answer if gold else not answer))


def entity_match(prediction: str | None, golds: str | Iterable[str]) -> float:
  """Applies CARL's rule for evaluation (section 4): an exact match, or contains a gold of several words.

  Never a reward: an answer that lists every candidate earns 1.
  """
  return _best(prediction, golds,
               lambda answer, gold: float(answer == gold or (' ' in gold and gold in answer)))


def f1(prediction: str | None, golds: str | Iterable[str]) -> float:
  """Returns `token_f1`, but yes, no and noanswer (on either side) score 1.0 if both are equal, else 0.0."""
  def score(answer, gold):
    return float(answer == gold) if {answer, gold} & _CLOSED_ANSWERS else _overlap(answer, gold)

  return _best(prediction, golds, score)


def token_f1(prediction: str | None, golds: str | Iterable[str]) -> float:
  """Returns the F1 of normalised tokens as a bag, against the best gold: reward of CuSearch and R-Search.

  Two answers that both normalise to nothing score 1.0 (SQuAD v2's rule), one of them alone 0.0.
  """
  return _best(prediction, golds, _overlap)


def _overlap(answer: str, gold: str) -> float:
  if answer == gold:
    return 1.0
  answer_tokens, gold_tokens = answer.split(), gold.split()
  common = sum((collections.Counter(answer_tokens) & collections.Counter(gold_tokens)).values())
  return 2.0 * common / (len(answer_tokens) + len(gold_tokens))


def numeric_match(prediction: str | None, golds: str | Iterable[str], *, tolerance: float = 0.0) -> float:
  """Returns 1.0 where the last number of the prediction is that of a gold, else 0.0.

    * p is g if |p - g| <= tolerance * |g|, in exact arithmetic;
    * a per cent sign on one side only may be read or ignored: '12.5%' is 12.5 and 0.125, whichever the other
      side says. With a sign on both sides or on neither, 12.5 is not 0.125;
    * a gold without a number ('yes', 'no') needs an exact match.
  """
  number, allowed = read_number(prediction or ''), Fraction(str(tolerance))

  def right(gold: str) -> bool:
    wanted = read_number(gold)
    if wanted is None or number is None:
      return wanted is None and exact_match(prediction, gold) == 1.0
    (value, percent), (target, target_percent) = number, wanted
    readings = [value] if percent == target_percent else [value, value / 100 if percent else value * 100]
    return any(abs(reading - target) <= allowed * abs(target) for reading in readings)

  return float(any(map(right, _listed(golds))))


def read_number(text: str) -> tuple[Fraction, bool] | None:
  r"""Reads the last number in a text, and whether a per cent sign follows it; None without one.

  Reads signs, decimals, thousands separated by commas, powers of ten (1.5e6, 10^6) and fractions of whole
  numbers (3/4), all in ASCII digits, and as LaTeX has them (10{,}000, \frac{3}{4}, 2 \times 10^{6}). Units
  are ignored ('1.5 million' is 1.5), and so are digits inside a word ('km2').
  """
  text = _FRACTION.sub(r'\1/\2', text.replace('{,}', ',').replace('\N{MINUS SIGN}', '-'))
  text = _CURRENCY.sub(r' \1', _POWER.sub(r'1e\1 ', _TIMES_POWER.sub(r'e\1 ', text)))
  last = collections.deque(_NUMBER.finditer(text), maxlen=1)
  if not last:
    return None
  number, exponent, divisor, percent = last[0].group('number', 'exponent', 'divisor', 'percent')
  divisor = divisor or '1'
  if max(len(number), len(divisor)) > _LONGEST_NUMBER or len(exponent or '') > _LONGEST_EXPONENT:
    return None
  if not int(divisor):
    return None
  return Fraction(number.replace(',', '')) / int(divisor), percent is not None


def matches(prediction: str | None, golds: str | Iterable[str], how: str = 'exact',
            tolerance: float = 0.0) -> float:
  """Returns 1.0 or 0.0 by the rule `how`: 'exact', 'numeric', which has a `tolerance`, or 'stated', the exact
  match of the answer that a longer response states, see `stated`."""
  if how not in RULES:
    raise ValueError(f'no way to match answers is called {how!r}; known: {", ".join(RULES)}')
  if how == 'numeric':
    return numeric_match(prediction, golds, tolerance=tolerance)
  return exact_match(stated(prediction) if how == 'stated' else prediction, golds)


def vote(prediction: str | None, how: str) -> str | None:
  """Returns a text whose normal form two predictions share if the rule `how` of `matches` takes them for one.

  None for None. Numbers count by value, so '12.5%' and '0.125' agree; a text without a number stays as it is.
  """
  if how == 'numeric' and (number := read_number(prediction or '')):
    value, percent = number
    value = value / 100 if percent else value  # in words: a normal form has no signs
    return f'{"minus " * (value < 0)}{abs(value.numerator)} over {value.denominator}'
  return stated(prediction) if how == 'stated' else prediction


def stated(response: str | None) -> str | None:
  """Returns the rest of the line after the last 'Exact Answer:' of a response; all of it without one."""
  *before, rest = re.split(r'exact answer\W{0,4}:\W*', response or '', flags=re.IGNORECASE)
  return rest.partition('\n')[0] if before else response


def answer_found(golds: Iterable[str], text: str) -> bool:
  """Tells whether a text holds a gold answer as whole words, both normalised as for exact match."""
  text = f' {normalize_answer(text)} '
  return any(gold and f' {gold} ' in text for gold in map(normalize_answer, golds))


def _best(prediction, golds, score) -> float:
  """Returns the largest score(normalised prediction, normalised gold), 0.0 without prediction or golds."""
  if prediction is None:
    return 0.0
  answer = normalize_answer(prediction)
  return max((score(answer, normalize_answer(gold)) for gold in _listed(golds)), default=0.0)


def _listed(golds: str | Iterable[str]) -> Iterable[str]:
  return (golds,) if isinstance(golds, str) else golds
