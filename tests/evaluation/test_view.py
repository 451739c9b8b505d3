"""The page of rollouts: what is in it, what the browser makes of it, and how it follows a run that trains."""

import base64
import functools
import gzip
import json
import re
import tracemalloc

import pytest
from starlette.testclient import TestClient

from jaxsearch import cli
from jaxsearch.data.jsonl import DataError
from jaxsearch.data.questions import Question
from jaxsearch.evaluation import answers, view
from jaxsearch.evaluation.figures import record_of
from jaxsearch.models.tokenizer import Tokenizer
from jaxsearch.training import rollout_file, row_files
from jaxsearch.trees.tree import Role, Stop, Tree
from jaxsearch.world import files as world
from tests.evaluation.browser import CHROMIUM, run_in

chromium = pytest.mark.skipif(not CHROMIUM, reason='no Chromium')
load_tokenizer = functools.cache(lambda: Tokenizer.load(world.folder()))
POLICY = '<think> Hm.</think><search> {}</search>'


def tree(name='Who wrote it?', reward=1.0, stop=Stop.ANSWERED, searched='Ada', documents='Byron knew her.'):
  """A prompt; a search that found documents, and beside it a branch that was cut off; an answer."""
  own = Tree(load_tokenizer(), Question(name, name, ('Ada Lovelace',)))
  prompt = own.root.append(name, Role.PROMPT)

  def write(parent, text, advantage):
    ids = own.tokenizer.encode(text)
    node = parent.append(ids, Role.POLICY, sampler_logprobs=[-1.5] * len(ids))
    node.advantages, node.stop = advantage, '</search>'
    return node

  write(prompt, '<think> No.</think><answer> <b>nobody</b></answer>', -0.75).data['calls'] = [
    {'tool': 'judge', 'about': 'thinking', 'query': 'No.', 'reply': -1, 'reason': 'It gives up.'}]
  node = write(prompt, POLICY.format(searched), 0.75)
  node.data['reward'] = 0.25
  document = {'id': '1', 'title': 'T', 'text': documents}
  node.data['calls'] = [{'tool': 'open', 'query': searched, 'documents': [document]}]
  write(node.append(documents, Role.OBSERVATION), '<answer> Ada Lovelace</answer>', 0.75)
  own.answer, own.reward, own.stop = ('Ada Lovelace' if reward else None), reward, stop
  own.metrics['searches'] = 1 + len(searched) % 2
  return own


def fill(folder, *steps, **changes):
  """A run folder with two questions at each of these steps, the first with unequal rewards."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps({'method': 'toy', 'seed': 3}))
  for step in steps:
    rollout_file.append(folder, step, [[tree(**changes), tree(reward=0.0, stop=Stop.BUDGET, searched='Bob')],
                                   [tree(f'What came in {step}?', reward=0.5)]])
  return folder


def held_out(folder, *steps):
  rows = [{'step': step, 'temperature': 0.0, 'samples': [record_of(tree('Held out?'))]} for step in steps]
  (folder / 'evaluations.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def unpacked(page):
  """The index and the blocks of a page of one run."""
  scripts = dict(re.findall(r'<script type="text/plain" id="(.*?)">(.*?)</script>', page.decode()))
  texts = {name: gzip.decompress(base64.b64decode(data)).decode() for name, data in scripts.items()}
  index = json.loads(texts.pop('index-0'))
  return index, {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}


def test_the_page_holds_every_rollout_of_training_and_of_evaluations(tmp_path):
  fill(tmp_path, 1, 2)
  held_out(tmp_path, 0, 2)
  index, blocks = unpacked(view.page([view.Source(str(tmp_path))]))
  entries = [(entry['kind'], entry['step'], entry['question'], len(entry['rollouts']))
             for entry in index['entries']]
  assert entries == [
    ('training', 1, 'Who wrote it?', 2), ('training', 1, 'What came in 1?', 1),
    ('training', 2, 'Who wrote it?', 2), ('training', 2, 'What came in 2?', 1),
    ('held out', 0, 'Held out?', 1), ('held out', 2, 'Held out?', 1)]
  assert index['about'] == {'method': 'toy', 'seed': 3}
  for entry in index['entries']:
    records = blocks[f'block-0-{entry["at"]}']
    assert [record['question'] for record in records] == [entry['question']] * len(entry['rollouts'])
    assert [row[:3] for row in entry['rollouts']] == [
      [record.get(name) for name in ('reward', 'em', 'f1')] for record in records]


def test_a_page_needs_nothing_else_and_runs_nothing_that_a_model_wrote(tmp_path):
  fill(tmp_path, 1, documents='</script><script>alert(1)</script>')
  page = view.page([view.Source(str(tmp_path))]).decode()
  assert '<b>nobody' not in page and 'alert' not in page  # it is packed
  assert not re.search('(?:src|href)=|@import|https?://(?!www.w3.org)', page)


def test_a_small_file_of_rollouts_cannot_fill_the_memory(tmp_path):
  packed = gzip.compress(b'{"step": 1, "spans": "' + b'x' * 2**27 + b'"}\n')
  (tmp_path / rollout_file.FILE).write_bytes(packed)
  tracemalloc.start()
  with pytest.raises(DataError, match='unpacks to more than 200 times its size'):
    view.Source(str(tmp_path))
  assert tracemalloc.get_traced_memory()[1] < 2**26
  tracemalloc.stop()


@pytest.mark.parametrize('name', ['result.json', 'mine.json.part.jsonl'])
def test_results_of_eval_and_bench_are_read_finished_or_not(tmp_path, name):
  records = [record | {'benchmark': benchmark, 'sample': sample} for benchmark in ('nq', 'popqa')
             for sample in range(2) for record in [record_of(tree('Who?'))]]
  rows = [{'identity': {}}, *({'number': i, 'record': record} for i, record in enumerate(records))]
  (tmp_path / name).write_text(json.dumps({'em': 1, 'predictions': records}) if name == 'result.json'
                               else ''.join(json.dumps(row) + '\n' for row in rows))
  index, blocks = unpacked(view.page([view.Source(str(tmp_path / name))]))
  assert [(entry['source'], len(entry['rollouts']), entry['at']) for entry in index['entries']] == [
    ('nq', 2, 0), ('popqa', 2, 1)]
  assert [span['role'] for span in blocks['block-0-0'][0]['spans']] == [
    'prompt', 'policy', 'policy', 'observation', 'policy']


def test_steps_and_most_choose_the_rollouts_and_the_index_keeps_all(tmp_path):
  source = view.Source(str(fill(tmp_path, 1, 2, 3)))
  for arguments, kept in (((None, None), 6), (((2, 3), None), 4), ((None, 1), 3), (((3, 3), 1), 1)):
    index, blocks = unpacked(view.page([source], *arguments))
    there = [entry for entry in index['entries'] if entry['at'] is not None]
    assert len(index['entries']) == 6 and len(there) == len(blocks) == kept


def test_a_page_that_is_too_large_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(view, 'LARGEST', 1000)
  with pytest.raises(ValueError, match='too large for a page; choose with --steps or --most'):
    view.page([view.Source(str(fill(tmp_path, 1, 2)))])


def test_a_broken_config_is_named(tmp_path):
  (fill(tmp_path, 1) / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='config.json: not valid JSON'):
    view.Source(str(tmp_path))


def test_a_source_follows_a_run(tmp_path):
  fill(tmp_path, 1)
  source = view.Source(str(tmp_path))
  steps = lambda: [entry['step'] for entry in source.entries]
  source.refresh()
  assert source.generation == 1 and steps() == [1, 1]
  fill(tmp_path, 2)
  with open(tmp_path / rollout_file.FILE, 'ab') as file:
    file.write(rollout_file.pack([{'step': 3}])[:-4])  # being written
  source.refresh()
  assert source.generation == 2 and steps() == [1, 1, 2, 2]
  assert json.loads(gzip.decompress(source.blocks[3]).splitlines()[0])['question'] == 'What came in 2?'
  rollout_file.keep_steps(tmp_path, 1)  # resumed
  fill(tmp_path, 5)
  source.refresh()
  assert source.generation == 3 and steps() == [1, 1, 5, 5]


def test_a_source_outlives_the_file_of_a_bench_that_ends(tmp_path):
  part = tmp_path / f'r.json{answers.PART}'
  record = {'id': '1', 'question': 'Who?', 'golden_answers': ['A'], 'spans': []}
  row_files.write(part, [{'identity': {}}, {'number': 0, 'record': record}])
  source = view.Source(str(part))
  part.unlink()
  source.refresh()
  assert [entry['id'] for entry in source.entries] == ['1'] and source.generation == 1


def test_the_server_gives_what_is_new_and_only_to_this_machine(tmp_path):
  client = TestClient(view.app([view.Source(str(fill(tmp_path, 1)))]), base_url='http://127.0.0.1')
  page, index = client.get('/'), client.get('/index/0').json()
  assert 'LIVE = true' in page.text and len(index['entries']) == 2
  assert client.get('/index/0?generation=1').status_code == 204
  fill(tmp_path, 2)
  assert len(client.get('/index/0?generation=1').json()['entries']) == 4
  reply = client.get('/block/0/0?generation=2')
  assert reply.status_code == 200 and len(gzip.decompress(reply.content).splitlines()) == 2
  assert client.get('/block/0/0?generation=1').status_code == 409
  own = client.get('/index/0').json()['server']
  replies = [client.get(f'/{asked}/0{block}?generation=2&server={server}').status_code
             for server in (own, 'another') for asked, block in (('index', ''), ('block', '/0'))]
  assert replies == [204, 200, 200, 409]
  assert client.get('/', headers={'host': 'evil.example'}).status_code == 400
  for path in ('/index/7', '/block/0/99?generation=2', '/block/0/x?generation=2', '/block/7/0'):
    assert client.get(path).status_code == 404


def test_the_command_writes_the_page_of_two_runs(tmp_path, capsys):
  fill(tmp_path / 'one', 1, 2, 3), fill(tmp_path / 'two', 1)
  out = tmp_path / 'x.html'
  assert cli.main(['view', f'{tmp_path}/one', f'--with={tmp_path}/two', '--steps=2:3', f'--out={out}']) == 0
  assert 'page: ' in capsys.readouterr().out and 'RUNS = 2' in out.read_text()


@chromium
def test_table_filters_tree_colours_and_another_step_in_a_browser(tmp_path):
  fill(tmp_path / 'one', 1, 2)
  held_out(tmp_path / 'one', 2)
  other = fill(tmp_path / 'two', 2, documents='By Ada, the Lovelace.')
  page = view.page([view.Source(str(tmp_path / 'one')), view.Source(str(other))]).decode()
  seen = run_in(page, '''
    const found = {}, all = (selector) => [...document.querySelectorAll(selector)]
    const rows = () => all('.row').length
    const pause = () => new Promise((next) => setTimeout(next, 150))
    const set = async (name, value) => {
      $(name).value = value
      for (const kind of ['input', 'change']) $(name).dispatchEvent(new Event(kind))
      await pause()
    }
    found.all = rows()
    const filters = [['spread-low', '0.3'], ['text', 'CAME in 2'], ['stop', 'budget'], ['kind', 'held out']]
    for (const [name, value] of filters) {
      await set(name, value)
      found[name] = rows()
      await set(name, '')
    }
    $('tab-rollouts').click()
    found.rollouts = rows()
    $('tab-groups').click()
    all('[data-column="reward"]')[0].click()
    found.sorted = shown.map((one) => one.reward)

    choose(entries.find((one) => one.step === 1 && one.n === 2))
    await until(() => all('.column').length === 2)
    const names = () => all('.column > .label b').map((one) => one.innerText)
    found.runs = names()
    const spans = [...all('.big svg')[0].querySelectorAll('.span')]
    found.boxes = spans.map((one) => {
      const box = one.querySelector('rect').getBoundingClientRect()
      return [+one.dataset.span, box.left, box.top, box.width]
    }).sort((a, b) => a[0] - b[0])
    found.lengths = (await recordsOf(chosen))[0].spans.map((span) => span.ids.length)
    found.hatched = spans.filter((one) => one.innerHTML.includes('url(#cut)')).map((one) => one.dataset.span)
    found.marks = ['.tool', '.judge'].map((mark) => all('.big')[0].querySelectorAll(mark).length)
    found.gold = all('.block.observation').map(
      (one) => [...one.querySelectorAll('.gold')].map((mark) => mark.textContent).join(''))
    found.notes = all('.block .label').filter((one) => one.textContent.includes('reward 0.25')).length
    found.reason = all('.reason')[0].textContent
    found.html = all('.tokens b').length

    const colours = () => new Set(['1', '2'].flatMap((span) => all(
      `.column:first-child .block[data-span="${span}"] span[data-t]`).map(
        (one) => getComputedStyle(one).backgroundColor))).size
    found.signals = [...$('signal').options].filter((one) => !one.disabled).map((one) => one.value)
    await set('signal', 'advantage')
    await until(() => colours() === 2)
    await set('signal', 'log-probability')
    await until(() => colours() === 1)

    const beside = all('select[aria-label=beside]')[0]
    beside.value = [...beside.options].find((one) => one.textContent.includes('one · training step 2')).value
    beside.dispatchEvent(new Event('change'))
    await until(() => names()[1] === 'one · training step 2')

    $('deep').checked = true
    for (const words of ['gives up', 'nowhere', 'policy']) {
      $('status').textContent = ''
      await set('text', words)
      await until(() => $('status').textContent.includes('found'))
      found[words] = [$('status').textContent.split(' ')[0], rows()]
    }
    return found
  ''')
  counts = {'all': 7, 'spread-low': 3, 'text': 2, 'stop': 3, 'kind': 1, 'rollouts': 10}
  assert {name: seen[name] for name in counts} == counts
  assert seen['sorted'] == sorted(seen['sorted'], reverse=True)
  assert seen['runs'] == ['one · training step 1', 'two · training step 2']  # the other run, beside it
  lefts, tops, widths = zip(*(box[1:] for box in seen['boxes']))
  unit = widths[0] / seen['lengths'][0]
  assert widths == pytest.approx([unit * length for length in seen['lengths']], abs=3)  # width is tokens
  assert lefts[1] == pytest.approx(lefts[2], abs=0.5) and tops[1] > tops[2]  # forks are side by side
  assert tops[0] == tops[2] == tops[3] == tops[4] and lefts[3] > lefts[2]
  assert seen['hatched'] == ['1'] and seen['marks'] == [1, 1] and seen['notes'] == 2
  assert seen['gold'] == ['', 'Ada, the Lovelace'] and seen['reason'] == 'It gives up.' and seen['html'] == 0
  assert seen['signals'] == ['role', 'advantage', 'log-probability', 'mask']
  # Results of evaluations have no judges' reasons; a key of the file is no text.
  assert (seen['gives up'], seen['nowhere'], seen['policy']) == (['9', 6], ['0', 0], ['0', 0])
