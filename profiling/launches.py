"""What a CPU range launched: from a launch to the device's events, by their shared correlation.

One correlation may stand for many kernels (a graph), and a runtime call and the driver call inside
it share one; each kernel is found once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiling.trace import Category, Trace

__all__ = ["Launches"]


class Launches:
    """The launches of a trace, by thread and time."""

    def __init__(self, trace: Trace) -> None:
        calls = trace.of(Category.LAUNCH)
        calls = calls[trace.correlation[calls] >= 0]
        calls = calls[np.argsort(trace.lane[calls], kind="stable")]  # within a lane, by start
        self._lane = trace.lane[calls]
        self._start = trace.start[calls]
        self._called = trace.correlation[calls]
        work = np.flatnonzero((trace.category >= Category.KERNEL) & (trace.correlation >= 0))
        self._work = work[np.argsort(trace.correlation[work], kind="stable")]
        self._done = trace.correlation[self._work]

    def inside(self, lane: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the device's events launched on thread ``lane`` in [start, end), each once."""
        low, high = np.searchsorted(self._lane, [lane, lane + 1])
        first, last = low + np.searchsorted(self._start[low:high], [start, end])
        correlations = np.unique(self._called[first:last])
        begin = np.searchsorted(self._done, correlations, side="left")
        count = np.searchsorted(self._done, correlations, side="right") - begin
        rows = np.arange(count.sum()) + np.repeat(begin - (np.cumsum(count) - count), count)
        return self._work[rows]

    def missing(self, trace: Trace) -> npt.NDArray[np.int64]:
        """Return the device's events that no launch of the trace belongs to."""
        work = np.flatnonzero(trace.category >= Category.KERNEL)
        return work[~np.isin(trace.correlation[work], self._called)]

    def anywhere(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the device's events launched on any thread in [start, end), each once."""
        lanes = np.unique(self._lane).tolist()
        found = [self.inside(lane, start, end) for lane in lanes]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
