"""Search-o1 (Li et al. 2025, arXiv 2501.05366): search while reasoning; another call reads the documents.

That call, reason-in-documents, reads the documents together with the reasoning so far and the query, and what
it writes takes the place of the documents (section 3.3). A query that was asked before is refused, and so is
one beyond the limit. The tags are ours, `<search>` and `<answer>`.
"""

from jaxsearch.data.questions import Question
from jaxsearch.methods.prompted import ENDS, find, finish, marked_answer, plain, write
from jaxsearch.sampler.requests import Generate, Growth, Refused
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role, Tree

REPEATED = 'I have searched for this before; the result is above.'
LIMITED = 'No searches are left. I answer with what I know.'


def grow(question: Question, tree: Tree, *, max_searches: int = 10, max_turns: int = 15, extract: bool = True,
         max_tokens: int = 1024, extract_tokens: int = 512, reasoning_tokens: int = 1024, prompts: str = '',
         chat: bool = False) -> Growth[None]:
  """Grows one chain, and beside it a call for each search. tree.metrics counts what was `refused`.

  Args:
    max_searches: of a chain.
    max_turns: spans of the chain.
    extract: False shows the documents as they are.
    extract_tokens: of what the call that reasons in documents writes.
    reasoning_tokens: how many of the chain's last tokens that call sees.
  """
  if max_turns < 1:
    raise Refused(f'grow.max_turns={max_turns}: it counts the spans of the chain, so at least 1')
  tree.metrics['refused'] = 0
  node, asked = write(tree, 'search_o1', prompts, chat, limit=max_searches), set()
  for turn in range(1, max_turns + 1):
    node = yield Generate(node, stop=ENDS, max_tokens=max_tokens)
    text = node.text_without_end
    query = grammar.search_query(text)
    answer = marked_answer(text) if query is None else None  # a thought may say 'the answer is', too
    if answer is not None or query is None or turn == max_turns:
      break
    key, role = ' '.join(query.lower().split()), Role.OBSERVATION
    tree.metrics['refused'] += key in asked or len(asked) == max_searches
    if key in asked:
      shown = REPEATED
    elif len(asked) == max_searches:
      shown = LIMITED
    else:
      asked.add(key)
      documents = yield from find(tree, query)
      shown = grammar.listed(documents) or grammar.NOTHING
      if extract and documents:
        chain = [token for span in node.path() if span.role is not Role.PROMPT for token in span.tokens]
        reasoning, role = tree.tokenizer.decode(chain[-reasoning_tokens:]), Role.CONTEXT
        seen = write(tree, 'extract', prompts, chat, documents=documents, query=query, reasoning=reasoning)
        read = yield Generate(seen, stop=ENDS, max_tokens=extract_tokens)
        shown = plain(read.text_without_end) or 'No helpful information was found.'
    node = node.append(f'\n<information>{tree.grammar.safe(shown)}</information>\n', role)
  finish(tree, node, answer, spent=query is not None)
