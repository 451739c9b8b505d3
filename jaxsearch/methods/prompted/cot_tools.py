r"""CoT + tools, the prompted baseline of CARL's table 2: reason, run Python with `search` in it, go on.

A ReAct-style loop: raw output stays in the context. 'Always' asks for a program and refuses an answer before
the first one; 'optional' leaves that to the model.
"""

from jaxsearch.data.questions import Question
from jaxsearch.methods import carl
from jaxsearch.methods.actions import read
from jaxsearch.methods.prompted import write
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Role, Tree

TAGS, TOOLS = carl.TAGS, carl.TOOLS
REFUSED = '\nNo program has run yet. I first write a block of Python.\n'


def grow(question: Question, tree: Tree, *, always: bool = False, max_turns: int = 7, max_tokens: int = 512,
         forget: bool = False, prompts: str = '', chat: bool = False) -> Growth[None]:
  r"""Grows one chain to a `\boxed{}` answer. tree.metrics counts `searches` (programs) and `refused`.

  Args:
    always: False lets the model answer without a program.
    max_turns: programs and refusals, counted together; one more span follows.
    forget: replaces raw output by a context, as methods/carl.py does; the shipped policies know only this.
  """
  tree.metrics['refused'] = 0
  node = write(tree, 'tools_forced' if always else 'tools', prompts, chat)
  for turn in range(max_turns + 1):
    node = yield from carl.think(node, True, max_tokens)
    action = read(node)
    refused = not action.calls and always and node.tokens and not tree.metrics['searches']
    if turn == max_turns or not (action.calls or refused):
      break
    if refused:
      tree.metrics['refused'] += 1
      node = node.append(REFUSED, Role.OBSERVATION)
      continue
    node = yield from carl.invoke(action, 'working')
    if forget:
      node = yield from carl.remember(tree, node, max_tokens)
  carl.commit(tree, action)
