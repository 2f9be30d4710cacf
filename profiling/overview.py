"""What is in a trace, whoever recorded it: what each device did, and how much of it overlapped.

The overlap is the union of a device's communication kernels, intersected with the union of all its
other kernels. All devices together are their sums, for work on one hides nothing on another. Copies
and memsets are their own classes; the figure that counts memsets as work is given beside it. Every
kernel counts, whatever launched it, in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiling.classification import Work, classify
from profiling.intervals import Intervals, intersect, total, union
from profiling.trace import Category, Trace

__all__ = ["DeviceOverview", "overview"]


@dataclass(frozen=True)
class DeviceOverview:
    """What a device did. Times in nanoseconds.

    Attributes:
        device: Its number; None for all devices together, whose times are sums.
        streams: How many streams had work.
        counts: `Work` -> number of events.
        times: `Work` -> sum of their durations; events that ran side by side count each.
        communication: How long it communicated: the union of the communication kernels.
        overlapped: How much of that other kernels ran in.
        overlapped_with_memset: The same where memsets count as other kernels.
    """

    device: int | None
    streams: int
    counts: dict[Work, int]
    times: dict[Work, int]
    communication: int
    overlapped: int
    overlapped_with_memset: int

    @property
    def overlap(self) -> float | None:
        """Share of the communication that other kernels ran in; None without communication."""
        return self.overlapped / self.communication if self.communication else None

    @property
    def overlap_with_memset(self) -> float | None:
        return self.overlapped_with_memset / self.communication if self.communication else None


def overview(trace: Trace, work: npt.NDArray[np.int8] | None = None) -> tuple[DeviceOverview, ...]:
    """Return what each device did, then all of them together; nothing without a device.

    Args:
        work: int8 [n], the `Work` of each event where it is known already.
    """
    work = classify(trace) if work is None else work
    events = np.flatnonzero(trace.category >= Category.KERNEL)
    devices = trace.device[events]
    each = [_of(trace, work, int(one), events[devices == one]) for one in np.unique(devices)]
    return (*each, _together(each)) if each else ()


def _of(
    trace: Trace, work: npt.NDArray[np.int8], device: int, events: npt.NDArray[np.int64]
) -> DeviceOverview:
    by_work = {kind: found for kind in Work if len(found := events[work[events] == kind])}
    nothing = np.zeros(0, np.int64)
    communication = _when(trace, by_work.get(Work.COMMUNICATION, nothing))
    compute = by_work.get(Work.COMPUTE, nothing)
    with_memset = np.concatenate((compute, by_work.get(Work.MEMSET, nothing)))
    return DeviceOverview(
        device=device,
        streams=len(np.unique(trace.stream[events])),
        counts={kind: len(found) for kind, found in by_work.items()},
        times={
            kind: int((trace.end[found] - trace.start[found]).sum())
            for kind, found in by_work.items()
        },
        communication=total(communication),
        overlapped=total(intersect(communication, _when(trace, compute))),
        overlapped_with_memset=total(intersect(communication, _when(trace, with_memset))),
    )


def _together(each: Sequence[DeviceOverview]) -> DeviceOverview:
    counts: Counter[Work] = Counter()
    times: Counter[Work] = Counter()
    for one in each:
        counts.update(one.counts)
        times.update(one.times)
    return DeviceOverview(
        device=None,
        streams=sum(one.streams for one in each),
        counts=dict(counts),
        times=dict(times),
        communication=sum(one.communication for one in each),
        overlapped=sum(one.overlapped for one in each),
        overlapped_with_memset=sum(one.overlapped_with_memset for one in each),
    )


def _when(trace: Trace, events: npt.NDArray[np.int64]) -> Intervals:
    return union(trace.start[events], trace.end[events])
