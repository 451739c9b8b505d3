"""Which pages serve which path."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxsearch.sampler.pages import PAGE, SHORT, Path, Pool
from jaxsearch.trees.layout import common_prefix

A = np.arange(2 * PAGE + 20, dtype=np.int32)  # two pages and a part of one
B = np.append(A[:-5], A[:10] + 100).astype(np.int32)


def path(tokens, owner, room=8):
  return Path(np.append(tokens, 0).astype(np.int32), len(tokens) + 1 + room, owner)


def place(pool, tokens, owner, room=8):
  placed = path(tokens, owner, room)
  assert pool.place(placed)
  return placed


def cache(pool, tokens, owner, held=None):
  """As if the context were computed, and the path had come to hold `held`."""
  placed = place(pool, tokens, owner, room=max(8, len(held if held is not None else ()) - len(tokens)))
  pool.filled(placed)
  pool.leave(placed, placed.context if held is None else held)
  return placed


def test_siblings_share_whole_pages_and_copy_the_last():
  pool = Pool(20)
  first = place(pool, A, 0)
  assert (first.shared, first.source, len(first.numbers)) == (0, None, 3)
  assert not pool.place(path(A, 1)) and not pool.place(path(B, 2))  # what they share is computed just now
  assert pool.place(path(A[:5] + 50, 3))
  pool.filled(first)
  for tokens, owner, shared in (A, 1, len(A)), (B, 2, len(A) - 5):
    other = place(pool, tokens, owner)
    assert other.shared == shared and other.source is first.pages[2]
    assert [*other.numbers[:2]] == [*first.numbers[:2]] and other.numbers[2] not in first.numbers


def test_what_is_computed_further_on_is_waited_for_too():
  pool = Pool(20)
  cache(pool, A[:PAGE - 8], 0)
  first = place(pool, A, 0)
  assert first.shared == PAGE - 8
  assert not pool.place(path(A, 1))
  pool.filled(first)
  assert place(pool, A, 1).shared == len(A)


def test_a_page_that_another_path_fills_is_waited_for_however_little_is_new_in_it():
  """A template in the cache, and two questions that begin alike and end the page that it began."""
  pool, template = Pool(14), A[:2 * PAGE - 7]
  alike = np.append(template, np.arange(9) + 200)
  cache(pool, np.append(template, [1, 2]), 0)
  first = place(pool, np.append(alike, np.arange(12) + 300), 1, room=40)
  second = path(np.append(alike, np.arange(12) + 400), 2, room=40)
  assert not pool.place(second)
  pool.filled(first)
  assert pool.place(second) and second.numbers[1] == first.numbers[1]
  pool.filled(second)
  pool.leave(first, first.context)
  assert pool.place(path(np.arange(20) + 1000, 3, room=PAGE * (pool.count - 1 - pool.used) - 21))  # all that is left


def test_an_episode_goes_on_where_it_left_and_rewinds():
  pool = Pool(20)
  longer = np.append(A, np.arange(PAGE) + 500).astype(np.int32)
  cache(pool, A, 0, longer)
  assert place(pool, np.append(longer, [7]), 0).shared == len(longer)
  again = place(pool, B, 0)
  assert again.shared == len(A) - 5


def test_a_short_beginning_is_computed_again():
  pool = Pool(20)
  cache(pool, A, 0)
  assert place(pool, np.append(A[:SHORT - 1], [99]), 1).shared == 0
  assert place(pool, np.append(A[:SHORT], [99]), 2).shared == SHORT


def test_two_that_share_a_number_end_one_after_the_other():
  pool = Pool(20)
  one, other = place(pool, A, 7), place(pool, A[:5] + 50, 7)
  for each in one, other:
    pool.filled(each)
    pool.leave(each, each.context)
    pool.release(7)
  assert pool.used == 0 and not pool.ends


def test_pages_run_out():
  """Paths in slots keep theirs; then go those of episodes that have ended, then the oldest, each from its end."""
  pool = Pool(1 + 9)
  cache(pool, A, 0)
  cache(pool, A + 1000, 1)
  pool.release(1)
  cache(pool, A + 2000, 2)
  assert pool.evicted == 0
  running = place(pool, A + 3000, 3)
  assert pool.evicted == 0  # the pages of episode 1
  assert cache(pool, A, 0).shared == len(A)
  assert pool.evicted == 1  # for the copy of its last page, from episode 2
  last = place(pool, A + 4000, 4)
  more = place(pool, A + 5000, 5)
  assert not pool.place(path(A + 6000, 6))
  assert sorted([*last.numbers, *running.numbers, *more.numbers]) == list(range(1, 10))
  pool.leave(running, running.context)
  assert pool.place(path(A + 6000, 6))
  pool.forget()
  assert place(pool, A, 6).shared == 0


bits = st.sampled_from([0, 1])
two_runs = st.tuples(bits, st.integers(0, 80), bits, st.integers(0, 40))
paths = st.lists(st.tuples(two_runs.map(lambda parts: np.repeat(np.array(parts[::2], np.int32), parts[1::2])),
                           st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


@hypothesis.given(paths, st.sampled_from([10, 20, 200]))
@hypothesis.settings(deadline=None)
def test_no_page_is_lost_or_given_twice_and_what_is_shared_is_there(asked, count):
  """Against the tokens that each page of the pool was filled with, in any order of placing and leaving."""
  pool, running, held = Pool(count), [], np.full((count, PAGE), -1, np.int32)

  def leave():
    known, tokens = running.pop(0)
    pool.leave(known, tokens)

  for tokens, owner, stays in asked:
    wanted = path(tokens, owner)
    while not pool.place(wanted):
      leave()
    assert wanted.numbers.all() and all(page is None or page.number == number
                                        for page, number in zip(wanted.pages, wanted.numbers))
    if wanted.source is not None:
      held[wanted.numbers[wanted.shared // PAGE]] = held[wanted.source.number]
    there = held[wanted.numbers].ravel()
    np.testing.assert_array_equal(there[:wanted.shared], tokens[:wanted.shared])
    end = np.append(tokens, [5, 6, 7]).astype(np.int32)[:len(tokens) + 1 + owner]
    there[:len(end)] = end
    assert all(len({*wanted.numbers[wanted.shared // PAGE:]} & {*other.numbers}) == 0 for other, _ in running)
    held[wanted.numbers] = there.reshape(-1, PAGE)
    pool.filled(wanted)
    running.append((wanted, end))
    if not stays:
      leave()
  if count == 200 and len(tokens) >= SHORT:  # nothing was evicted
    best = max(common_prefix(tokens, other) for other, *_ in asked[:-1]) if asked[1:] else 0
    assert wanted.shared >= (best if best >= SHORT else 0)
  while running:
    leave()
  assert pool.used == 0
  everything = place(pool, np.arange(PAGE * (count - 1) - 10, dtype=np.int32) + 1000, 9)
  assert sorted(everything.numbers) == list(range(1, count))
