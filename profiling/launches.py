"""What a CPU range launched: from a launch to the device's events, by their shared correlation.

One correlation may stand for many kernels (a graph). A runtime call and the driver call inside it
share one and are one launch. On ROCm, two launches may share one, too: what each of them launched
then follows from the order, if all ran on one stream or each began before the next launch; where
neither holds, every one of them launched all of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from profiling.names import is_graph_launch
from profiling.trace import Category, Trace

__all__ = ["Launches"]

EARLY = 50_000  # ns; a kernel may seem to start this long before its launch


class Launches:
    """The launches of a trace.

    Attributes:
        calls: int64 indices of the launches, by thread and then by start.
        missing: int64 indices of the device's events that no launch of the trace belongs to.
        torn: int64 indices of the device's events that may be any of several launches'.
        in_company: int64 indices of the device's events whose correlation others have, too.
    """

    def __init__(self, trace: Trace) -> None:
        work = np.flatnonzero(trace.category >= Category.KERNEL)
        work = work[np.argsort(trace.correlation[work], kind="stable")]
        done = trace.correlation[work]
        calls = np.flatnonzero(trace.category == Category.LAUNCH)
        called = trace.correlation[calls]
        calls = calls[(called >= 0) & np.isin(called, done)]
        calls = _without_inner(trace, calls)
        self.calls = calls[np.lexsort((trace.start[calls], trace.lane[calls]))]
        self._lane, self._start = trace.lane[self.calls], trace.start[self.calls]
        self._name, self._names = trace.name[self.calls], trace.names

        called = trace.correlation[self.calls]
        begin = np.searchsorted(done, called, side="left")
        count = np.searchsorted(done, called, side="right") - begin
        row = np.repeat(np.arange(len(self.calls)), count)
        rows = np.arange(len(row)) + np.repeat(begin - (np.cumsum(count) - count), count)
        event = work[rows]
        kept = _tell_apart(trace, self.calls[row], event)
        self._row, self._event = row[kept], event[kept]
        events, uses = np.unique(self._event, return_counts=True)
        self.torn = events[uses > 1]
        self.missing = np.setdiff1d(work, self._event)
        same = np.concatenate((np.diff(done) == 0, [False]))
        company = (same | np.roll(same, 1)) & (done >= 0)
        self.in_company = np.sort(work[company])
        self._by_start = np.argsort(self._start, kind="stable")

    def inside(self, lane: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the device's events launched on thread ``lane`` in [start, end), each once."""
        low, high = np.searchsorted(self._lane, [lane, lane + 1])
        first, last = low + np.searchsorted(self._start[low:high], [start, end])
        begin, stop = np.searchsorted(self._row, [first, last])
        return np.unique(self._event[begin:stop])

    def anywhere(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the device's events launched on any thread in [start, end), each once."""
        first, last = np.searchsorted(self._start[self._by_start], [start, end])
        rows = np.sort(self._by_start[first:last])
        begin = np.searchsorted(self._row, rows, side="left")
        count = np.searchsorted(self._row, rows, side="right") - begin
        pairs = np.arange(count.sum()) + np.repeat(begin - (np.cumsum(count) - count), count)
        return np.unique(self._event[pairs])

    def pairs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return launches and what they launched: int64 [n] indices of events each.

        A device's event is in several pairs if nothing tells which of the launches it was.
        """
        return self.calls[self._row], self._event

    def of_graphs(self) -> npt.NDArray[np.int64]:
        """Return the device's events that a graph launched, each once."""
        graphs = np.array([is_graph_launch(name) for name in self._names] or [False])
        return np.unique(self._event[graphs[self._name[self._row]]])


def _without_inner(trace: Trace, calls: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ``calls`` without those inside another call of the same correlation and thread."""
    if not len(calls):
        return calls
    start, end, lane = trace.start[calls], trace.end[calls], trace.lane[calls]
    order = np.lexsort((-end, start, lane, trace.correlation[calls]))
    calls, start, end = calls[order], start[order], end[order]
    same = (np.diff(trace.correlation[calls]) == 0) & (np.diff(trace.lane[calls]) == 0)
    inner = same & (end[1:] <= end[:-1]) & (start[1:] < end[:-1])
    return calls[np.concatenate(([True], ~inner))]


def _tell_apart(
    trace: Trace, calls: npt.NDArray[np.int64], events: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which of the pairs ``calls[i]``, ``events[i]`` hold.

    All have equal correlations; only those that several launches share need a closer look.
    """
    kept = np.ones(len(calls), bool)
    first = np.sort(np.unique(calls))
    shared, uses = np.unique(trace.correlation[first], return_counts=True)
    shared = shared[uses > 1]
    if not len(shared):
        return kept
    correlation = trace.correlation[events]
    rows = np.flatnonzero(np.isin(correlation, shared))
    rows = rows[np.argsort(correlation[rows], kind="stable")]
    for part in np.split(rows, np.flatnonzero(np.diff(correlation[rows])) + 1):
        launched = np.unique(calls[part])
        launched = launched[np.argsort(trace.start[launched], kind="stable")]
        ran = np.unique(events[part])
        ran = ran[np.argsort(trace.start[ran], kind="stable")]
        if len(launched) == len(ran) and _in_order(trace, launched, ran):
            owner = dict(zip(ran.tolist(), launched.tolist(), strict=True))
            kept[part] = [
                owner[event] == call
                for event, call in zip(events[part].tolist(), calls[part].tolist(), strict=True)
            ]
        else:
            kept[part] = trace.start[events[part]] >= trace.start[calls[part]] - EARLY
    return kept


def _in_order(trace: Trace, calls: npt.NDArray[np.int64], ran: npt.NDArray[np.int64]) -> bool:
    """Return whether the i-th event must be the i-th launch's; both are by start."""
    streams = set(zip(trace.device[ran].tolist(), trace.stream[ran].tolist(), strict=True))
    return len(streams) == 1 or bool((trace.start[ran[:-1]] < trace.start[calls[1:]] - EARLY).all())
