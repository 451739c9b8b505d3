"""IRCoT: a sentence a call, the sentence as the next query, the cap on documents, the stop, the reader."""

import dataclasses

import pytest

from jaxsearch.methods.prompted import ircot
from jaxsearch.sampler.requests import Generate
from jaxsearch.trees.tree import Role, Stop
from tests.methods.prompted.asking import Q, ask, by_query, document, shown


def test_thoughts_are_queries_and_a_reader_answers(tmp_path):
  said = ['It is a play. The', ' Ada wrote it.', 'So the answer is: Bob.', 'Ada']
  tree, requests, _ = ask(ircot, tmp_path, said, found=by_query, stops=['. ', 'end', 'end', 'end'],
                          max_tokens=33)
  first, second, third = (f'Doc {i}(Title: {title}) text\n'
                          for i, title in enumerate((Q, 'It is a play.', 'Ada wrote it.'), 1))
  assert shown(requests) == [
    (Q, None), f'reason {first}{Q}:',
    ('It is a play.', None), f'reason {first}{second}{Q}:It is a play.',
    ('Ada wrote it.', None), f'reason {first}{second}{third}{Q}:It is a play. Ada wrote it.',
    f'read {first}{second}{third}{Q}:',  # the reader does not see the chain
  ]  # fmt: skip
  assert '. ' in requests[1].stop
  assert {one.max_tokens for one in requests if isinstance(one, Generate)} == {33}
  assert [node.text for node in tree.nodes(Role.CONTEXT)] == ['It is a play.', 'It is a play. Ada wrote it.']
  assert (tree.answer, tree.stop) == ('Ada', Stop.ANSWERED)


@pytest.mark.parametrize('named', [True, False])
def test_documents_accumulate_once_each_up_to_the_cap(named, tmp_path):
  """Whether the server names them or not, as Search-R1's does not."""
  given = lambda *numbers: [document(n) if named else dataclasses.replace(document(n), id='') for n in numbers]
  found = iter([given(1, 2), given(2, 3, 4)])
  said = ['a b.', 'c d.', 'e f.', 'Ada']
  tree, requests, _ = ask(ircot, tmp_path, said, found=lambda _: next(found), max_documents=3, max_thoughts=3)
  # at the cap nothing is searched for
  assert len([one for one in shown(requests) if isinstance(one, tuple)]) == 2
  read = ''.join(f'Doc {i}(Title: T{i}) text {i}\n' for i in (1, 2, 3))
  assert shown(requests)[-1] == f'read {read}{Q}:'
  assert ircot.grow.__kwdefaults__['max_documents'] == 15


def test_without_a_reader_the_chain_answers(tmp_path):
  tree, requests, _ = ask(ircot, tmp_path, ['So the answer is: Bob.'], reader=False)
  assert tree.answer == 'Bob' and len(requests) == 2
  tree, requests, _ = ask(ircot, tmp_path, ['Hm, hm.'] * 2, reader=False, max_thoughts=2)
  assert tree.answer is None and tree.stop is Stop.MALFORMED
