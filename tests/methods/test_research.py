"""ReSearch's box, tags and reward, driven by hand."""

import pytest

from configs import r1
from jaxsearch.methods import folding, research
from jaxsearch.trees import native, templates
from jaxsearch.trees.tree import Role, Stop
from tests.methods.driving import SEARCH, drive

RIGHT = r'<think>ok</think><answer> The final answer is \[ \boxed{Ada Lovelace} \] </answer>'


def chain(*said, **settings):
  return drive(said, grow=research.grow, **{'template': 'research', 'max_turns': len(said) - 1} | settings)


def test_the_prompt_wants_a_box_and_results_stand_in_their_tag():
  tree, requests, observations = chain(SEARCH, RIGHT)
  prompt = tree.nodes(Role.PROMPT)[0].text
  assert prompt.endswith('<answer> It is \\[ \\boxed{exact answer} \\] </answer>.\nQuestion: Who wrote it?\n')
  assert observations == ['\n<result>Doc 1(Title: Title) text\n</result>\n']
  assert tree.answer == 'Ada Lovelace' and tree.stop is Stop.ANSWERED and research.reward(tree) == 1.0


@pytest.mark.parametrize('said, reward', [
  ([SEARCH, RIGHT], 1.0),
  ([SEARCH, r'<think>ok</think><answer>\boxed{Ada}</answer>'], 2 / 3),              # F1 with 'Ada Lovelace'
  # wrong, in the right format
  ([SEARCH, r'<think>ok</think><answer>\boxed{Byron}</answer>'], 0.1),
  # a thought that never ends
  ([SEARCH, r'<think>ok<answer>\boxed{Byron}</answer>'], 0.0),
  # eq. 2 asks for the format at F1 = 0 alone
  ([SEARCH, r'<think>ok<answer>\boxed{Lovelace}</answer>'], 1.0),
  ([SEARCH, '<think>ok</think><answer> Ada Lovelace </answer>'], 0.0),              # no box: no answer
  ([SEARCH, r'<think>ok</think><answer>\boxed{}</answer>'], 0.0),
  ([r'<think>ok</think>\boxed{Lovelace}'], 0.0),                                    # a box, no answer
  ([SEARCH, SEARCH], 0.0),                                                          # never answers
  # a search that is never closed
  (['<search> a', r'<think>ok</think><answer>\boxed{Byron}</answer>'], 0.0),
])
def test_rewards(said, reward):
  tree, *_ = chain(*said)
  assert research.reward(tree) == pytest.approx(reward)
  assert (tree.stop is Stop.ANSWERED) == (tree.answer is not None)


def test_without_boxes_the_whole_answer_counts():
  tree, *_ = chain(SEARCH, '<think>ok</think><answer> Lovelace </answer>', boxed=False)
  assert tree.answer == 'Lovelace' and research.reward(tree) == 1.0
  tree, *_ = chain('<think>ok</think><answer> Byron </answer>', boxed=False)
  assert research.reward(tree) == pytest.approx(0.1)


def test_r1_serves_no_search():
  config = r1.get_config()
  grow = {name: value for name, value in config.grow.items() if name not in (*native.SETTINGS, *folding.SETTINGS)}
  assert config.method == 'search_r1'
  for template, words in ('world', 'Question: Who'), ('r1', 'Think first, then answer.'):
    tree, requests, observations = drive([SEARCH], **grow | {'template': template})
    assert len(requests) == 1 and not observations and tree.answer is None and tree.stop is Stop.BUDGET
    assert words in tree.nodes(Role.PROMPT)[0].text
  assert '<search>' not in templates.prompt('Who?', 'r1')
  tree, *_ = drive(['<think>I know.</think><answer> Ada </answer>'], **grow)
  assert tree.answer == 'Ada' and tree.metrics['searches'] == 0
