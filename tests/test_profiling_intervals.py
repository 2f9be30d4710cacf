"""Interval sets against brute force: one boolean per nanosecond."""

import numpy as np
import pytest

from profiling import intervals

SPAN = 64


def grid(a):
    cells = np.zeros(SPAN, bool)
    for start, end in a:
        cells[start:end] = True
    return cells


def random_pairs(rng):
    starts = rng.integers(0, SPAN - 1, rng.integers(0, 9))
    lengths = rng.integers(-2, 20, len(starts))  # some reversed, some empty, many touching
    return np.stack((starts, np.clip(starts + lengths, 0, SPAN)), axis=1)


def make(pairs):
    pairs = np.asarray(pairs, np.int64).reshape(-1, 2)
    return intervals.union(pairs[:, 0], pairs[:, 1])


def assert_is_set_of(a, cells):
    assert a.dtype == np.int64
    assert a.shape == (len(a), 2)
    assert np.array_equal(grid(a), cells)
    assert (a[:, 0] < a[:, 1]).all()
    assert (a[1:, 0] > a[:-1, 1]).all(), "sorted, and rows do not touch"


def test_500_random_sets_against_one_boolean_per_instant():
    rng = np.random.default_rng()
    met = 0
    for _ in range(500):
        first, second = random_pairs(rng), random_pairs(rng)
        before = first.copy()
        a, b = make(first), make(second)
        assert np.array_equal(first, before), "the caller's data is not touched"
        assert_is_set_of(a, grid(first))
        assert intervals.total(a) == grid(first).sum()
        assert_is_set_of(intervals.intersect(a, b), grid(first) & grid(second))
        assert_is_set_of(intervals.subtract(a, b), grid(first) & ~grid(second))
        length = int(rng.integers(-1, SPAN))
        cells = grid(first)
        cells[np.flatnonzero(cells)[: max(0, cells.sum() - max(length, 0))]] = False
        assert_is_set_of(intervals.tail(a, length), cells)
        met += bool((grid(first) & grid(second)).any())
    assert met > 100, "the cases are not all empty"


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(0, 1), (1, 2)], [(0, 2)]),
        ([(0, 9), (2, 3)], [(0, 9)]),
        ([(4, 5), (0, 1)], [(0, 1), (4, 5)]),
    ],
    ids=["nothing", "empty", "reversed", "touching", "nested", "unsorted"],
)
def test_union_of(pairs, expected):
    assert [tuple(row) for row in make(pairs)] == expected


def test_nanoseconds_survive_at_todays_epoch():
    now = 1_790_857_026_000_000_000
    a = make([(now, now + 1), (now + 2, now + 3)])
    assert intervals.total(a) == 2
