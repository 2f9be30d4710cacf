"""What is in a trace, whoever recorded it: what each device did, and how much of it overlapped.

The overlap is the union of the communication kernels, intersected with the union of all other
kernels of the same devices. Copies and memsets are their own classes; the figure that counts
memsets as work is given beside it. Every kernel counts, whatever launched it, in every step.
"""

from __future__ import annotations

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
        device: Its number; None for all devices together.
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
    if not len(events):
        return ()
    devices = trace.device[events]
    each = [_of(trace, work, int(one), events[devices == one]) for one in np.unique(devices)]
    return (*each, _of(trace, work, None, events))


def _of(
    trace: Trace, work: npt.NDArray[np.int8], device: int | None, events: npt.NDArray[np.int64]
) -> DeviceOverview:
    by_work = {kind: events[work[events] == kind] for kind in Work}
    communication = _when(trace, by_work[Work.COMMUNICATION])
    compute = by_work[Work.COMPUTE]
    with_memset = np.concatenate((compute, by_work[Work.MEMSET]))
    return DeviceOverview(
        device=device,
        streams=len(np.unique(_stream(trace, events))),
        counts={kind: len(found) for kind, found in by_work.items() if len(found)},
        times={
            kind: int((trace.end[found] - trace.start[found]).sum())
            for kind, found in by_work.items()
            if len(found)
        },
        communication=total(communication),
        overlapped=total(intersect(communication, _when(trace, compute))),
        overlapped_with_memset=total(intersect(communication, _when(trace, with_memset))),
    )


def _when(trace: Trace, events: npt.NDArray[np.int64]) -> Intervals:
    return union(trace.start[events], trace.end[events])


def _stream(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return one number for each device and stream, int64 [n]."""
    return (trace.device[events].astype(np.int64) << 32) + trace.stream[events]
