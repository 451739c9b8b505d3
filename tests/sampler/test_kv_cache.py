"""Which row serves which path."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxsearch.sampler.kv_cache import FORK_MIN, CacheRows, Path, Prefixes
from jaxsearch.trees.layout import common_prefix

A = np.arange(40, dtype=np.int32)
B = np.concatenate([A[:30], A[:10] + 100]).astype(np.int32)


def place(rows, *asked):
  """Places (tokens to be cached, episode, lane) of each."""
  return rows.place([Path(np.append(tokens, 0).astype(np.int32), *more) for tokens, *more in asked])


def cache_all(rows, *asked):
  """As if all of it were computed."""
  placed = place(rows, *asked)
  for path in placed:
    rows.hold(path.row, path.context)
    path.row.busy = False
  return placed


def test_common_prefix():
  for a, b, size in (([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0)):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == size


bits = st.sampled_from([0, 1])
two_runs = st.tuples(bits, st.integers(0, 50), bits, st.integers(0, 30))
paths = st.lists(two_runs.map(lambda parts: np.repeat(np.array(parts[::2], np.int32), parts[1::2])),
                 min_size=1, max_size=4)


@hypothesis.given(paths, paths)
@hypothesis.settings(deadline=None)
def test_the_longest_common_beginning_is_found_while_paths_come_and_go(first, then):
  """Against every path one by one."""
  prefixes, held = Prefixes(), {}
  for name, path in [*enumerate(first), *enumerate(then)]:
    if name in held:
      prefixes.remove(name, held[name], common_prefix(held[name], path))
    prefixes.add(name, path)
    held[name] = path
    for wanted in first + then:
      for allowed in (lambda other: True, lambda other: other % 2):
        shared = {other: common_prefix(wanted, known) for other, known in held.items() if allowed(other)}
        longest = max(shared.values(), default=0)
        alike = [other for other in shared if shared[other] == longest]
        expected = (longest, alike) if longest >= FORK_MIN else (0, [])
        found, names = prefixes.longest(wanted, allowed)
        assert (found, sorted(names)) == expected
  for name, path in held.items():
    prefixes.remove(name, path)
  assert prefixes.beginning == {}


def test_an_episode_comes_back_to_its_row_and_rewinds_it():
  rows = CacheRows(3)
  cache_all(rows, (A, 0))
  path, = cache_all(rows, (np.append(A, [7, 8]), 0))
  assert (path.shared, path.source) == (40, None)
  path, = place(rows, (B, 0))
  assert (path.shared, path.source, path.row.tokens.tolist()) == (30, None, A[:30].tolist())


def test_another_episode_gets_a_copy_of_the_prefix():
  rows = CacheRows(3)
  first, = place(rows, (A, 0))
  rows.hold(first.row, A)  # still busy
  second, = place(rows, (B, 1))
  assert second.shared == 30 and second.source is first.row and second.row is not first.row
  first.row.busy = False  # now it waits for a tool: still not taken away
  third, = place(rows, (B, 2))
  assert third.source in (first.row, second.row) and third.row not in (first.row, second.row)


def test_a_short_prefix_is_not_worth_a_copy():
  rows = CacheRows(3)
  cache_all(rows, (A, 0))
  path, = place(rows, (np.append(A[:FORK_MIN - 1], [99]), 1))
  assert path.source is None and path.shared == 0


def test_a_prefix_that_is_only_now_computed_is_waited_for():
  rows = CacheRows(4)
  placed = place(rows, (A, 0), (B, 1), (A[:5] + 50, 2))
  assert [path.owner for path in placed] == [0, 2]
  rows.hold(placed[0].row, A)
  again, = place(rows, (B, 1))
  assert again.source is placed[0].row and again.shared == 30


def test_longest_prefixes_choose_first_and_rows_of_the_living_are_taken_last():
  rows = CacheRows(2)
  cache_all(rows, (A, 0), (B[:5] + 200, 1))
  rows.release(1)
  path, = cache_all(rows, (B + 300, 2))
  assert path.row.index == 1 and rows.evicted == 0  # the row of episode 1, which has ended
  path, = place(rows, (B + 400, 3))
  assert path.row.index == 0 and rows.evicted == 1  # both alive: the longest unused
  rows.forget()
  assert [path.shared for path in place(rows, (A, 4), (B, 5))] == [0]


def test_a_row_that_is_copied_from_is_not_overwritten_by_a_copy():
  rows = CacheRows(3)
  C = A + 100
  cache_all(rows, (A, 0), (C, 1))  # episodes 0 and 1 wait for a tool
  asked = (np.append(A, [1]), 2), (np.append(C, [2]), 3)
  path, = cache_all(rows, *asked)  # each wants a copy, but there is a single row to copy to
  assert path.source.index == 0 and path.row.index == 2
  rows.release(2)
  path, = place(rows, asked[1])
  assert path.source.index == 1 and path.row.index == 2


def test_a_path_is_served_in_its_lane():
  rows = CacheRows(2, lanes=2)
  first, second = cache_all(rows, (A, 0, 0), (A, 1, 1))
  assert (first.row.lane, second.row.lane) == (0, 1)
  assert first.shared == second.shared == 0  # not copied from lane to lane
  copied, = place(rows, (np.append(A, [7]), 2, 1))
  assert copied.row.lane == 1 and copied.shared == len(A)
  assert [(row.lane, row.place) for row in rows.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
