"""Every event that works, by lane and by what it belongs to.

A lane is a stream of a device. In a trace without device work it is a thread, where a stage is one
slice and only operators outside of stages are slices of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from profiling.attribution import CPU, Attribution
from profiling.classification import Work, has_device_work
from profiling.intervals import EMPTY, Intervals, intersect, subtract, total, union
from profiling.parts import Parts
from profiling.ranges import Kind

__all__ = ["Lane", "Paint", "Slices", "lanes_of"]


class Paint(IntEnum):
    """What a slice is drawn as."""

    STAGE1_FORWARD = 0
    STAGE1_BACKWARD = 1
    STAGE2_FORWARD = 2
    STAGE2_BACKWARD = 3
    COMPUTE = 4  # anything else that computes
    GATHER = 5
    REDUCE = 6
    COMMUNICATION = 7  # anything else that communicates
    COPY = 8
    MEMSET = 9
    WAIT = 10  # compute stands still for a collective


_OF_KIND = {
    Kind.STAGE1_FORWARD: Paint.STAGE1_FORWARD,
    Kind.STAGE1_BACKWARD: Paint.STAGE1_BACKWARD,
    Kind.STAGE2_FORWARD: Paint.STAGE2_FORWARD,
    Kind.STAGE2_BACKWARD: Paint.STAGE2_BACKWARD,
    Kind.PARAM_GATHER: Paint.GATHER,
    Kind.GRAD_REDUCE: Paint.REDUCE,
}
_OF_WORK = {
    Work.COMPUTE: Paint.COMPUTE,
    Work.COMMUNICATION: Paint.COMMUNICATION,
    Work.COPY: Paint.COPY,
    Work.MEMSET: Paint.MEMSET,
}
COMMUNICATING = (Paint.GATHER, Paint.REDUCE, Paint.COMMUNICATION)
NOTHING = -1


@dataclass(frozen=True, eq=False)
class Slices:
    """What a lane did, by start. All arrays are parallel.

    Attributes:
        start, end: int64 [n], nanoseconds of the trace's clock.
        paint: int8 [n], a `Paint`.
        name: int32 [n], index into the trace's names; -1 where ``owner`` says more.
        owner: int32 [n], which stage of the attribution (for a stage's paint) or which of the given
            parts (for a collective's) it is a piece of; -1 for none.
    """

    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    paint: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    owner: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start)

    def pick(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Slices:
        return Slices(*(column[which] for column in self._columns()))

    def joined(self, *others: Slices) -> Slices:
        columns = zip(*(each._columns() for each in (self, *others)), strict=True)
        whole = Slices(*(np.concatenate(parts) for parts in columns))
        return whole.pick(np.argsort(whole.start, kind="stable"))

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.start, self.end, self.paint, self.name, self.owner


@dataclass(frozen=True, eq=False)
class Lane:
    """A row of the timeline.

    Attributes:
        exposed: When it communicated and nothing computed on its device.
    """

    device: int
    title: str
    slices: Slices
    exposed: Intervals


def lanes_of(rank: Attribution, parts: Sequence[Parts]) -> list[Lane]:
    """Return the lanes of one rank: those with the stages first, communication last.

    Args:
        parts: What `cut_up` returned for this rank.
    """
    events = _events(rank, parts)
    if has_device_work(rank.trace):
        found = list(_streams(rank, events))
    else:
        found = list(_threads(rank, parts, events))
    found.sort(key=lambda lane: (lane[0], *_order(lane[2])))
    lanes = []
    waits = [(one.subject.found.device, one.wait) for one in parts if len(one.wait)]
    for device, title, slices in found:
        if device != CPU:
            slices, waits = _with_waits(device, slices, waits)
        lanes.append(Lane(device, title, slices, _exposed(rank, parts, device, slices)))
    return lanes


def _events(rank: Attribution, parts: Sequence[Parts]) -> Slices:
    """Return all events that work, in the order of the trace."""
    trace = rank.trace
    paint = np.full(len(trace), NOTHING, np.int8)
    owner = np.full(len(trace), NOTHING, np.int32)
    for work, default in _OF_WORK.items():
        paint[rank.work == work] = default
    for index, stage in enumerate(rank.stages):
        paint[stage.events], owner[stage.events] = _OF_KIND[stage.span.kind], index
    for index, one in enumerate(parts):
        events, kind = one.subject.found.events, one.subject.kind
        owner[events] = index
        if kind is not None:
            paint[events] = _OF_KIND[kind]
    return Slices(trace.start, trace.end, paint, trace.name, owner)


def _streams(rank: Attribution, events: Slices) -> Iterator[tuple[int, str, Slices]]:
    trace = rank.trace
    works = np.flatnonzero((events.paint != NOTHING) & (trace.device >= 0))
    works = works[np.argsort(events.start[works], kind="stable")]
    where = np.stack((trace.device[works], trace.stream[works]), axis=1)
    for device, stream in np.unique(where, axis=0).tolist():
        here = works[(where == (device, stream)).all(axis=1)]
        yield device, f"stream {stream}", events.pick(here)


def _threads(
    rank: Attribution, parts: Sequence[Parts], events: Slices
) -> Iterator[tuple[int, str, Slices]]:
    """Yield a lane per thread that computes, and as few as hold all that communicates."""
    trace = rank.trace
    works = np.flatnonzero(events.paint != NOTHING)
    works = works[np.lexsort((-events.end[works], events.start[works]))]
    communicates = np.isin(events.paint[works], COMMUNICATING)
    for number, slices in enumerate(_packed(events.pick(works[communicates])), start=1):
        yield CPU, "gloo" if number == 1 else f"gloo {number}", slices
    works = works[~communicates]
    stages = [stage.span.lane for stage in rank.stages]
    for lane in sorted({*trace.lane[works].tolist(), *stages}):
        ran = [
            (row, _OF_KIND[stage.span.kind], index)
            for index, stage in enumerate(rank.stages)
            if stage.span.lane == lane
            for row in stage.busy
        ]
        waited = [
            (row, Paint.WAIT, index)
            for index, one in enumerate(parts)
            if one.subject.collective is not None
            and one.subject.collective.wait is not None
            and one.subject.collective.wait.lane == lane
            for row in one.wait
        ]
        ours = _drawn(ran + waited)
        loose = _outermost(events.pick(works[trace.lane[works] == lane]))
        slices = loose.pick(~_begins_in(loose, ours)).joined(ours)
        yield CPU, _title(rank, lane, slices), slices


def _packed(slices: Slices) -> Iterator[Slices]:
    """Yield ``slices`` in lanes in which nothing overlaps: each goes to the first that is free."""
    free: list[int] = []  # lane -> when its last slice ends
    lane = np.zeros(len(slices), np.int64)
    for index, (start, end) in enumerate(zip(slices.start, slices.end, strict=True)):
        lane[index] = next((at for at, until in enumerate(free) if until <= start), len(free))
        if lane[index] == len(free):
            free.append(int(end))
        else:
            free[lane[index]] = int(end)
    for at in range(len(free)):
        yield slices.pick(lane == at)


def _drawn(pieces: Sequence[tuple[npt.NDArray[np.int64], Paint, int]]) -> Slices:
    rows = np.array([row for row, _, _ in pieces], np.int64).reshape(-1, 2)
    return Slices(
        rows[:, 0],
        rows[:, 1],
        np.array([paint for _, paint, _ in pieces], np.int8),
        np.full(len(pieces), NOTHING, np.int32),
        np.array([owner for _, _, owner in pieces], np.int32),
    )


def _outermost(slices: Slices) -> Slices:
    """Return the slices that are in no other; of equal ones the first."""
    reach = np.maximum.accumulate(np.append(0, slices.end))[:-1]
    return slices.pick(slices.end > reach)


def _begins_in(slices: Slices, others: Slices) -> npt.NDArray[np.bool_]:
    """Return which of ``slices`` begin inside any of ``others``."""
    taken = union(others.start, others.end)
    at = np.searchsorted(taken[:, 0], slices.start, side="right") - 1
    inside = np.zeros(len(slices), np.bool_)
    some = at >= 0
    inside[some] = slices.start[some] < taken[at[some], 1]
    return inside


def _title(rank: Attribution, lane: int, slices: Slices) -> str:
    """Return what people call a thread."""
    kinds = set(slices.paint.tolist())
    if {Paint.STAGE1_FORWARD, Paint.STAGE2_FORWARD} & kinds:
        return "main thread"
    if {Paint.STAGE1_BACKWARD, Paint.STAGE2_BACKWARD} & kinds:
        return "autograd thread"
    tid = rank.trace.lanes[lane].tid
    return rank.trace.thread_names.get(lane) or f"thread {tid}"


def _order(slices: Slices) -> tuple[bool, int]:
    """Sort key of a lane: where it computes by how much, then where it communicates."""
    spent = np.bincount(slices.paint, slices.end - slices.start, minlength=len(Paint))
    computes = spent[: Paint.GATHER].sum()
    communicates = spent[Paint.GATHER : Paint.COPY].sum()
    return bool(communicates > computes), -int(computes)


def _with_waits(
    device: int, slices: Slices, waits: list[tuple[int, Intervals]]
) -> tuple[Slices, list[tuple[int, Intervals]]]:
    """Draw each wait on the first stream that computes and stood still all that time."""
    if not (slices.paint < Paint.GATHER).any():
        return slices, waits
    busy = union(slices.start, slices.end)
    here = [one for one in waits if one[0] == device and not total(intersect(busy, one[1]))]
    drawn = _drawn([(row, Paint.WAIT, NOTHING) for _, wait in here for row in wait])
    return slices.joined(drawn), [one for one in waits if all(one is not done for done in here)]


def _exposed(rank: Attribution, parts: Sequence[Parts], device: int, slices: Slices) -> Intervals:
    """Return when this lane communicated and nothing computed on the device.

    Of a collective whose transfer is known only that counts, as in the figures.
    """
    sent = slices.pick(np.isin(slices.paint, COMMUNICATING))
    rest = sent.pick(sent.owner == NOTHING)
    found = [subtract(union(rest.start, rest.end), rank.compute.get(device, EMPTY))]
    own = sent.pick(np.argsort(sent.owner, kind="stable")[len(rest) :])
    for group in np.split(np.arange(len(own)), np.flatnonzero(np.diff(own.owner)) + 1):
        if len(group):
            mine = own.pick(group)
            exposed = parts[int(mine.owner[0])].exposed
            found.append(intersect(union(mine.start, mine.end), exposed))
    rows = np.concatenate(found)
    return union(rows[:, 0], rows[:, 1])
