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
from jaxsearch.trees.grammars import Tagged
from jaxsearch.trees.tree import Role, Tree
from recipes import wiki_chains as chains, wiki_lookups as lookups
from tests.methods.driving import Letters
from tests.recipes.test_wiki_hotpotqa import of_two
from tests.recipes.test_wiki_lookups import DOCUMENTS
from tests.recipes.test_wiki_reading import article, squad

ONE = Document('1', 'Red Sun', 'Red Sun is a film by Ann Lee.')
TWO = Document('2', 'Ann Lee', 'Ann Lee was born in Oslo.')
OTHER = Document('3', 'Blue Sun', 'Blue Sun is a star.')
QUESTION = Question('7', 'Where was the director of Red Sun born?', ('Oslo',))
ASKED = QUESTION.question
DIRECTOR, BORN = 'The director of Red Sun is Ann Lee.', 'Ann Lee was born in Oslo.'
STEPS = lookups.Step('1', 'Red Sun', DIRECTOR), lookups.Step('2', 'Ann Lee', BORN)
FIRST, AGAIN = 'Search for the question.', 'There is nothing about Red Sun. Search for it.'


@pytest.mark.parametrize('results, thoughts', [  # the queries, and what each finds
  ({ASKED: [ONE, TWO]}, [FIRST, f'{DIRECTOR} {BORN}']),
  ({ASKED: [ONE], 'Ann Lee': [TWO]}, [FIRST, DIRECTOR, BORN]),
  ({ASKED: [OTHER], 'Red Sun': [ONE], 'Ann Lee': [TWO]}, [FIRST, AGAIN, DIRECTOR, BORN]),
  ({ASKED: [TWO], 'Red Sun': [ONE]}, [FIRST, AGAIN, f'{DIRECTOR} {BORN}'])])  # what was seen is not sought
def test_a_chain_searches_until_it_has_seen_every_passage(results, thoughts):
  asked, queries = [], list(results)
  lookup = lookups.Lookup(QUESTION, STEPS)
  chain = chains.write_chain(lookup, lambda query: asked.append(query) or results[query], 'PROMPT', Tagged(Letters()), 3)
  assert asked == queries and chain.searches == len(queries)
  texts = lambda role: [span['text'] for span in chain.spans if span['role'] == role]
  written = texts('policy')
  assert formats.chain_format(written) == 1.0 and grammar.answer(written[-1]) == 'Oslo'
  assert [grammar.search_query(text) for text in written[:-1]] == queries
  assert [next(iter(grammar.elements(text))).content for text in written] == thoughts
  assert [span['role'] for span in chain.spans] == [
    'prompt', *['policy', 'observation'] * len(queries), 'policy']
  assert texts('observation') == [grammar.information(results[query], ()) for query in queries]


@pytest.mark.parametrize('results, searches', [
  ({ASKED: [OTHER], 'Red Sun': [OTHER]}, 3), ({ASKED: [OTHER], 'Red Sun': [ONE], 'Ann Lee': [TWO]}, 2)])
def test_no_chain_where_a_passage_is_not_found_or_searches_run_out(results, searches):
  lookup = lookups.Lookup(QUESTION, STEPS)
  assert chains.write_chain(lookup, results.__getitem__, '', Tagged(Letters()), searches) is None


def test_no_chain_searches_for_its_answer():
  described = lookups.Lookup(Question('8', 'Who lives in Oslo?', ('Ann Lee',)), STEPS[1:])
  results = {'Who lives in Oslo?': [OTHER], 'Ann Lee': [TWO]}
  assert chains.write_chain(described, results.__getitem__, '', Tagged(Letters()), 3) is None


TWO_MORE = Document('900', 'Zwickau loaves',
                    'Xavier Quill baked the enormous sourdough loaves of Zwickau. Nobody else did.')


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chains')
  records = [{'id': one.id, 'contents': join_contents(one.title, one.text)} for one in [*DOCUMENTS, TWO_MORE]]
  (folder / 'wiki_corpus.jsonl').write_text('\n'.join(map(json.dumps, records)))
  (folder / 'qa').mkdir()
  asked = 'Who baked the {} enormous Zwickau sourdough loaves?'
  own = [Question(f'own_{number}', asked.format(number), ('Xavier Quill',)) for number in range(40)]
  write_questions(own, folder / 'qa/train_hotpotqa_2wiki.jsonl')
  towns = [article(f'The mill of Quorn{number}ley was built by Zeb{number}ulon Hart.',
                   [(f'Who built the mill of Quorn{number}ley?', f'Zeb{number}ulon Hart')], f'Quorn{number}ley')
           for number in range(60)]
  towns += [article(f'Zeb{number}ulon Hart died in Quorn{number}den.',
                    [(f'Where did Zeb{number}ulon Hart die?', f'Quorn{number}den')], f'Quorn{number}ley')
            for number in range(60)]
  over_two = [of_two(f'Who dug the pond of Dame{number} Wolf?', f'Kit{number} Bow',
                     ((f'Fort{number} Moor', 0), (f'Dame{number} Wolf', 0)), context=[
                       [f'Dame{number} Wolf', [f'The pond of Dame{number} Wolf is at Fort{number} Moor.']],
                       [f'Fort{number} Moor', [f'Fort{number} Moor was cut by Kit{number} Bow.']]])
              for number in range(20)]
  (folder / 'train.json').write_text(json.dumps(over_two))
  config = smollm2_wiki.get_config()
  with config.unlocked():
    config.folder, config.model = str(folder), 'world-tiny'
    config.squad, config.hotpotqa = str(squad(folder, *towns)), str(folder / 'train.json')
    config.chains.update(bridge=2, free_text=2, composed=4, HotpotQA=1)
    config.hard.update(one_passage=3, composed=3, HotpotQA=1)
    config.grow.update(template='world', chat=False, max_tokens=512)
    config.search.engine = 'rank_bm25'
    config.sampler.length = 4096  # the world's tokenizer cuts text that is not the world's into small pieces
  return config, folder / 'made', chains.write(config, folder / 'made', 60)


def test_the_files_fit_each_other_and_the_policy(written):
  config, out, figures = written
  trees = sft.read_demonstrations(out / 'chains.jsonl', Tokenizer.load(tokenizer_path('world-tiny')))
  records = [json.loads(line) for line in (out / 'chains.jsonl').read_text().splitlines()]
  names = 'questions', 'held_out', 'hard_questions', 'own_held_out'
  questions, held_out, hard, own_held_out = (read_questions(out / f'{name}.jsonl') for name in names)
  by_id = {question.id: question for question in [*read_questions(config.data.questions), *questions]}
  assert [figures[name] for name in names[:3]] == [len(questions), len(held_out), len(hard)]
  assert len(trees) == figures['chains'] == 60 and figures['hard_held_out'] > 0
  kinds = [question.metadata['source'] for question in hard]
  assert len(set(kinds)) == len(config.hard)
  for kind, share in config.hard.items():
    part = share * len(hard) / sum(config.hard.values())
    assert kinds.count(kind.replace('_', ' ')) == pytest.approx(part, abs=4)
  assert not {one.question for one in held_out} & {one.question for one in questions}
  kinds = set()
  for record, tree in zip(records, trees):
    question, spans = by_id[record['id']], [node.text for node in tree.nodes(Role.POLICY)]
    assert formats.chain_format(spans) == 1.0 and question.score(grammar.answer(spans[-1])) == 1.0
    assert len(spans) > 1
    kinds.add(question.metadata.get('source', 'own'))
  assert kinds == {'own', 'one passage', 'described', 'bridge', 'comparison', 'bridge comparison',
                   'free text', 'composed', 'HotpotQA'}
  of = lambda kind: figures[f'chains_{kind}']
  for kind, times in config.chains.items():
    assert of(kind) == pytest.approx(times * of('described'), abs=times)
  assert own_held_out and not {one.id for one in own_held_out} & {record['id'] for record in records}
  assert 0 < figures['chains_own'] <= figures['tried_own'] <= 40 - len(own_held_out)
  # The last round may have more.
  assert sum(figures[f'chains_{kind.replace(" ", "_")}'] for kind in kinds) >= 60


def test_a_chain_shows_what_a_rollout_would_see(written):
  config, out, _ = written
  tokenizer, backend = Tokenizer.load(tokenizer_path('world-tiny')), BM25(read_corpus(out / 'corpus.jsonl'))
  tools = Tools(search=backend, topk=config.search.topk, words=config.search.words, max_observation=10**6)
  records = [json.loads(line) for line in (out / 'chains.jsonl').read_text().splitlines()]
  record = next(one for one in records if one['id'].startswith('lookup') and len(one['spans']) > 4)
  for before, span in zip(record['spans'], record['spans'][1:]):
    if span['role'] == 'observation':
      search = Search(Tree(tokenizer).root, grammar.search_query(before['text']))
      documents = search.cut(search.run(tools), tools, 10**6, tokenizer)
      assert span['text'] == grammar.information(documents, tokenizer.special_tokens)
