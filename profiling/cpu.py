"""A collective's busy time and a stage's, on a CPU: gloo's ranges, and the stage's own range."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from profiling import gloo
from profiling.attributed import CPU, Found
from profiling.classification import Work, c10d_calls, gloo_ranges
from profiling.intervals import Intervals, intersect, subtract, union, window
from profiling.ranges import is_dense
from profiling.spans import WAIT_OF, Span
from profiling.trace import Trace

__all__ = ["meanwhile", "ran", "resumed", "worked"]


def meanwhile(
    trace: Trace, work: npt.NDArray[np.int8], iterations: Sequence[Span]
) -> list[dict[int, Intervals] | None]:
    """Return for each iteration when it saw communication, or None where nothing worked in it."""
    busy = {
        kind: union(trace.start[events], trace.end[events])
        for kind in (Work.COMPUTE, Work.COMMUNICATION)
        for events in [np.flatnonzero(work == kind)]
    }
    found: list[dict[int, Intervals] | None] = []
    for span in iterations:
        during = window(span.start, span.end)
        communication = intersect(busy[Work.COMMUNICATION], during)
        if len(communication):
            found.append({CPU: communication})
        else:
            found.append({} if len(intersect(busy[Work.COMPUTE], during)) else None)
    return found


def worked(runs: Sequence[Span], spans: Sequence[Span]) -> list[Intervals]:
    """Return when each stage's thread was at it: the range without waits for our collectives."""
    waits: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in WAIT_OF.values():
            waits[span.lane].append(span)
    waited = {
        lane: union(
            np.array([span.start for span in found], np.int64),
            np.array([span.end for span in found], np.int64),
        )
        for lane, found in waits.items()
    }
    return [
        subtract(window(run.start, run.end), waited[run.lane])
        if run.lane in waited
        else window(run.start, run.end)
        for run in runs
    ]


def resumed(
    trace: Trace, work: npt.NDArray[np.int8], issues: Sequence[Span], spans: Sequence[Span]
) -> list[int]:
    """Return for each issue when its thread next computed or entered a range of ours."""
    computes = np.flatnonzero(work == Work.COMPUTE)
    starts: dict[int, npt.NDArray[np.int64]] = {}
    for lane in {issue.lane for issue in issues}:
        entered = [span.start for span in spans if span.lane == lane]
        computed = trace.start[computes[trace.lane[computes] == lane]]
        starts[lane] = np.sort(np.append(computed, np.array(entered, np.int64)))
    found = []
    for issue in issues:
        later = starts[issue.lane]
        index = int(np.searchsorted(later, issue.end))
        found.append(int(later[index]) if index < len(later) else issue.end)
    return found


def ran(
    trace: Trace,
    issues: Sequence[Span],
    waits: Sequence[Span | None],
    resumed: Sequence[int],
) -> list[Found]:
    """Return for each issue the gloo range that carried it out."""
    calls: list[gloo.Call] = []
    owners: list[int | None] = []
    owner_of = _Owners(issues)
    for event in c10d_calls(trace).tolist():
        operations = gloo.OPERATIONS.get(trace.names[trace.name[event]])
        if operations is None:
            continue
        start = int(trace.start[event])
        owner = owner_of(int(trace.lane[event]), start)
        wait = None if owner is None else waits[owner]
        deadline = None if wait is None else wait.end
        group = "" if owner is None else f"dense {is_dense(issues[owner].name)}"
        calls.append(gloo.Call(start, deadline, operations, _sizes(trace, event), group))
        owners.append(owner)
    runs: list[gloo.Run] = []
    free: list[int] = []  # per run, when its thread was done with the run before
    ends: dict[int, int] = {}
    ranges = gloo_ranges(trace)
    for event in ranges.tolist():
        start, end, lane = int(trace.start[event]), int(trace.end[event]), int(trace.lane[event])
        runs.append(gloo.Run(start, end, trace.names[trace.name[event]], _sizes(trace, event)))
        free.append(ends.get(lane, 0))
        ends[lane] = end
    found = [Found()] * len(issues)
    for owner, call, result in zip(owners, calls, gloo.match(calls, runs), strict=True):
        if owner is None:
            continue
        if result.run is None:
            found[owner] = Found(doubt=result.doubt)
            continue
        run = runs[result.run]
        found[owner] = Found(
            window(run.start, run.end),
            group_size=_group_size(call.sizes),
            resumed=resumed[owner],
            ready=max(call.start, free[result.run]),
            events=ranges[result.run : result.run + 1],
        )
    return found


class _Owners:
    """Tells which issue's range a thread was in."""

    def __init__(self, issues: Sequence[Span]) -> None:
        self._by_lane: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for index, issue in enumerate(issues):  # by start
            self._by_lane[issue.lane].append((issue.start, issue.end, index))

    def __call__(self, lane: int, at: int) -> int | None:
        issues = self._by_lane.get(lane, [])
        place = bisect_right(issues, at, key=lambda issue: issue[0]) - 1
        return issues[place][2] if place >= 0 and at < issues[place][1] else None


def _group_size(sizes: frozenset[int]) -> int | None:
    """Return over how many ranks a gather or reduce-scatter of these tensors goes."""
    if len(sizes) != 2 or not min(sizes):
        return None
    return max(sizes) // min(sizes)


def _sizes(trace: Trace, event: int) -> frozenset[int]:
    details = trace.details.get(event)
    return details.sizes if details is not None else frozenset()
