import pytest

from jaxsearch.flags import UsageError, parse

BASE = 'configs/base.py'


def test_overrides_plain_flags_and_words():
  config, flag, words = parse('eval', ['--config', BASE, '--config.steps=3', '--config.search.topk', '7', 'a', 'b',
                                       '--out=x.json', '--policy'], BASE, out=(str, ''), policy=(bool, ''))
  assert (config.steps, config.search.topk) == (3, 7)
  assert flag == {'out': 'x.json', 'policy': True} and words == ['a', 'b']


def test_without_config_the_default_is_taken():
  config, flag, _ = parse('train', [], BASE, out=(str, ''))
  assert config.method == 'search_r1' and flag == {'out': ''}


@pytest.mark.parametrize(('argument', 'message'), [
  ('--config.stepz=3', "no field 'stepz'; did you mean 'steps'?"),
  ('--config.topk=3', "did you mean 'search.topk'?"),
  ('--config.search.top=3', "did you mean 'search.topk'?"),
  ('--config.steps=many', 'config.steps=many'),
  ('--config.steps=3.5', 'config.steps=3.5'),
  ('--config=configs/bsae.py', "no config file configs/bsae.py; did you mean 'configs/base.py'?"),
  ('--bogus=1', 'bogus'),
])  # fmt: skip
def test_mistakes_are_named_in_one_line(argument, message):
  with pytest.raises(UsageError) as caught:
    parse('train', [argument], BASE)
  assert message in str(caught.value) and '\n' not in str(caught.value)


def test_a_config_that_raises_says_so(tmp_path):
  path = tmp_path / 'broken.py'
  path.write_text('def get_config():\n  raise ValueError("no such preset")\n')
  with pytest.raises(UsageError, match='no such preset'):
    parse('train', [f'--config={path}'], BASE)
