"""What belongs to what: a collective's busy time to its parameter, a stage's work to its layer.

A collective is known by the range around its issue. What it then kept busy is, on a device, the
communication kernels launched inside that range (by correlation); on a CPU, the gloo range that
`gloo.match` finds. A stage's busy time is, on a device, the compute kernels launched inside its
range; on a CPU, where a range lasts as long as what is in it, the range itself without the waits
for collectives inside it.

On a device a collective need not have a name that `classification` knows (an own copy kernel, say):
a kernel that is launched at an issue, on a stream on which no stage runs, communicates, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from profiling import gloo
from profiling.assume import Assumptions
from profiling.classification import Work, c10d_calls, classify, gloo_ranges, has_device_work
from profiling.intervals import EMPTY, Intervals, intersect, subtract, union, window
from profiling.launches import Launches
from profiling.ranges import Kind, is_dense
from profiling.spans import STAGES, WAIT_OF, Span, find_spans, iteration_at, waits_for
from profiling.trace import Trace

__all__ = ["CPU", "Attribution", "Collective", "Found", "Source", "Stage", "attribute"]

CPU = -1  # the "device" of a trace without one


class Source(str, Enum):
    """How a collective's parameter is known; the value is what reports print."""

    RANGE = "range"  # the name in our range around its issue
    METADATA = "c10d metadata"  # operation, size and group, and the order of calls
    ASSUMED = "assumed"  # the same, and sizes that the user gave


NO_EVENTS: npt.NDArray[np.int64] = np.zeros(0, np.int64)
NO_EVENTS.setflags(write=False)


@dataclass(frozen=True, eq=False)
class Stage:
    """One run of a stage, and when its work was being done.

    Attributes:
        events: int64 indices of its compute kernels in the trace; empty on a CPU.
        microbatch: How many runs of this stage of this layer its iteration had before; None where
            that is not known.
    """

    span: Span
    iteration: int | None
    busy: Intervals
    events: npt.NDArray[np.int64] = field(default_factory=lambda: NO_EVENTS)
    microbatch: int | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """What the trace says about one collective.

    Attributes:
        busy: When it communicated. Empty where nothing was found.
        device: Where; `CPU` without a device.
        group: Ranks that took part, or None where the trace does not say.
        group_size: How many; None likewise.
        resumed: When the issuing thread went on to something else; None on a device, where nothing
            can start before its launch has ended.
        ready: When the gloo thread that ran it was free to: the call had been made, the thread's
            earlier work was done. None on a device.
        doubt: Why ``busy`` is not known; empty where it is, or where the recording ended first.
        events: int64 indices of the events of the trace that ``busy`` is the union of.
        comms_id: What the ranks of a group call this collective, where the trace says so.
    """

    busy: Intervals = field(default_factory=lambda: EMPTY)
    device: int = CPU
    group: tuple[int, ...] | None = None
    group_size: int | None = None
    resumed: int | None = None
    ready: int | None = None
    doubt: str = ""
    events: npt.NDArray[np.int64] = field(default_factory=lambda: NO_EVENTS)
    comms_id: str | None = None


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective of the engine on one rank.

    Attributes:
        issue: The range around its issue.
        iteration: Number of the iteration range that the issue is in, or None.
        ordinal: How many of this kind and name the iteration had before.
        wait: The range in which its user waited for it, or None.
        source: How its parameter is known.
        microbatch: The run of its layer, within the iteration, that it serves; None if not known.
    """

    issue: Span
    iteration: int | None
    ordinal: int
    wait: Span | None
    found: Found
    source: Source = Source.RANGE
    microbatch: int | None = None

    @property
    def inferred(self) -> bool:
        """Whether the name is a conclusion; else it is the one that the run itself gave."""
        return self.source is not Source.RANGE


@dataclass(frozen=True, eq=False)
class Attribution:
    """One rank's trace, understood.

    Attributes:
        compute: Device -> when anything computed there.
        communication: For each iteration, device -> when it communicated there: on a device what it
            launched, for that runs later, on a CPU what ran meanwhile. None where nothing ran.
        work: int8 [n], the `Work` of each event of the trace, unnamed collectives included.
        unattributed: int64 indices of the device's events that no launch in the trace belongs to.
        notes: What a reader of any figure should know, one sentence each.
    """

    trace: Trace
    stages: tuple[Stage, ...]
    collectives: tuple[Collective, ...]
    iterations: tuple[Span, ...]
    compute: dict[int, Intervals]
    communication: tuple[dict[int, Intervals] | None, ...]
    work: npt.NDArray[np.int8]
    unattributed: npt.NDArray[np.int64]
    notes: tuple[str, ...] = ()

    @cached_property
    def stage_busy(self) -> dict[tuple[Kind, str], Intervals]:
        """(stage, experts) -> when any run of it was busy."""
        parts: defaultdict[tuple[Kind, str], list[Intervals]] = defaultdict(list)
        for stage in self.stages:
            parts[stage.span.kind, stage.span.name].append(stage.busy)
        joined = {key: np.concatenate(busy) for key, busy in parts.items()}
        return {key: union(rows[:, 0], rows[:, 1]) for key, rows in joined.items()}


def attribute(trace: Trace, assumptions: Assumptions | None = None) -> Attribution:
    """Return what of ``trace`` is known to belong to what.

    Args:
        assumptions: What the user says about a trace without our ranges.
    """
    work = classify(trace)
    spans = tuple(find_spans(trace))
    iterations = tuple(span for span in spans if span.kind is Kind.ITERATION)
    issues = [span for span in spans if span.kind in WAIT_OF]
    waits = waits_for(issues, spans)
    runs = [span for span in spans if span.kind in STAGES]
    if has_device_work(trace):
        launches = Launches(trace)
        issued = [_launched(launches, issue) for issue in issues]
        ran = [_launched(launches, run) for run in runs]
        _mark_unnamed(trace, work, issued, ran)
        found = [_moved(trace, work, launched) for launched in issued]
        own = [launched[work[launched] == Work.COMPUTE] for launched in ran]
        busy = [union(trace.start[events], trace.end[events]) for events in own]
        unattributed = launches.missing(trace)
        during = [_sent(trace, work, launches, span) for span in iterations]
    else:
        found = _ran(trace, issues, waits, _resumed(trace, work, issues, spans))
        busy = [_worked(run, spans) for run in runs]
        own = [NO_EVENTS] * len(runs)
        unattributed = NO_EVENTS
        during = [_meanwhile(trace, work, span) for span in iterations]
    return Attribution(
        trace,
        tuple(
            Stage(run, iteration_at(iterations, run.start), when, events)
            for run, when, events in zip(runs, busy, own, strict=True)
        ),
        tuple(_collectives(iterations, issues, waits, found)),
        iterations,
        _by_device(trace, np.flatnonzero(work == Work.COMPUTE)),
        tuple(during),
        work,
        unattributed,
    )


def _by_device(trace: Trace, events: npt.NDArray[np.int64]) -> dict[int, Intervals]:
    devices = trace.device[events]
    return {
        int(device): union(trace.start[here], trace.end[here])
        for device in np.unique(devices)
        for here in [events[devices == device]]
    }


def _collectives(
    iterations: tuple[Span, ...],
    issues: list[Span],
    waits: list[Span | None],
    found: list[Found],
) -> Iterator[Collective]:
    ordinals: defaultdict[tuple[Kind, str, int | None], int] = defaultdict(int)
    for issue, wait, what in zip(issues, waits, found, strict=True):
        iteration = iteration_at(iterations, issue.start)
        key = issue.kind, issue.name, iteration
        yield Collective(issue, iteration, ordinals[key], wait, what)
        ordinals[key] += 1


# On a device


def _launched(launches: Launches, span: Span) -> npt.NDArray[np.int64]:
    return launches.inside(span.lane, span.start, span.end)


def _mark_unnamed(
    trace: Trace,
    work: npt.NDArray[np.int8],
    issued: list[npt.NDArray[np.int64]],
    ran: list[npt.NDArray[np.int64]],
) -> None:
    """Change ``work`` of kernels that are a collective, though their names do not say so.

    What an issue launches on a stage's stream packs or casts for the collective, and an issue
    that launched a known kernel has its collective; both stay as they are.
    """
    if not ran:
        return
    stages = np.unique(np.concatenate([_stream(trace, events) for events in ran]), axis=0)
    for events in issued:
        if (work[events] == Work.COMMUNICATION).any():
            continue
        kernels = events[work[events] == Work.COMPUTE]
        beside = (_stream(trace, kernels)[:, None] != stages).any(2).all(1)
        work[kernels[beside]] = Work.COMMUNICATION


def _stream(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the device and stream of each event, int32 [n, 2]."""
    return np.stack((trace.device[events], trace.stream[events]), axis=1)


def _moved(trace: Trace, work: npt.NDArray[np.int8], launched: npt.NDArray[np.int64]) -> Found:
    """Return what a collective kept busy, from what its issue launched."""
    events = launched[work[launched] == Work.COMMUNICATION]
    if not len(events):
        events = launched[work[launched] == Work.COPY]  # the copy engines can gather, too
    if not len(events):
        return Found()
    details = [trace.details[event] for event in events.tolist() if event in trace.details]
    groups = {detail.group_ranks for detail in details}
    sizes = {detail.group_size for detail in details}
    ids = {detail.comms_id for detail in details}
    return Found(
        union(trace.start[events], trace.end[events]),
        int(trace.device[events[0]]),
        groups.pop() if len(groups) == 1 else None,
        sizes.pop() if len(sizes) == 1 else None,
        events=events,
        comms_id=ids.pop() if len(ids) == 1 else None,
    )


def _sent(
    trace: Trace, work: npt.NDArray[np.int8], launches: Launches, span: Span
) -> dict[int, Intervals] | None:
    """Return when the communication that was launched in ``span`` ran, or None without a launch."""
    events = launches.anywhere(span.start, span.end)
    return _by_device(trace, events[work[events] == Work.COMMUNICATION]) if len(events) else None


# On a CPU


def _meanwhile(trace: Trace, work: npt.NDArray[np.int8], span: Span) -> dict[int, Intervals] | None:
    """Return when ``span`` saw communication, or None where nothing worked in it."""
    events = np.flatnonzero(
        (work > Work.NONE) & (trace.start < span.end) & (trace.end > span.start)
    )
    if not len(events):
        return None
    whole = _by_device(trace, events[work[events] == Work.COMMUNICATION])
    during = window(span.start, span.end)
    return {device: intersect(when, during) for device, when in whole.items()}


def _worked(run: Span, spans: tuple[Span, ...]) -> Intervals:
    """Return when a stage's thread was at it: the range without waits for our collectives."""
    waits = [span for span in spans if span.kind in WAIT_OF.values() and span.lane == run.lane]
    waited = union(
        np.array([wait.start for wait in waits], np.int64),
        np.array([wait.end for wait in waits], np.int64),
    )
    return subtract(window(run.start, run.end), waited)


def _resumed(
    trace: Trace, work: npt.NDArray[np.int8], issues: list[Span], spans: tuple[Span, ...]
) -> list[int]:
    """Return for each issue when its thread next computed or entered a range of ours."""
    computes = np.flatnonzero(work == Work.COMPUTE)
    starts: dict[int, npt.NDArray[np.int64]] = {}
    for lane in {issue.lane for issue in issues}:
        entered = [span.start for span in spans if span.lane == lane]
        computed = trace.start[computes[trace.lane[computes] == lane]]
        starts[lane] = np.sort(np.append(computed, np.array(entered, np.int64)))
    resumed = []
    for issue in issues:
        later = starts[issue.lane]
        index = int(np.searchsorted(later, issue.end))
        resumed.append(int(later[index]) if index < len(later) else issue.end)
    return resumed


def _ran(
    trace: Trace, issues: list[Span], waits: list[Span | None], resumed: list[int]
) -> list[Found]:
    """Return for each issue the gloo range that carried it out."""
    calls: list[gloo.Call] = []
    owners: list[int | None] = []
    for event in c10d_calls(trace).tolist():
        operations = gloo.OPERATIONS.get(trace.names[trace.name[event]])
        if operations is None:
            continue
        start = int(trace.start[event])
        owner = _owner(issues, int(trace.lane[event]), start)
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
        busy = np.array([[run.start, run.end]], np.int64)
        found[owner] = Found(
            busy,
            group_size=_group_size(call.sizes),
            resumed=resumed[owner],
            ready=max(call.start, free[result.run]),
            events=ranges[result.run : result.run + 1],
        )
    return found


def _owner(issues: list[Span], lane: int, at: int) -> int | None:
    """Return which issue's range the thread was in."""
    for index, issue in enumerate(issues):
        if issue.lane == lane and issue.start <= at < issue.end:
            return index
    return None


def _group_size(sizes: frozenset[int]) -> int | None:
    """Return over how many ranks a gather or reduce-scatter of these tensors goes."""
    if len(sizes) != 2 or not min(sizes):
        return None
    return max(sizes) // min(sizes)


def _sizes(trace: Trace, event: int) -> frozenset[int]:
    details = trace.details.get(event)
    return details.sizes if details is not None else frozenset()
