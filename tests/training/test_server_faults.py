"""`train` and `eval` on a retrieval server with every fault of tests/tools/server_faults.py: each is known."""

import collections
import json
import sys

import pytest

from jaxsearch import cli
from jaxsearch.sampler.requests import Generate, Search, ToolFailure
from jaxsearch.training import row_files
from jaxsearch.trees import grammar
from jaxsearch.trees.tree import Role
from tests.tools.server_faults import FAULTS, asking, kind, server_with_faults
from tests.training import child

CONFIG = '''
import pathlib
from tests.training import child

def get_config():
  config = child.get_config(pathlib.Path({folder!r}), {out!r})
  config.search.update(backend='http', url={url!r}, timeout=9.0)
  config.sampler.update(slots=32, tool_workers=len({names!r}))
  config.steps, config.questions_per_step, config.group_size, config.checkpoint_every = 1, len({names!r}), 2, 1
  config.mesh.update(data=8)
  config.train.update(micro_rows=8, mini_batch=0, epochs=1)
  config.critic.enabled = False
  return config
'''
PER_STEP = collections.Counter(kind(name, 'search') for name in FAULTS)


@pytest.fixture
def seen(monkeypatch):
  """Kinds of failure that trees saw, None for documents, by question."""
  seen = collections.defaultdict(list)
  method = child.toy_method()

  def grow(question, tree, *, max_tokens):
    node = yield Generate(tree.root.append(f'{question.question} ', Role.PROMPT), max_tokens=max_tokens)
    reply = yield Search(node, question.question)
    tree.metrics['searches'] += 1
    special = tree.tokenizer.special_tokens
    if isinstance(reply, ToolFailure):
      tree.metrics['tool_failures'] += 1
      shown = grammar.failure(reply.reason, special)
    else:
      shown = grammar.information(reply, special)
    seen[question.question].append(reply.fault if isinstance(reply, ToolFailure) else None)
    node = yield Generate(node.append(shown, Role.OBSERVATION), max_tokens=max_tokens)
    tree.answer = node.text

  method.grow = grow
  monkeypatch.setitem(sys.modules, 'jaxsearch.methods.toy', method)
  return seen


def test_a_run_and_an_evaluation_go_on_and_tell_faults_apart(seen, tmp_path):
  child.make_inputs(tmp_path)
  questions, config, out = tmp_path / 'faults.jsonl', tmp_path / 'faults.py', tmp_path / 'run'
  asked = [{'id': name, 'question': asking(name), 'golden_answers': ['x']} for name in FAULTS]
  questions.write_text(''.join(json.dumps(question) + '\n' for question in asked))
  with server_with_faults() as url:
    config.write_text(CONFIG.format(folder=str(tmp_path), out=str(out), url=url, names=list(FAULTS)))
    assert cli.main(['train', f'--config={config}', f'--config.data.questions={questions}']) == 0
    assert seen == {asking(name): [kind(name, 'search')] * 2 for name in FAULTS}
    row, = row_files.read(out / 'metrics.jsonl')
    counted = {name: row.get(f'tool_calls_failed_{name}', 0) for name in PER_STEP if name}
    assert counted == {name: 2 * number for name, number in PER_STEP.items() if name}
    assert row['tool_calls_failed'] == row['searches_failed'] == sum(counted.values())
    assert row['tool_failures_per_tree'] == pytest.approx(1 - PER_STEP[None] / len(FAULTS))
    seen.clear()
    assert cli.main(['eval', f'--config={config}', f'--checkpoint={out}', f'--questions={questions}',
                     f'--out={tmp_path / "eval.json"}']) == 0
    assert seen == {asking(name): [kind(name, 'search')] for name in FAULTS}
  result = json.loads((tmp_path / 'eval.json').read_text())
  assert result['n'] == len(FAULTS)
  assert {name: result.get(f'tool_calls_failed_{name}', 0) for name in counted} == {
    name: number for name, number in PER_STEP.items() if name}
