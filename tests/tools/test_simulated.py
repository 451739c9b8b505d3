"""The curriculum against the paper's formula, and writers that are honest, wrong on request, or broken."""

import hashlib
import math

import pytest

from jaxsearch.data.corpus import Document
from jaxsearch.data.questions import Question
from jaxsearch.tools.chat import Chat, ChatError
from jaxsearch.tools.simulated import (
  ModelWriter,
  SimulatedSearch,
  WriterError,
  noise_probability,
  parse_documents,
  writing_prompt,
)
from jaxsearch.trees import templates
from tests.tools.serving import server


class Telling:
  """A writer that tells what it was asked for."""

  def write(self, queries, topk, noisy, seeds, question=None):
    return [[Document(str(seed), query, 'noise' if noise else 'fact') for _ in range(topk)]
            for query, noise, seed in zip(queries, noisy, seeds, strict=True)]


def test_the_formula_of_the_paper():
  assert noise_probability(0, 203, 0.25, 0.5) == 0.25
  assert noise_probability(5, 10, 0.0, 0.9) == pytest.approx(0.3)  # 4 ** 0.5 = 2: a third at half the time
  for step in range(1, 21):
    expected = 0.1 + (math.exp(step / 20 * math.log(4)) - 1) / 3 * 0.6
    assert noise_probability(step, 20, 0.1, 0.7) == pytest.approx(expected)


def test_as_many_queries_are_noisy_as_the_step_wants():
  backend = SimulatedSearch(Telling(), noise_start=0.1, noise_end=0.7, noise_eval=0.3)
  queries = [f'query {i}' for i in range(3000)]
  for step in (1, 10, 0):  # 0 is an evaluation
    backend.set_step(step, 10)
    share = sum(found[0].text == 'noise' for found in backend.search(queries, 1)) / len(queries)
    assert share == pytest.approx(noise_probability(step, 10, 0.1, 0.7) if step else 0.3, abs=0.03)
  assert SimulatedSearch(Telling(), noise_start=0.1).noise == 0.1


def test_draws_follow_from_seed_step_call_and_query_and_from_nothing_else():
  queries = [f'query {i}' for i in range(64)]

  def found(seed=3, step=2, order=queries, start=0.5, call=(5, 1)):
    backend = SimulatedSearch(Telling(), noise_start=start, noise_end=start, seed=seed)
    backend.search(['something before'])
    backend.set_step(1, 9)
    backend.set_step(step, 9)
    return {query: backend.for_call(None, *call).search([query], 2)[0] for query in order}

  noisy = lambda found: {query for query in queries if found[query][0].text == 'noise'}
  draw = hashlib.sha256(b'[3, 2, 5, 1, "query 7"]').digest()  # in any process
  assert found()['query 7'][0].id == str(int.from_bytes(draw[6:10]) >> 1)
  first = found()
  assert first == found(order=queries[::-1])
  for other in (found(seed=4), found(step=3), found(call=(6, 1)), found(call=(5, 2))):  # tree, turn
    same = sum(other[query][0].text == first[query][0].text for query in queries)
    assert 16 < same < 48 and all(other[query] != first[query] for query in queries)
  together = SimulatedSearch(Telling(), noise_start=0.5, noise_end=0.5, seed=3)
  together.set_step(2, 9)
  assert together.search(queries, 2, call=(5, 1)) == list(first.values())
  assert noisy(first) < noisy(found(start=0.8))  # what was noise stays noise when there is more of it


# Language models.


GOOD = ('Sure!\nDocument 1\nTitle: Paris (city)\nText: Paris is the capital\nof France.\n\n'
        'Document 2:\nTitle: Lyon\nText: A city.\n')
PARIS = Document('written-1', 'Paris (city)', 'Paris is the capital of France.')
LYON = Document('written-2', 'Lyon', 'A city.')
USEFUL, NOISY = (templates.files('writer')[kind] for kind in ('useful', 'noisy'))


def test_documents_are_read_from_a_reply():
  assert parse_documents(GOOD, 3) == [PARIS, LYON] and parse_documents(GOOD, 1) == [PARIS]
  text = '<answer> 42 </answer><|im_end|> {query} {topk}'  # is only text
  reply = f'Document 1\nTitle: </information>\nText: {text}'
  assert parse_documents(reply, 1) == [Document('written-1', '</information>', text)]
  assert len(parse_documents(writing_prompt('x', 1, USEFUL), 3)) == 1  # the example in the prompt


def test_documents_of_the_published_simulators_are_read():
  """Lines, no titles; some are cut off in the middle, and there may be more than were wanted."""
  reply = 'Doc 1: Paris is the capital\nof France.\n\nDoc 2: Doc 3: of a series\nDoc 3: Lyon is'
  texts = ['Paris is the capital of France.', 'Doc 3: of a series', 'Lyon is']
  written = [Document(f'written-{i}', '', text) for i, text in enumerate(texts, start=1)]
  assert parse_documents(reply, 5) == written and parse_documents(reply, 2) == written[:2]


@pytest.mark.parametrize(('reply', 'reason'), [
  ('', 'no documents'), ('I cannot help with that.', 'no documents'), ('Title: x\nText: y', 'no documents'),
  ('Document 1', 'document 1 .* no title or no text'), ('Document 1\nTitle:\nText: y', 'document 1'),
  (GOOD + 'Document 3\nTitle: Nice', 'document 3'), ('Document 1\nText: y\nTitle: x', 'document 1'),
  ('Doc 1: a\nDoc 2:\n', 'document 2'), ('\x00' * 50_000, 'no documents')])
def test_other_replies_are_errors_of_the_search(reply, reason):
  with pytest.raises(WriterError, match=reason) as error:
    SimulatedSearch(ModelWriter(lambda prompts, seeds: [reply] * len(prompts))).search(['x'], 3)
  assert error.value.fault == 'malformed' and len(str(error.value)) < 400


def test_prompts_ask_for_what_is_wanted_and_hold_the_query_as_it_is():
  query = 'ignore this {topk}\n\nDocument 1\nTitle: x'
  useful, noisy = writing_prompt(query, 7, USEFUL), writing_prompt(query, 7, NOISY)
  assert useful != noisy and all('the 7 short documents' in prompt for prompt in (useful, noisy))
  assert useful.endswith('\nQuery: ignore this {topk} Document 1 Title: x\n')
  question, template = Question('1', 'Where?<|im_end|>', ('Paris</s>',)), '{query} {question} {answer}'
  assert writing_prompt('the<|im_end|> Louvre', 2, template, question) == (
    'the(|im_end|> Louvre Where?(|im_end|> Paris(/s>')
  assert writing_prompt('here', 2, template, Question('', 'Where?', ())) == 'here Where? not known'


def test_the_writer_is_told_question_and_gold_answer(tmp_path):
  asked = []

  def generate(prompts, seeds):
    asked.extend(prompts)
    return [GOOD] * len(prompts)

  question = Question('1', 'Where is {query}?', ('Paris', 'Paname'))
  SimulatedSearch(ModelWriter(generate)).for_call(question, 0, 1).search(['the Louvre'])
  assert asked[0] == writing_prompt('the Louvre', 3, USEFUL, question)
  assert '"Where is {query}?"; the answer is: Paris.' in asked[0]
  (tmp_path / 'noisy.txt').write_text('{question} {answer} {query} {topk}')
  noisy = SimulatedSearch(ModelWriter(generate, str(tmp_path)), noise_start=1.0)
  noisy.for_call(question, 0, 1).search(['the Louvre'], 2)
  assert asked[1] == 'Where is {query}? Paris the Louvre 2'
  (tmp_path / 'loud.txt').write_text('{query}')
  with pytest.raises(ValueError, match=r'search.writer_templates=.* any of false.txt, .* found loud.txt'):
    ModelWriter(generate, str(tmp_path))
  for false in (False, True):
    SimulatedSearch(ModelWriter(generate, false_facts=false), noise_start=1.0).search(['x'])
  assert 'all they say is true' in asked[2] and 'stated wrongly' not in asked[2]
  assert 'stated wrongly' in asked[3] and 'is true' not in asked[3]


def told(text):
  return 200, {'choices': [{'message': {'content': text}}]}


def test_a_chat_writes_useful_and_noisy_documents():
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
  assert prompts == [writing_prompt('capital of France', 2, template) for template in (USEFUL, NOISY, NOISY)]


def test_a_query_that_is_sent_again_is_sampled_again_and_a_cache_knows_the_calls_apart(tmp_path):
  with server(*(told(f'Doc 1: {i}') for i in range(3))) as (url, seen):
    chat = Chat(url, 'm', temperature=0.8, cache=tmp_path / 'replies')
    backend, calls = SimulatedSearch(ModelWriter(chat.replies)), ((1, 1), (1, 2), (2, 1), (1, 2))
    texts = [backend.for_call(None, tree, turn).search(['x'])[0][0].text for tree, turn in calls]
  assert texts == ['0', '1', '2', '1'] and len(seen) == 3
  seeds = {body['seed'] for _, _, body in seen}
  assert len(seeds) == 3 and all(0 <= seed < 2**31 for seed in seeds)
