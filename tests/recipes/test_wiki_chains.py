"""Chains of searches that are written without a model."""

import json

import pytest

from configs import smollm2_wiki
from jaxsearch.data.corpus import Document, join_contents, read_corpus
from jaxsearch.data.questions import Question, read_questions, write_questions
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.rewards import formats
from jaxsearch.sampler.requests import Search, Tools
from jaxsearch.setup import tokenizer_path
from jaxsearch.tools.bm25 import BM25
from jaxsearch.training import sft
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role, Tree
from recipes import wiki_chains as chains
from recipes import wiki_lookups as lookups
from tests.recipes.test_wiki_lookups import DOCUMENTS

ONE, TWO = Document('1', 'Red Sun', 'Red Sun is a film by Ann Lee.'), Document('2', 'Ann Lee', 'Ann Lee was born in Oslo.')
OTHER = Document('3', 'Blue Sun', 'Blue Sun is a star.')
QUESTION = Question('7', 'Where was the director of Red Sun born?', ('Oslo',))
STEPS = (lookups.Step('1', 'Red Sun', 'The director of Red Sun is Ann Lee.'),
         lookups.Step('2', 'Ann Lee', 'Ann Lee was born in Oslo.'))
LOOKUP = lookups.Lookup(QUESTION, STEPS)


@pytest.mark.parametrize('found, queries, thoughts', [
  ({QUESTION.question: [ONE, TWO]}, [QUESTION.question],
   ['Search for the question.', 'The director of Red Sun is Ann Lee. Ann Lee was born in Oslo.']),
  ({QUESTION.question: [ONE], 'Ann Lee': [TWO]}, [QUESTION.question, 'Ann Lee'],
   ['Search for the question.', 'The director of Red Sun is Ann Lee.', 'Ann Lee was born in Oslo.']),
  ({QUESTION.question: [OTHER], 'Red Sun': [ONE], 'Ann Lee': [TWO]}, [QUESTION.question, 'Red Sun', 'Ann Lee'],
   ['Search for the question.', 'There is nothing about Red Sun. Search for it.', 'The director of Red Sun is Ann Lee.',
    'Ann Lee was born in Oslo.']),
  ({QUESTION.question: [TWO], 'Red Sun': [ONE]}, [QUESTION.question, 'Red Sun'],  # what was seen is not searched for again
   ['Search for the question.', 'There is nothing about Red Sun. Search for it.',
    'The director of Red Sun is Ann Lee. Ann Lee was born in Oslo.']),
])
def test_a_chain_searches_until_it_has_seen_every_passage(found, queries, thoughts):
  asked = []
  chain = chains.write_chain(LOOKUP, lambda query: asked.append(query) or found[query], 'PROMPT', (), 3)
  assert asked == queries and chain.searches == len(queries)
  written = [span['text'] for span in chain.spans if span['role'] == 'policy']
  assert formats.chain_format(written) == 1.0
  assert [grammar.search_query(text) for text in written[:-1]] == queries and grammar.answer(written[-1]) == 'Oslo'
  assert [next(iter(grammar.elements(text))).content for text in written] == thoughts
  assert [span['role'] for span in chain.spans] == ['prompt', *['policy', 'observation'] * len(queries), 'policy']
  assert [span['text'] for span in chain.spans if span['role'] == 'observation'] == [
    grammar.information(found[query], ()) for query in queries]


def test_a_comparison_says_what_follows_before_it_answers():
  lookup = lookups.Lookup(QUESTION, STEPS, 'Oslo is in Norway.')
  chain = chains.write_chain(lookup, lambda _: [ONE, TWO], 'PROMPT', (), 3)
  assert chain.spans[-1]['text'] == (
    f'<think> {STEPS[0].finding} {STEPS[1].finding} Oslo is in Norway. </think>\n<answer> Oslo </answer>')


def test_no_chain_where_a_passage_is_not_found_or_searches_run_out():
  found = {QUESTION.question: [OTHER], 'Red Sun': [OTHER]}
  assert chains.write_chain(LOOKUP, found.__getitem__, '', (), 3) is None
  found = {QUESTION.question: [OTHER], 'Red Sun': [ONE], 'Ann Lee': [TWO]}
  assert chains.write_chain(LOOKUP, found.__getitem__, '', (), 2) is None


@pytest.mark.parametrize('question, golds, sentence', [
  ('Where was Ann Lee born?', ('oslo',), 'Ann Lee was born in Oslo.'),
  ('Where was Ann Lee born?', ('Rome',), None),
  ('Was Ann Lee born in a city?', ('yes',), None),
  ('Was Ann Lee born in Oslo?', ('Oslo',), None),                   # the answer stands in the question
  ('Which harbour exports herring, timber and glass?', ('Oslo',), None),  # the passage is about something else
])
def test_a_question_is_supported_by_a_passage_about_it_that_has_the_answer(question, golds, sentence):
  found = chains.supported(Question('1', question, golds), [ONE, TWO], chains.weights([ONE, TWO, OTHER]))
  assert (found and found.finding) == sentence and (found is None or (found.passage, found.query) == ('2', 'Ann Lee'))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chains')
  (folder / 'wiki_corpus.jsonl').write_text(''.join(
    json.dumps({'id': one.id, 'contents': join_contents(one.title, one.text)}) + '\n' for one in [*DOCUMENTS, TWO_MORE]))
  (folder / 'qa').mkdir()
  write_questions([Question(f'own_{number}', f'Who baked the {number} enormous Zwickau sourdough loaves?', ('Xavier Quill',))
                   for number in range(40)], folder / 'qa/train_hotpotqa_2wiki.jsonl')
  config = smollm2_wiki.get_config()
  with config.unlocked():
    config.folder, config.model = str(folder), 'world-tiny'
    config.grow.update(template='world', chat=False, max_tokens=512)
    config.search.engine = 'rank_bm25'
    config.sampler.length = 4096  # the world's tokenizer cuts text that is not the world's into small pieces
  return config, folder / 'made', chains.write(config, folder / 'made', 60)


TWO_MORE = Document('900', 'Zwickau loaves', 'Xavier Quill baked the enormous sourdough loaves of Zwickau. Nobody else did.')


def test_the_files_fit_each_other_and_the_policy(written):
  config, out, figures = written
  tokenizer = Tokenizer.load(tokenizer_path('world-tiny'))
  trees = sft.read_demonstrations(out / 'chains.jsonl', tokenizer)
  records = [json.loads(line) for line in (out / 'chains.jsonl').read_text().splitlines()]
  questions = {question.id: question for question in read_questions(out / 'questions.jsonl')}
  own = {question.id: question for question in read_questions(config.data.questions)}
  held_out = read_questions(out / 'held_out.jsonl')
  assert len(trees) == figures['chains'] == 60 and figures['questions'] == len(questions) and figures['held_out'] == len(held_out)
  hard = [question.metadata['kind'] for question in read_questions(out / 'hard_questions.jsonl')]
  assert hard and all(hard.count(kind) == pytest.approx(share * len(hard), abs=4) for kind, share in chains.HARD.items())
  assert len(hard) == figures['hard_questions'] and figures['hard_held_out'] > 0
  assert not {question.question for question in held_out} & {question.question for question in questions.values()}
  kinds = set()
  for record, tree in zip(records, trees):
    question = questions.get(record['id']) or own[record['id']]
    spans = [node.text for node in tree.nodes(Role.POLICY)]
    assert formats.chain_format(spans) == 1.0 and question.score(grammar.answer(spans[-1])) == 1.0 and len(spans) > 1
    kinds.add(question.metadata.get('kind', 'own'))
  assert kinds == {'own', 'one passage', 'described', 'bridge', 'comparison', 'bridge comparison'}
  chosen = {question.id for question in read_questions(out / 'own_held_out.jsonl')}
  assert chosen and not chosen & {record['id'] for record in records}
  assert 0 < figures['chains_own'] <= figures['tried_own'] <= 40 - len(chosen)
  assert sum(figures[f'chains_{kind.replace(" ", "_")}'] for kind in kinds) >= 60  # the last round may have more


def test_a_chain_shows_what_a_rollout_would_see(written):
  config, out, _ = written
  tokenizer = Tokenizer.load(tokenizer_path('world-tiny'))
  backend = BM25(read_corpus(out / 'corpus.jsonl'))
  tools = Tools(search=backend, topk=config.search.topk, words=config.search.words, max_observation=10**6)
  records = [json.loads(line) for line in (out / 'chains.jsonl').read_text().splitlines()]
  record = next(one for one in records if one['id'].startswith('lookup') and len(one['spans']) > 4)
  for before, span in zip(record['spans'], record['spans'][1:]):
    if span['role'] == 'observation':
      query, node = grammar.search_query(before['text']), Tree(tokenizer).root
      search = Search(node, query)
      documents = search.cut(search.run(tools), tools, 10**6, tokenizer)
      assert span['text'] == grammar.information(documents, tokenizer.special_tokens)
