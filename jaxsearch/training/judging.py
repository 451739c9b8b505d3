"""Rewards by a judge: how right free answers are, and what a second judge, which pays nothing, says of them.

With `config.reward='judge'` the judge of `config.judge` scores each answer to a question once; a run keeps
its scores. An answer that it fails to score counts by the rule of its question.
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from jaxsearch.rewards.judge import Answer
from jaxsearch.tools.calls import failure_of, one_line
from jaxsearch.trees.tree import Tree


def services(config: ConfigDict) -> list[str]:
  """Names the judges that a config asks for rewards."""
  names = {'judge': config.judge.kind, 'second_judge': config.second_judge.kind}
  return [name for name, kind in names.items() if kind != 'none'] if config.reward == 'judge' else []


def judge(learner, trees: Sequence[Tree]) -> dict[str, float | str]:
  """Sets `tree.judged` where a judge is asked for; returns figures over the trees, {} where none is.

  judged: the mean reward. judgements: the number of answers; judge_failed: how many the judge did not
  score; last_judge_failure: why. judge_gap: its reward minus the second judge's, on average over the answers
  that both scored.
  """
  names = services(learner.config)
  if not names:
    return {}
  scored = [ask(learner, name, trees) for name in names]
  for tree, score in zip(trees, scored[0]):
    tree.judged = score if isinstance(score, float) else tree.question.score(tree.answer)
  failed = [score for score in scored[0] if not isinstance(score, float)]
  figures = {'judgements': sum(tree.answer is not None for tree in trees), 'judge_failed': len(failed),
             'judged': sum(tree.judged for tree in trees) / max(len(trees), 1)}
  if failed:
    figures['last_judge_failure'] = one_line(failure_of(failed[-1], 'judge').reason)
  gaps = [paid - others[0] for tree, paid, *others in zip(trees, *scored)
          if tree.answer is not None and others and all(isinstance(one, float) for one in (paid, *others))]
  return figures | ({'judge_gap': sum(gaps) / len(gaps)} if gaps else {})


def ask(learner, name: str, trees: Sequence[Tree]) -> list[float | Exception]:
  """Returns the score of each tree's answer, 0 to 1, 0 without an answer; an error where the judge failed."""
  keys = [(name, tree.question.id, tree.answer) for tree in trees]
  new = {key: Answer(tree.question, tree.answer) for key, tree in zip(keys, trees)
         if tree.answer is not None and key not in learner.verdicts}
  scores = learner.agent.tools.services[name](list(new.values())) if new else []
  learner.verdicts.update((key, (score + 1) / 2) for key, score in zip(new, scores) if isinstance(score, int))
  failed = {key: score or ValueError('a reply that cannot be read')
            for key, score in zip(new, scores) if not isinstance(score, int)}
  return [0.0 if key[-1] is None else failed.get(key) or learner.verdicts[key] for key in keys]
