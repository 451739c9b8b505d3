"""Does a predicted answer match one of the gold answers: exact match, substring match and token F1.

Plain functions of strings, used as reward and as evaluation metric alike. Getting the answer out of a model's
text is `rewards/formats.py`. The normalisation is SQuAD's (evaluate-v1.1.py), which Search-R1 (`qa_em.py`),
HotpotQA (`hotpot_evaluate_v1.py`) and FlashRAG use as well: lower case, ASCII punctuation removed, articles
removed, white space collapsed, in this order. Other Unicode characters stay as they are.

Rules that every function here shares:
  * `golds` is a sequence of accepted answers, or one bare string, which is one gold and not its letters;
  * a gold that normalises to nothing ('', 'the', '?') matches only a prediction that does so too;
  * `prediction=None` means that there was no answer, and matches nothing.
"""

import collections
import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLES = re.compile(r'\b(a|an|the)\b')
# HotpotQA's rule: a closed answer is right or wrong; sharing a word with a longer one earns nothing.
_CLOSED_ANSWERS = frozenset({'yes', 'no', 'noanswer'})


def normalize_answer(text: str) -> str:
  """`text` in lower case, without ASCII punctuation and a/an/the, words separated by single spaces."""
  return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
  """1.0 where the normalised prediction equals a normalised gold, else 0.0."""
  return _best(prediction, golds, lambda answer, gold: float(answer == gold))


def substring_match(prediction: str | None, golds: str | Iterable[str]) -> float:
  """1.0 where the normalised prediction contains a normalised gold (Search-R1's `subem_check`), else 0.0."""
  return _best(prediction, golds, _contains)


def entity_match(prediction: str | None, golds: str | Iterable[str]) -> float:
  """CARL's evaluation rule: an exact match, or a gold of several words that the prediction contains."""
  return _best(prediction, golds,
               lambda answer, gold: float(answer == gold or (' ' in gold and gold in answer)))


def f1(prediction: str | None, golds: str | Iterable[str]) -> float:
  """The F1 of the normalised tokens as a bag, against the gold where it is largest.

  An answer yes, no or noanswer (on either side) scores 1.0 if both are equal and 0.0 otherwise. Two answers
  that both normalise to nothing score 1.0 (SQuAD v2's rule), one of them alone 0.0.
  """
  return _best(prediction, golds, _token_f1)


def _best(prediction, golds, score) -> float:
  """The largest `score(normalised prediction, normalised gold)`, 0.0 without prediction or golds."""
  if prediction is None:
    return 0.0
  if isinstance(golds, str):
    golds = (golds,)
  answer = normalize_answer(prediction)
  return max((score(answer, normalize_answer(gold)) for gold in golds), default=0.0)


def _contains(answer: str, gold: str) -> float:
  return float(gold in answer) if gold else float(not answer)


def _token_f1(answer: str, gold: str) -> float:
  if answer == gold:
    return 1.0
  if answer in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS:
    return 0.0
  answer_tokens, gold_tokens = answer.split(), gold.split()
  common = sum((collections.Counter(answer_tokens) & collections.Counter(gold_tokens)).values())
  return 2.0 * common / (len(answer_tokens) + len(gold_tokens))
