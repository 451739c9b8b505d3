"""One error names all mistakes of a config, before anything is loaded."""

import importlib
import json
import re
import sys
import types

import ml_collections
import pytest

from configs import base, checks
from jaxsearch.config_check import SHIPPED, check, fields, from_saved, to_saved, without_secrets

NAN = float('nan')
SHIPPED_NAMES = sorted(path.stem for path in SHIPPED.glob('*.py') if path.stem != 'checks') + sorted(
  f'prompted.{path.stem}' for path in SHIPPED.glob('prompted/*.py'))


def changed(changes, name='base'):
  """The config of that name with other values; a value of another type is what a user's own file may hold."""
  config = importlib.import_module(f'configs.{name}').get_config().unlock()
  for path, value in changes.items():
    group = config
    *parts, field = path.split('.')
    for part in parts:
      group = group[part]
    with group.ignore_type():
      group[field] = value
  return config


@pytest.mark.parametrize(('path', 'value', 'message'), [  # more of them: tests/mistakes.toml
  ('steps', True, 'steps=True must be >= 1'),
  ('data.hops', (1, 0), 'data.hops=(1, 0) must be >= 1'),
  ('lora.targets', ('q', 'x'), "lora.targets=('q', 'x') must be one of q, k, v"),
  ('eval.temperatures', (1.0, NAN), 'eval.temperatures=(1.0, nan) must be finite'),
  ('method', 'r_search', "method='r_search' needs the group config.reader"),
  ('sizes.adaptive', True, 'sizes.adaptive is no argument; known are none'),
  ('grow.colour', 'red', 'grow.colour is no argument; known are max_turns, max_tokens, template'),
  ('eval.grow.max_turnz', 3, "eval.grow.max_turnz is no argument; did you mean 'max_turns'?"),
  ('questions_per_stpe', 64, "the config has no field 'questions_per_stpe'; did you mean 'questions_per_step'?"),
  ('learning_rate', 1e-6, "no field 'learning_rate'; did you mean 'critic.learning_rate' or 'optim.learning_rate'?"),
  ('optim.lr', 1e-6, "the config has no field 'optim.lr'"),
  ('data.question', 'f.jsonl', "the config has no field 'data.question'; did you mean 'data.questions'?"),
  ('eval.grow.template', 'wrld', "eval.grow: unknown policy template 'wrld'"),
])
def test_a_mistake_is_named_with_what_is_allowed(path, value, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    check(changed({path: value}))


def test_all_mistakes_are_named_at_once():
  with pytest.raises(ValueError) as caught:
    check(changed({'steps': -3, 'optim.b1': 2.0, 'grow.max_turnz': 1, 'sampler.length': 4096}))
  assert str(caught.value).split('; ') == [
    'optim.b1=2.0 must be >= 0 and < 1', 'steps=-3 must be >= 1', 'grow.max_turnz is no argument',
    "did you mean 'max_turns'?",
    'sampler.length=4096 is more than train.row_length=768: the longest path would '
    'not fit into a training row']


@pytest.mark.parametrize(('changes', 'name', 'message'), [
  ({'sampler.length': 4096}, 'base', 'sampler.length=4096 is more than train.row_length=768'),
  ({'group_size': 1}, 'base', 'group_size=1: with one tree a question'),
  ({'eval.every': 5, 'eval.temperatures': ()}, 'base', 'eval.temperatures=() must hold at least one'),
  ({'sizes.adaptive': True, 'sizes.smallest': 4}, 'cusearch',
   'sizes.smallest=4 <= group_size=3 <= sizes.largest=8'),
  ({'sizes.adaptive': True, 'sizes.smallest': 1}, 'cusearch',
   'and sizes.smallest >= 2: one chain has nothing'),
  ({'lora.rank': 2}, 'carl', 'lora.rank=2: an adapter cannot share'),
  ({'critic.learning_rate': 0.0}, 'carl',
   'critic.learning_rate=0.0 must be > 0 where critic.backbone_rate is set'),
  ({'credit.level': 'trajectory'}, 'carl', "critic.enabled=True: credit.level='trajectory' sets no returns"),
  ({'credit.level': 'token'}, 'carl', "credit.level='token' with train.aggregate='step-mean' would read"),
  ({'grow.rewards': 'none'}, 'slate', "grow.rewards='none' rewards nothing"),
  ({'critic.enabled': False}, 'carl', "credit.level='segment' needs critic.enabled=True"),
  ({'credit.estimator': 'ppo'}, 'r_search', "credit.estimator='ppo' needs critic.enabled=True"),
  ({'credit.whole': True}, 'slate', 'credit.whole=True compares whole chains: set grow.k=1, not 5'),
  ({'critic.enabled': True}, 'r_search', "critic.enabled=True: credit.estimator='grpo' sets no returns"),
])
def test_fields_that_do_not_fit_together_stop_a_training_run_alone(changes, name, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    check(changed(changes, name))
  check(changed(changes, name), training=False)


@pytest.mark.parametrize('field', ['tools', 'mcp.servers'])
def test_a_method_with_tools_of_its_own_gets_no_others(field):
  with pytest.raises(ValueError, match=r"tools=\('open',\) mean nothing with method='carl', which has python"):
    check(changed({field: ('open',), 'grow.grammar': 'auto'}, 'carl'))


@pytest.mark.parametrize(('path', 'value', 'message'), [
  ('critic_warmup.closed_book.turns', 3, 'critic_warmup.closed_book.turns is no argument'),
  ('critic_warmup.second_search.topkk', 3, "second_search.topkk is no argument; did you mean 'topk'?"),
  ('critic_warmup.tool_optional_tiers', (1, 3), 'tool_optional_tiers=(1, 3) must be = 1 or = 2'),
])
def test_the_warm_up_of_a_critic_is_checked_too(path, value, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    check(changed({path: value}, 'carl'))


@pytest.mark.parametrize('name', SHIPPED_NAMES)
def test_every_number_of_a_shipped_config_has_a_rule(name):
  config = importlib.import_module(f'configs.{name}').get_config()
  free = {'grow.threshold', 'credit.invalid', 'credit.no_answer'}  # a margin and rewards: any finite number
  for field, value in fields(config):
    if isinstance(value, (int, float)) and not isinstance(value, bool) and field not in free:
      assert field in checks.FIELDS or f'*.{field.split(".")[-1]}' in checks.FIELDS, field


def test_every_rule_is_about_a_field():
  configs = [importlib.import_module(f'configs.{name}').get_config() for name in SHIPPED_NAMES]
  names = {name for config in configs for name, _ in fields(config)} | {'eval.grow.k'}
  leaves = {f'*.{name.split(".")[-1]}' for name in names}
  assert set(checks.FIELDS) <= names | leaves


def test_a_method_may_take_any_argument(monkeypatch):
  method = types.ModuleType('own')
  method.grow, method.credit = lambda question, tree, **settings: None, lambda groups, context, rate=1.0: None
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.own', method)
  config = changed({'method': 'own', 'grow.colour': 'red'})
  with pytest.raises(ValueError, match="^credit.normalize_std is no argument; known are rate$"):
    check(config)
  check(config, training=False)


def test_what_folding_has_by_itself_need_not_be_set():
  config = changed({'grow.fold': 'summary', 'sampler.length': 256})
  del config.grow.fold_at, config.grow.fold_tokens
  with pytest.raises(ValueError, match='grow.fold_at=0.75 of sampler.length=256 leaves no room'):
    check(config)


def test_a_config_may_have_names_of_its_own():
  check(changed({'folder': 'data', 'my_data': 'q.jsonl', 'reviewer': {'slots': 3}}))


def test_a_config_that_is_no_run_passes():
  assert check(ml_collections.ConfigDict({'seeds': (-1,)})) is None
  assert check(base.get_config()) is None


def saved(name):
  return json.loads(json.dumps(importlib.import_module(f'configs.{name}').get_config().to_dict()))


@pytest.mark.parametrize('name', SHIPPED_NAMES)
def test_a_saved_config_is_read_as_it_was(name):
  config = importlib.import_module(f'configs.{name}').get_config()
  assert from_saved(saved(name)).to_dict() == config.to_dict()


def test_an_older_config_is_read_with_the_fields_of_today():
  older, today = saved('r_search'), importlib.import_module('configs.r_search').get_config()
  del older['lora'], older['sampler']['tool_workers'], older['eval']['grow'], older['loss']['dual_clip']
  older['search']['proxy'], older['warmup'] = 'none', {'by_heart': [1, 2]}
  config = from_saved(older)
  check(config)
  assert config.warmup.by_heart == (1, 2)  # a group that base.py does not have is that of some method
  config.loss.dual_clip = 3.0  # still a placeholder of today's type
  with config.unlocked():
    del config['warmup']
    config.loss.dual_clip = None
  assert config.to_dict() == today.to_dict() and config.is_locked


@pytest.mark.parametrize(('url', 'written'), [
  ('http://me:pw@host:8/a?b=c', 'http://***@host:8/a?b=c'),
  ('https://token@a/x,http://b/y,http://u:p@w@c', 'https://***@a/x,http://b/y,http://***@c'),
  ('http://a/?q=1&api_key=k&X-Amz-Signature=s;accessToken=t#f',
   'http://a/?q=1&api_key=***&X-Amz-Signature=***;accessToken=***#f'),
  ('http://a/path@2x?mail=me@b', 'http://a/path@2x?mail=me@b'), ('gs://bucket/run', 'gs://bucket/run'),
])  # fmt: skip
def test_secrets_of_urls_are_not_written(url, written):
  assert without_secrets({'a': [url, 3], 'b': (url,)}) == {'a': [written, 3], 'b': (written,)}


def test_a_prompt_in_a_file_is_saved_as_its_text(tmp_path):
  (tmp_path / 'mine.txt').write_text('Say {question}.\n')
  config = base.get_config()
  with config.unlocked():
    config.grow.template, config.eval.grow = str(tmp_path / 'mine.txt'), {'template': 'search_r1'}
  kept = to_saved(config)
  assert kept['grow']['template'] == 'Say {question}.\n' and kept['eval']['grow'] == {'template': 'search_r1'}
  (tmp_path / 'mine.txt').unlink()
  check(from_saved(json.loads(json.dumps(kept))))  # finds it there


def test_a_saved_config_of_other_types_is_one_line():
  for values in ({'search': {'topk': 'many'}}, {'lora': {'rank': {}}}, {'method': 3},
                 {'data': {'hops': {'a': 1}}}):
    with pytest.raises(ValueError):
      from_saved(values)
