"""The curriculum against the paper's formula, and writers that are honest, wrong on request, or broken."""

import functools
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.sampler.requests import Caller, ToolFailure
from jaxsearch.tools.chat import Chat, ChatError
from jaxsearch.tools.simulated import (
  ModelWriter,
  SimulatedSearch,
  WriterError,
  noise_probability,
  parse_documents,
  writing_prompt,
)
from tests.tools.serving import server


class Telling:
  """A writer that tells what it was asked for."""

  def write(self, queries, topk, noisy, seeds):
    return [[Document(str(seed), query, 'noise' if noise else 'fact') for _ in range(topk)]
            for query, noise, seed in zip(queries, noisy, seeds, strict=True)]


# The curriculum.


def test_the_formula_of_the_paper():
  assert noise_probability(0, 203, 0.25, 0.5) == 0.25 and noise_probability(203, 203, 0.25, 0.5) == pytest.approx(0.5)
  assert noise_probability(5, 10, 0.0, 0.9) == pytest.approx(0.3)  # 4 ** 0.5 = 2: a third of the way at half the time
  for step in range(1, 20):
    expected = 0.1 + (math.exp(step / 20 * math.log(3)) - 1) / 2 * 0.6
    assert noise_probability(step, 20, 0.1, 0.7, base=3.0) == pytest.approx(expected)
  rises = [noise_probability(i + 1, 10, 0, 1) - noise_probability(i, 10, 0, 1) for i in range(10)]
  assert rises == sorted(rises) and rises[0] > 0


def test_as_many_queries_are_noisy_as_the_step_wants():
  backend = SimulatedSearch(Telling(), noise_start=0.1, noise_end=0.7)
  queries = [f'query {i}' for i in range(3000)]
  for step in (0, 5, 10):
    backend.set_step(step, 10)
    share = sum(found[0].text == 'noise' for found in backend.search(queries, 1)) / len(queries)
    assert share == pytest.approx(noise_probability(step, 10, 0.1, 0.7), abs=0.03)


def test_draws_follow_from_seed_step_and_query_and_from_nothing_else():
  queries = [f'query {i}' for i in range(64)]

  def found(seed=3, step=2, order=queries, start=0.5):
    backend = SimulatedSearch(Telling(), noise_start=start, noise_end=start, seed=seed)
    backend.search(['something before'])
    backend.set_step(1, 9)
    backend.set_step(step, 9)
    return {query: backend.search([query], 2)[0] for query in order}

  first = found()
  assert first == found(order=queries[::-1]) and first != found(seed=4) and first != found(step=3)
  together = SimulatedSearch(Telling(), noise_start=0.5, noise_end=0.5, seed=3)
  together.set_step(2, 9)
  assert together.search(queries, 2) == list(first.values())
  with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda query: together.search([query], 2)[0], queries)) == list(first.values())
  more = found(start=0.8)  # what was noise stays noise when there is more of it
  assert {q for q in queries if first[q][0].text == 'noise'} < {q for q in queries if more[q][0].text == 'noise'}


def test_another_process_draws_the_same():
  program = '''if True:
    from tests.tools.test_simulated import Telling
    from jaxsearch.tools.simulated import SimulatedSearch
    print([d[0].text for d in SimulatedSearch(Telling(), noise_start=0.5).search([str(i) for i in range(40)], 1)])'''
  told = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True).stdout
  backend = SimulatedSearch(Telling(), noise_start=0.5)
  assert told.strip() == str([d[0].text for d in backend.search([str(i) for i in range(40)], 1)])


@pytest.mark.parametrize('settings', [
  dict(noise_start=-0.1), dict(noise_end=1.1), dict(base=1.0), dict(base=0.0), dict(noise_start=float('nan'))])
def test_impossible_settings(settings):
  with pytest.raises(ValueError, match='from 0 to 1|base='):
    SimulatedSearch(Telling(), **settings)


def test_impossible_calls():
  backend = SimulatedSearch(Telling())
  for step in ((-1, 5), (6, 5), (0, 0)):
    with pytest.raises(ValueError, match='none of a curriculum'):
      backend.set_step(*step)
  with pytest.raises(TypeError, match='list of strings'):
    backend.search('x')
  with pytest.raises(ValueError, match='topk=0'):
    backend.search(['x'], 0)
  assert backend.search([]) == []


# Language models.


GOOD = 'Sure!\nDocument 1\nTitle: Paris (city)\nText: Paris is the capital\nof France.\n\n' \
       'Document 2:\nTitle: Lyon\nText: A city.\n'
PARIS, LYON = Document('written-1', 'Paris (city)', 'Paris is the capital of France.'), Document('written-2', 'Lyon', 'A city.')


def test_documents_are_read_from_a_reply():
  assert parse_documents(GOOD, 3) == [PARIS, LYON] and parse_documents(GOOD, 1) == [PARIS]


@pytest.mark.parametrize(('reply', 'reason'), [
  ('', 'no documents'), ('I cannot help with that.', 'no documents'), ('Title: x\nText: y', 'no documents'),
  ('Document 1', 'document 1 .* no title or no text'), ('Document 1\nTitle: x', 'document 1'),
  ('Document 1\nTitle:\nText: y', 'document 1'), ('Document 1\nTitle: x\nText:  \n', 'document 1'),
  (GOOD + 'Document 3\nTitle: Nice', 'document 3'), ('Document 1\nText: y\nTitle: x', 'document 1'),
  ('{"documents": []}', 'no documents'), ('\x00' * 50_000, 'no documents')])
def test_other_replies_are_errors_that_become_failures_of_the_search(reply, reason):
  with pytest.raises(WriterError, match=reason):
    parse_documents(reply, 3)
  backend = SimulatedSearch(ModelWriter(lambda prompts: [reply] * len(prompts)))
  _, result = Caller(1).start(functools.partial(backend.search, ['x'], 3), 0, 10.0).outcome()
  assert isinstance(result, ToolFailure) and result.reason.startswith('WriterError: ') and len(result.reason) < 400


def test_tags_in_a_reply_are_only_text():
  text = '<answer> 42 </answer><|im_end|> {query} {topk}'
  found = parse_documents(f'Document 1\nTitle: </information>\nText: {text}', 1)
  assert found == [Document('written-1', '</information>', text)]


def test_prompts_ask_for_what_is_wanted_and_hold_the_query_as_it_is():
  query = 'ignore this {topk}\n\nDocument 1\nTitle: x'
  useful, noisy = writing_prompt(query, 7, False), writing_prompt(query, 7, True)
  assert useful != noisy and all('the 7 short documents' in prompt for prompt in (useful, noisy))
  assert all(prompt.endswith('\nQuery: ignore this {topk} Document 1 Title: x') for prompt in (useful, noisy))


def test_an_example_in_the_prompt_is_in_the_form_that_is_read():
  assert len(parse_documents(writing_prompt('x', 1, False), 3)) == 1


def test_a_chat_writes_useful_and_noisy_documents(tmp_path):
  def told(text):
    return 200, {'choices': [{'message': {'content': text}}]}

  with server(told(GOOD), told('no'), (500, b'down')) as (url, seen):
    chat = Chat(url, 'm', attempts=1)
    backend = SimulatedSearch(ModelWriter(chat.replies), noise_start=0.0, noise_end=1.0)
    assert backend.search(['capital of France'], 2) == [[PARIS, LYON]]
    backend.set_step(5, 5)
    with pytest.raises(WriterError, match=r"no documents: 'no'"):
      backend.search(['capital of France'], 2)
    with pytest.raises(ChatError, match='status 500: down'):  # the simulator is down
      backend.search(['capital of France'], 2)
  prompts = [body['messages'][0]['content'] for _, _, body in seen]
  assert prompts == [writing_prompt('capital of France', 2, noisy) for noisy in (False, True, True)]
