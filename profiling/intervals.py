"""Sets of half-open intervals [start, end), in integer nanoseconds.

A set is an int64 array [n, 2] whose rows are sorted, disjoint, not empty and do not touch. `union`
makes one from anything; the other functions take sets and return sets, and change nothing that
they are given. Integers, because a profile's nanosecond digits survive in them at any epoch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

__all__ = ["EMPTY", "Intervals", "intersect", "subtract", "tail", "total", "union", "window"]

Intervals = npt.NDArray[np.int64]

EMPTY: Intervals = np.zeros((0, 2), np.int64)
EMPTY.setflags(write=False)


def union(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Intervals:
    """Return the set of all instants in any [starts[i], ends[i]); empty or reversed ones add none.

    Args:
        starts, ends: int64 [n], in any order.
    """
    real = ends > starts
    starts, ends = starts[real], ends[real]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))  # what touches is merged
    last = np.concatenate((first[1:], [True]))
    return np.stack((starts[first], reach[last]), axis=1)


def total(a: Intervals) -> int:
    """Return the length of a set in nanoseconds."""
    return int((a[:, 1] - a[:, 0]).sum())


def _near(a: Intervals, b: Intervals) -> Intervals:
    """Return the rows of ``b`` that ``a`` can meet: a window meets few of a whole trace's."""
    if not len(a):
        return EMPTY
    low = bisect_right(b, a[0, 0], key=lambda row: row[1])
    high = bisect_left(b, a[-1, 1], key=lambda row: row[0])
    return b[low:high]


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the instants that are in both sets."""
    b = _near(a, b)
    if not len(b):
        return EMPTY
    # Row i of a meets the rows low[i] .. high[i] - 1 of b.
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    count = np.maximum(high - low, 0)
    left = np.repeat(np.arange(len(a)), count)
    right = np.arange(len(left)) + np.repeat(low - (np.cumsum(count) - count), count)
    return np.stack(
        (np.maximum(a[left, 0], b[right, 0]), np.minimum(a[left, 1], b[right, 1])), axis=1
    )


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the instants of ``a`` that are not in ``b``."""
    b = _near(a, b)
    if not len(b):
        return a
    b = b[np.searchsorted(b[:, 1], a[0, 0]) : np.searchsorted(b[:, 0], a[-1, 1])]  # what is near
    if not len(b):
        return a
    low, high = min(a[0, 0], b[0, 0]), max(a[-1, 1], b[-1, 1])
    gaps = np.stack((np.append(low, b[:, 1]), np.append(b[:, 0], high)), axis=1)
    return intersect(a, gaps[gaps[:, 0] < gaps[:, 1]])


def tail(a: Intervals, length: int) -> Intervals:
    """Return the last ``length`` nanoseconds of a set: all of it where it is no longer."""
    if length <= 0:
        return EMPTY
    after = np.cumsum((a[:, 1] - a[:, 0])[::-1])[::-1]  # from a row's start to the end of the set
    kept = a[after - (a[:, 1] - a[:, 0]) < length].copy()
    if len(kept):
        kept[0, 0] += max(0, total(kept) - length)
    return kept


def window(start: int, end: int) -> Intervals:
    """Return the one interval from ``start`` to ``end``; nothing where it would be empty."""
    return np.array([[start, end]], np.int64) if start < end else EMPTY
