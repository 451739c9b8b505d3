r"""ReSearch (Chen et al. 2025, arXiv 2503.19470): Search-R1 in other tags, a boxed answer, a format reward.

Search results stand in `<result>`, the final answer in a `\boxed{…}` inside `<answer>`. Credited by GRPO.
Here, as in the paper (eq. 2), a chain in the wrong format keeps the F1 of its answer; the authors' code gives
it 0.
"""

from jaxsearch.data.questions import Question
from jaxsearch.methods import Context, Groups, search_r1
from jaxsearch.methods.credit import credit_relative, rewarded
from jaxsearch.rewards import formats
from jaxsearch.rewards.match import f1
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Stop, Tree

TAGS = grammar.RESEARCH


def grow(question: Question, tree: Tree, *, max_turns: int = 4, max_tokens: int = 500,
         template: str = 'research', chat: bool = False, boxed: bool = True) -> Growth[None]:
  """Grows one chain as Search-R1 does; the answer is what the box holds, None without a box.

  Sets tree.metrics['format'] to 1 where the chain is in the right format. `boxed=False` takes the whole
  `<answer>`, for policies that were not taught to box.
  """
  yield from search_r1.grow(question, tree, max_turns=max_turns, max_tokens=max_tokens, template=template,
                            chat=chat)
  written = [tree.grammar.opened + node.text for node in tree.turns()]
  tree.metrics['format'] = formats.research_format(written, boxed=boxed)
  if boxed and tree.answer is not None:
    tree.answer = formats.last_boxed(tree.answer)
    tree.stop = Stop.MALFORMED if tree.answer is None else tree.stop


def reward(tree: Tree) -> float:
  """Returns the F1 of the answer if it is not 0, else 0.1 for the right format (eq. 2)."""
  return f1(tree.answer, tree.question.golden_answers) or 0.1 * tree.metrics['format']


def credit(groups: Groups, context: Context, *, normalize_std: bool = True, singleton: str = 'raw') -> None:
  """Credits chains as `search_r1.credit` does."""
  rewarded(groups, reward)
  credit_relative(groups, normalize_std=normalize_std, singleton=singleton)
