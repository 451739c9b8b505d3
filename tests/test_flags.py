import re
import subprocess
import sys

import pytest

from configs import quickstart
from jaxsearch.config_check import to_saved
from jaxsearch.flags import check_place, find, parse

BASE = 'configs/base.py'


def test_overrides_and_words():
  config, words, _ = parse('eval', ['--config.steps=3', '--config', BASE, '--config.search.topk=7', 'a', 'b',
                                 '--noconfig.progress', '--config.data.hops=3', '--config.data.hops=(1, 2)'], 'carl')
  assert (config.method, config.steps, config.search.topk, config.progress) == ('search_r1', 3, 7, False)
  assert config.data.hops == (1, 2) and words == ['a', 'b'] and config.is_locked


def test_what_is_off_by_none_may_be_set_to_it():
  off = ('sampler.episode_deadline', 'monitor.entropy_low', 'critic.backbone_rate', 'critic.value_clip')
  config, *_ = parse('eval', ['--config.sampler.episode_deadline=5', *(f'--config.{name}=None' for name in off)], 'carl')
  assert config.sampler.episode_deadline is config.monitor.entropy_low is None
  assert config.critic.backbone_rate is config.critic.value_clip is None
  with pytest.raises(ValueError, match='steps=None: a whole number is needed'):
    parse('eval', ['--config.steps=None'], 'carl')


def test_a_field_may_be_that_of_the_second_search_of_a_warm_up_alone():
  config, *_ = parse('critic-warmup', ['--config.search.url=http://a'], 'carl')
  assert (config.search.backend, config.critic_warmup.second_search.backend) == ('bm25', 'simulated')


def test_shipped_configs_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('carl', 'carl.py', 'configs/carl.py', 'configs/carl'):
    assert parse('train', [f'--config={name}'], '')[0].method == 'carl'
  assert parse('sweep', ['--config=claims/carl'], '')[0].baseline == 'lambda 0.0'
  config, *_ = parse('train', ['--config=smollm2:cusearch'], '')
  assert config.method == 'cusearch' and config.grow.chat
  (tmp_path / 'carl.py').touch()
  # a name is shipped, a path is a file
  assert find('carl')[0] != find('carl.py')[0].resolve() == tmp_path / 'carl.py'


@pytest.mark.parametrize('folder', ['.', 'configs', 'configs/deep'])
def test_a_file_outside_takes_the_shipped_configs_and_its_neighbours(tmp_path, folder):
  folder = tmp_path / folder
  folder.mkdir(parents=True, exist_ok=True)
  (tmp_path / 'configs').mkdir(exist_ok=True)
  (tmp_path / 'configs' / 'neighbour.py').write_text('STEPS = 7\n')
  neighbour = 'from configs import neighbour\n' if 'configs' in str(folder.relative_to(tmp_path)) else ''
  steps = 'neighbour.STEPS' if neighbour else '7'
  (folder / 'own.py').write_text(
    f'from configs import base\n{neighbour}def get_config():\n  config = base.get_config()\n'
    f'  config.steps = {steps}\n  return config\n')
  code = ('from jaxsearch.flags import parse; '
          f"print(parse('train', ['--config={folder}/own.py'], '')[0].steps)")
  printed = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                           cwd=tmp_path).stdout
  assert printed.split()[-1] == '7'


def test_fields_are_read_by_their_types():
  set_by = lambda *texts: parse('train', texts, 'base').config
  config = set_by('--config.optim.learning_rate=1e-5', '-config.seed=7', '--noconfig.progress', '--config.remat=full',
                  '--config.eval.temperatures=0.5', '--config.monitor.entropy_low=0.1', '--config.data.corpus=a=b',
                  "--config.eval.grow={'max_turns': 2}")  # a group that is empty, as a whole
  assert (config.optim.learning_rate, config.seed, config.progress, config.remat) == (1e-5, 7, False, 'full')
  assert (config.eval.temperatures, config.monitor.entropy_low, config.data.corpus) == ((0.5,), 0.1, 'a=b')
  assert dict(config.eval.grow) == {'max_turns': 2}
  for text, needed in (('--config.seed=1.5', 'a whole number'), ('--config.progress=maybe', 'True or False'),
                       ('--config.eval.grow=3', 'it is a group')):
    with pytest.raises(ValueError, match=re.escape(text.removeprefix('--')) + f': {needed}'):
      set_by(text)


def test_a_place_is_checked_and_nothing_is_made(tmp_path):
  (tmp_path / 'file').write_text('old')
  (tmp_path / 'link').symlink_to(tmp_path / 'file')
  for path, folder in (('new/deep.json', False), ('new/deep', True), ('file', False), ('link', False),
                       ('', True)):
    check_place('--out', str(tmp_path / path), folder)
  check_place('--out', '/dev/stdout')
  assert sorted(file.name for file in tmp_path.iterdir()) == ['file', 'link']
  assert (tmp_path / 'file').read_text() == 'old'
  for path, folder, message in (
      (tmp_path, False, 'it is a folder, not a file'),
      (tmp_path / 'file', True, 'file is a file, not a folder'),
      (tmp_path / 'file' / 'x', False, 'file is a file, not a folder'),
      ('/proc/x/y', False, 'nothing can be written in /proc'),
      ('', True, 'a path is needed'), ('x' * 300, False, 'File name too long')):
    with pytest.raises(ValueError, match=f'^--out={path}: .*{message}'):
      check_place('--out', str(path), folder)


def saved(**changes):
  config = quickstart.get_config()
  config.update_from_flattened_dict(changes)
  return to_saved(config)


def test_a_checkpoint_says_what_its_policy_saw_and_nothing_to_open(tmp_path, capsys):
  theirs = saved(**{'grow.max_turns': 2, 'sampler.slots': 7, 'python.output': 99, 'model': 'world-carl',
                    'dtype': 'bfloat16', 'sampler.engine': 'vllm', 'sampler.urls': 'http://u',
                    'search.cache': 'c', 'search.backend': 'index', 'search.index': 'i', 'data.corpus': 'd',
                    'out': 'o', 'mcp.servers': ('m',)})
  theirs['grow']['template'], theirs['reader'] = str(tmp_path / 'prompt.txt'), {'model': 'm', 'slots': 4}
  config, *_ = parse('ask', [], 'quickstart', saved=theirs, replaced=['data.corpus'])
  assert (config.grow.max_turns, config.sampler.slots, config.python.output) == (2, 7, 99)
  assert (config.dtype, config.sampler.engine, config.sampler.urls) == ('bfloat16', 'jax', '')
  assert (config.search, config.data, config.out) == tuple(quickstart.get_config()[name]
                                                           for name in ('search', 'data', 'out'))
  assert config.grow.template == 'world' and config.model == 'world-carl' and 'reader' not in config
  assert capsys.readouterr().err == (
    f"jaxsearch: not taken from the checkpoint: grow.template='{tmp_path}/prompt.txt', mcp.servers=('m',), "
    "reader.model='m', "
    "sampler.urls='http://u', search.backend='index', "
    "search.cache='c', search.index='i'; what to open and to ask is yours to say, with --config or flags\n")
  config, *_ = parse('ask', ['--config=search_r2', '--config.search.topk=9'], '', saved=theirs)
  assert (config.method, config.grow.max_turns, config.python.output) == ('search_r1', 2, 99)
  assert config.search.topk == 9
  assert (config.sampler.slots, config.model) == (32, 'world-review')  # those of the config that is given


def test_the_text_of_a_prompt_comes_with_a_checkpoint(tmp_path):
  (tmp_path / 'prompt.txt').write_text('Say {question}.')
  theirs = saved(**{'grow.template': str(tmp_path / 'prompt.txt')})
  (tmp_path / 'prompt.txt').unlink()
  assert parse('ask', [], 'quickstart', saved=theirs).config.grow.template == 'Say {question}.'
