"""IRCoT (Trivedi et al. 2023, arXiv 2212.10509): each sentence of a chain of thought is the next query.

The documents accumulate up to a cap. The chain ends with 'the answer is', or after `max_thoughts`; then a
separate reader answers from the documents alone (section 3.2). FlashRAG reads the answer in the chain and has
no cap.
"""

from jaxsearch.data.questions import Question
from jaxsearch.methods import prompted
from jaxsearch.methods.prompted import find, joined, marked_answer, plain, write
from jaxsearch.sampler.requests import Growth
from jaxsearch.trees.tree import Tree


def grow(question: Question, tree: Tree, *, max_thoughts: int = 8, max_documents: int = 15,
         reader: bool = True, max_tokens: int = 64, document_tokens: int = 1500, prompts: str = '',
         chat: bool = False) -> Growth[None]:
  """Grows a call for each thought, and one for the reader.

  Args:
    max_thoughts: sentences of the chain.
    max_documents: in a prompt; with so many there is no further search.
    reader: False reads the answer in the chain.
    document_tokens: of all documents in a prompt; longer texts are cut.
  """
  documents, chain = (yield from find(tree, question.question))[:max_documents], ''
  for _ in range(max_thoughts):
    shown = prompted.fit(tree, documents, document_tokens)
    asked = write(tree, 'reasoned', prompts, chat, documents=shown, said=chain)
    node, thought = yield from prompted.say_sentence(asked, max_tokens)
    chain = joined(chain, thought)
    if not thought.strip() or marked_answer(chain) is not None:
      break
    query = plain(thought)
    if query and len(documents) < max_documents:
      known = {(document.title, document.text) for document in documents}  # some servers send no ids
      new = [one for one in (yield from find(tree, query)) if (one.title, one.text) not in known]
      documents = [*documents, *new][:max_documents]
  if not reader:
    return prompted.finish(tree, node, marked_answer(chain))
  shown = prompted.fit(tree, documents, document_tokens)
  yield from prompted.say_answer(tree, write(tree, 'documents', prompts, chat, documents=shown), max_tokens)
