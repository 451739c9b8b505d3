"""Formats: what counts as a box, a chain or a score."""

import pytest

from jaxsearch.rewards import formats

CHAIN = ['<think>look</think>\n<search> who </search>', '<think>found</think><answer> Ada </answer>']


@pytest.mark.parametrize('text, expected', [
    (r'so \boxed{42}.', '42'), (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}'), (r'\boxed{1} then \boxed{ 2 }', '2'),
    (r'\boxed{1} then \boxed{2', '1'), (r'\boxed{{a}{b{c}}}', '{a}{b{c}}'), (r'\boxed{a \} b}', r'a \} b'),
    (r'\boxed{\{1, 2\}}', r'\{1, 2\}'), (r'\boxed{}', None), ('no box', None), (r'\boxed 5', None),
    (r'\boxed{a}}', 'a'), (r'\boxed {x}', 'x'), ('\\boxed{two\nlines}', 'two\nlines'),
    (r'\boxed{\boxed{7}}', '7'), (r'\boxed{a\\}', 'a\\\\'), (r'\\boxed{a}', 'a')])
def test_last_boxed(text, expected):
  assert formats.last_boxed(text) == expected


@pytest.mark.parametrize('content, expected', [
    (r'\text{Paris}', 'Paris'), (r'\mathrm{Paris}', 'Paris'), (r'\textbf{ Paris }', 'Paris'),
    (r'\text {Paris}', 'Paris'),
    (r'\textbf{\text{Paris}}', 'Paris'), (r'\text{Paris, }\textit{France}', 'Paris, France'),
    (r'12\text{ km}', '12 km'), (r'\emph{New~York}', 'New York'),
    (r'\text{}', None), (r'\frac{1}{2}', r'\frac{1}{2}'), (r'\mathbb{R}', r'\mathbb{R}')])
def test_the_wrappers_of_words_in_a_box_are_taken_off(content, expected):
  assert formats.last_boxed(rf'It is \boxed{{{content}}}.') == expected


@pytest.mark.parametrize('spans, expected', [
    (['<e> x </e>'], 'x'), (['a', 'b <e>x\ny</e>'], 'x\ny'), (['<e>x</e>', '<e>y</e>'], None),
    (['<e>x</e></e>'], None), (['<e>x', 'y</e>'], None), (['</e>x<e>'], None), (['x'], None), ([], None),
    (['<e></e>'], '')])
def test_only_box_wants_exactly_one(spans, expected):
  assert formats.only_box(spans, 'e') == expected


@pytest.mark.parametrize('spans, expected', [
    (CHAIN, 1), (CHAIN[1:], 1), ([CHAIN[0]] * 3 + CHAIN[1:], 1), (CHAIN[:1], 0), (CHAIN[::-1], 0), ([], 0),
    (['<answer>x</answer>'], 0),                                       # no thought before it
    (['<think>a</think> well <answer>x</answer>'], 0),                 # words between the elements
    (['<think>a</think><answer>x</answer> so'], 0), (['<think>a</think><answer>x</answer>.\n'], 1),
    (['<think>a<answer>x</answer>'], 0), (['<think>a</think><answer></answer>'], 0),
    (['<think>a</think><think>b</think><answer>x</answer>'], 0),
    (['<think>a</think><search>q</search><answer>x</answer>'], 0),
    (['<think>a</think><answer>x</answer></think>'], 0)])
def test_chain_format(spans, expected):
  assert formats.chain_format(spans) == expected


ANSWER, EVIDENCE = '<answer>x</answer>', '<original_evidence>e</original_evidence>'


@pytest.mark.parametrize('spans, searched, expected', [
    ([ANSWER], False, 0.4), ([], False, 0.2), ([ANSWER, ANSWER], False, 0.2),
    ([EVIDENCE + EVIDENCE], False, 0.2),
    ([EVIDENCE + ANSWER], True, 0.4), ([ANSWER], True, 0.2), ([EVIDENCE], True, 0.2), ([], True, 0.0),
    ([EVIDENCE + EVIDENCE + ANSWER], True, 0.2), (['<answer>x', EVIDENCE], True, 0.2)])
def test_r_search_format(spans, searched, expected):
  assert formats.r_search_format(spans, searched) == pytest.approx(expected)


@pytest.mark.parametrize('reply, expected', [
    ('+1', 1), ('1', 1), ('-1', -1), ('\u22121', -1), (' 0\n', 0),
    ('The plan has 3 steps. <score>+1</score>', 1), ('<score>1</score> no: <score> -1 </score>', -1),
    ('I would say 1 of 4 criteria hold', None), ('step 1', None),
    ('<score>2</score>', None), ('<score>1', None), ('<score></score>', None), ('10', None), ('', None),
    ('<score>good, +1</score>', None)])
def test_judge_score(reply, expected):
  assert formats.judge_score(reply) == expected


@pytest.mark.parametrize('reply, expected', [
    ('Final Answer: 2', 2), ('Collections 1 and 3 help.\n**Final Answer:** 2.', 2), ('final answer: 0', 0),
    ('Final Answer: 1\nwait\nFinal Answer: 3', 3), ('Final Answer: 4', None), ('Final Answer: two', None),
    ('2', None), ('Final Answer: -1', None), ('Final Answer:', None),
    (r'Final Answer: \boxed{2}', 2), ('**Final Answer**\n\\[ \\boxed{\\text{2}} \\]', 2),
    (r'\boxed{Final Answer: 2}', 2),
    ('Final Answer: $2$', 2), (r'Final Answer: \( 2 \)', 2), (r'Final Answer: \text{2}', 2),
    ('Final Answer: `2`', 2),
    ('Final Answer: **2**', 2), ('**Final Answer: 2**', 2), ('Final Answer: <2>', 2),
    ('Final Answer: 2, as the third repeats it', 2),
    ('Final Answer: 2 of 3', 2), ('Final Answer: 2/3', None), ('Final Answer: 1, 3', None),
    ('Final Answer: 0.5', None),
    (r'Final Answer: \boxed{-1}', None), ('Final Answer: number', None),
    ('Final Answer: Collections 1 and 3', None)])
def test_useful_collections(reply, expected):
  assert formats.useful_collections(reply, 3) == expected


BOXED = r'<think>so</think><answer> It is \boxed{Ada}. </answer>'


@pytest.mark.parametrize('spans, form', [
  ([CHAIN[0], BOXED], 1),
  ([BOXED], 1),                                                       # no search is needed
  ([CHAIN[0], CHAIN[0], BOXED], 1),
  # a thought that goes on after its search
  (['<think>a <search> b </search>', 'c</think>' + BOXED], 1),
  ([CHAIN[0], CHAIN[1]], 0),                                          # no box
  ([CHAIN[0], BOXED.replace('Ada', '')], 0),
  ([CHAIN[0], r'\boxed{Ada}' + CHAIN[1]], 0),                         # a box outside of the answer
  ([CHAIN[0], BOXED.removeprefix('<think>so</think>')], 1),
  ([BOXED.removeprefix('<think>so</think>')], 0),                     # no thought at all
  ([BOXED.replace('</think>', '')], 0),
  ([BOXED + BOXED], 0),                                               # two answers
  (['<search> a', BOXED], 0),
  (['a </search>', BOXED], 0),
  (['<think>a</think><search> b </search><result> made up </result>', BOXED], 0),
  ([], 0),
])
def test_the_format_of_research(spans, form):
  assert formats.research_format(spans) == form
