"""Which range a thread was in at a moment."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from profiling.trace import Trace

__all__ = ["Outermost"]


class Outermost:
    """Ranges of CPU threads, without those that lie in another one of them on the same thread."""

    def __init__(self, trace: Trace, events: npt.NDArray[np.int64]) -> None:
        """Take the ranges ``events`` of ``trace``, int64 indices in any order."""
        order = np.lexsort((-trace.end[events], trace.start[events], trace.lane[events]))
        events = events[order]
        lanes = trace.lane[events]
        kept = np.zeros(len(events), bool)
        for low, high in _slices(lanes):
            reach = np.maximum.accumulate(trace.end[events[low:high]])
            kept[low] = True
            kept[low + 1 : high] = trace.start[events[low + 1 : high]] >= reach[:-1]
        self.events = events[kept]  # by thread, then by start
        self._lanes = lanes[kept]
        self._start, self._end = trace.start[self.events], trace.end[self.events]

    def at(
        self, lanes: npt.NDArray[np.int32], times: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the row in ``events`` of the range that each moment is in, int64; -1 for none."""
        rows = np.full(len(times), -1, np.int64)
        for low, high in _slices(self._lanes):
            here = np.flatnonzero(lanes == self._lanes[low])
            found = low - 1 + np.searchsorted(self._start[low:high], times[here], side="right")
            inside = (found >= low) & (times[here] < self._end[np.maximum(found, low)])
            rows[here[inside]] = found[inside]
        return rows


def _slices(lanes: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return where each lane begins and ends in the sorted ``lanes``."""
    edges = np.flatnonzero(np.diff(lanes)) + 1
    bounds = [0, *edges.tolist(), len(lanes)]
    return list(pairwise(bounds)) if len(lanes) else []
