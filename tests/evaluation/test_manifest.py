"""Hashes of files and of prompts."""

import os

from configs import quickstart
from jaxsearch import setup
from jaxsearch.data import sources
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import manifest
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.sampler.assistants import first_requests
from jaxsearch.sampler.driver import Agent
from jaxsearch.sampler.requests import Refused
from jaxsearch.world import files as world


def test_the_hash_of_a_name_is_that_of_all_its_files(tmp_path):
  first, second = tmp_path / 'a.json', tmp_path / 'b.json'
  first.write_text('1')
  second.write_text('2')
  joined = sources.hash_of(f'hotpotqa:{first}+{second}')
  assert len(joined) == 64 and sources.hash_of('world:test') is None
  assert sources.hash_of(str(first)) == sources.hash_of(f'gsm8k:{first}') != joined
  second.write_text('3')
  assert sources.hash_of(f'hotpotqa:{first}+{second}') != joined


def test_a_file_with_the_name_of_the_world_is_not_hashed(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('world', 'test'):
    (tmp_path / name).write_text('mine')
  assert sources.hash_of('world') is None and sources.hash_of('world:test') is None
  assert len(sources.hash_of('./world')) == 64


def test_a_run_that_was_trained_again_has_other_weights(tmp_path):
  saved = tmp_path / 'checkpoints' / '7'
  saved.mkdir(parents=True)
  places = tmp_path, saved.parent, saved
  before = [manifest.weights(str(path), 7) for path in places]
  os.utime(saved, (1, 1))
  assert not any(manifest.weights(str(path), 7) == then for path, then in zip(places, before))


def test_prompts_are_told_apart(tmp_path):
  class Engine:
    tokenizer = Tokenizer.load(world.folder())

  def found(**grow):
    config = quickstart.get_config()
    config.grow.update(template=grow.pop('template', 'world'), max_turns=grow.pop('max_turns', 3))
    agent: Agent = setup.make_agent(config, Engine, None)
    return manifest.prompt_hash(agent, dict(config.grow) | grow)

  assert found() == found(max_turns=2) != found(template='search_r1')
  (tmp_path / 'direct.txt').write_text('Say it: {question}')
  assert found(prompts=str(tmp_path)) != found()


def test_a_method_that_refuses_a_probe_is_evaluated_all_the_same():
  def grow(question, tree):
    raise Refused('no other question')
    yield

  assert first_requests(grow, Question('probe', 'QUESTION', ()), Tokenizer.load(world.folder())) == []
