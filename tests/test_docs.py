"""The commands in README.md and docs/ are commands with flags that there are."""

import pathlib
import re
import shlex

import pytest

from jaxsearch import cli
from jaxsearch.flags import parse

ROOT = pathlib.Path(cli.__file__).parents[1]
PLACEHOLDER = re.compile(r'\b[A-Z]{2,}\b|…|\.\.\.')  # of a path, a name or a number


def lines():
  for page in (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))):
    text = page.read_text(encoding='utf-8')
    for language, block in re.findall(r'^```(\w*)\n(.*?)^```', text, re.DOTALL | re.MULTILINE):
      for line in block.replace('\\\n', ' ').splitlines() if language in ('', 'bash') else ():
        if match := re.match(r'jaxsearch (.*)', line):
          yield page.name, re.sub(r'(\w)\|[\w|]+', r'\1', match[1]), True  # the first of several choices
    for line in re.findall(r'(?<!`)`jaxsearch ([^`]+)`(?!`)', text):
      yield page.name, line, False


LINES = list(lines())
assert len(LINES) > 60


@pytest.mark.parametrize('page, line, whole', LINES,
                         ids=[f'{page}-{i}' for i, (page, *_) in enumerate(LINES)])
def test_a_command_of_the_docs_can_be_given(page, line, whole):
  name, *arguments = shlex.split(line.split(' > ')[0].split(' | ')[0], comments=True)
  if name == 'COMMAND':
    return
  assert name in cli.COMMANDS, f'{page}: jaxsearch {line}'
  known = {'--config', '--help', *(flag for action in cli.COMMANDS[name]._actions
                                   for flag in action.option_strings)}
  for argument in arguments:
    is_flag = argument.startswith('--') and not argument.startswith('--config.')
    assert not is_flag or argument.split('=')[0] in known, argument
  if whole and not PLACEHOLDER.search(line):
    own, rest = cli.COMMANDS[name].parse_known_args(arguments)
    config, words, _ = parse(name, rest, own.default_config)
    assert config and bool(words) == own.takes_words, f'{page}: jaxsearch {line}'
