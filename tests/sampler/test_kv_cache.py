"""Which row serves which path."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxsearch.sampler.kv_cache import FORK_MIN, CacheRows, Prefixes, common_prefix

A = np.arange(40, dtype=np.int32)
B = np.concatenate([A[:30], A[:10] + 100]).astype(np.int32)


def cache_all(rows, placements, paths):
  for placement in placements:
    rows.hold(placement.row, paths[placement.item])
    placement.row.busy = False


def test_common_prefix():
  for a, b, size in (([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0)):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == size


paths = st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 50), st.sampled_from([0, 1]), st.integers(0, 30)).map(
  lambda parts: np.repeat(np.array(parts[::2], np.int32), parts[1::2])), min_size=1, max_size=4)


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
        expected = (longest, [other for other in shared if shared[other] == longest]) if longest >= FORK_MIN else (0, [])
        found, names = prefixes.longest(wanted, allowed)
        assert (found, sorted(names)) == expected
  for name, path in held.items():
    prefixes.remove(name, path)
  assert prefixes.root == ({}, {})


def test_an_episode_comes_back_to_its_row_and_rewinds_it():
  rows = CacheRows(3)
  cache_all(rows, rows.place([A], [0]), [A])
  longer = np.append(A, [7, 8]).astype(np.int32)
  placement, = rows.place([longer], [0])
  assert (placement.shared, placement.source) == (40, None)
  cache_all(rows, [placement], [longer])
  placement, = rows.place([B], [0])
  assert (placement.shared, placement.source, placement.row.tokens.tolist()) == (30, None, A[:30].tolist())


def test_another_episode_gets_a_copy_of_the_prefix():
  rows = CacheRows(3)
  first, = rows.place([A], [0])
  rows.hold(first.row, A)     # still busy
  second, = rows.place([B], [1])
  assert second.shared == 30 and second.source is first.row and second.row is not first.row
  first.row.busy = False     # now it waits for a tool: still not taken away
  third, = rows.place([B], [2])
  assert third.source in (first.row, second.row) and third.row not in (first.row, second.row)


def test_a_short_prefix_is_not_worth_a_copy():
  rows = CacheRows(3)
  cache_all(rows, rows.place([A], [0]), [A])
  short = np.append(A[:FORK_MIN - 1], [99]).astype(np.int32)
  placement, = rows.place([short], [1])
  assert placement.source is None and placement.shared == 0


def test_a_prefix_that_is_only_now_computed_is_waited_for():
  rows = CacheRows(4)
  paths = [A, B, A[:5] + 50]
  placements = rows.place(paths, [0, 1, 2])
  assert [p.item for p in placements] == [0, 2]
  rows.hold(placements[0].row, A)
  again, = rows.place([paths[1]], [1])
  assert again.source is placements[0].row and again.shared == 30


def test_longest_prefixes_choose_first_and_rows_of_the_living_are_taken_last():
  rows = CacheRows(2)
  cache_all(rows, rows.place([A, B[:5] + 200], [0, 1]), [A, B[:5] + 200])
  rows.release(1)
  placement, = rows.place([B + 300], [2])
  assert placement.row.index == 1 and rows.evicted == 0     # the row of episode 1, which has ended
  cache_all(rows, [placement], [B + 300])
  placement, = rows.place([B + 400], [3])
  assert placement.row.index == 0 and rows.evicted == 1     # both alive: the longest unused
  rows.forget()
  placements = rows.place([A, B], [4, 5])
  assert [p.shared for p in placements] == [0]


def test_a_row_that_is_copied_from_is_not_overwritten_by_a_copy():
  rows = CacheRows(3)
  C = A + 100
  cache_all(rows, rows.place([A, C], [0, 1]), [A, C])     # episodes 0 and 1 wait for a tool
  paths = [np.append(A, [1]).astype(np.int32), np.append(C, [2]).astype(np.int32)]
  placement, = rows.place(paths, [2, 3])     # each wants a copy, but there is a single row to copy to
  assert placement.source.index == 0 and placement.row.index == 2
  rows.hold(placement.row, paths[0])
  placement.row.busy = False
  rows.release(2)
  placement, = rows.place([paths[1]], [3])
  assert placement.source.index == 1 and placement.row.index == 2


def test_a_path_is_served_in_its_lane():
  rows = CacheRows(2, lanes=2)
  first, second = rows.place([A, A], [0, 1], [0, 1])
  cache_all(rows, [first, second], [A, A])
  assert (first.row.lane, second.row.lane) == (0, 1) and first.shared == second.shared == 0  # not copied from lane to lane
  copied, = rows.place([np.append(A, [7]).astype(np.int32)], [2], [1])
  assert copied.row.lane == 1 and copied.shared == len(A)
  assert [(row.lane, row.place) for row in rows.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
