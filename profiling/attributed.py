"""What `attribution` finds out, as data: stages, collectives, and when a rank computed.

Times are integer nanoseconds of the trace's clock, busy times are `intervals.Intervals`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from profiling.intervals import EMPTY, Intervals, union
from profiling.ranges import Kind
from profiling.spans import Span
from profiling.trace import Trace

__all__ = ["CPU", "NO_EVENTS", "Attribution", "Collective", "Found", "Source", "Stage"]

CPU = -1  # the "device" of a trace without one
NO_EVENTS: npt.NDArray[np.int64] = np.zeros(0, np.int64)
NO_EVENTS.setflags(write=False)


class Source(str, Enum):
    """How a collective's parameter is known; the value is what reports print."""

    RANGE = "range"  # the name in our range around its issue
    METADATA = "c10d metadata"  # operation, size and group, and the order of calls
    ASSUMED = "assumed"  # the same, and sizes that the user gave


@dataclass(frozen=True, eq=False)
class Stage:
    """One run of a stage, and when its work was being done.

    Attributes:
        events: int64 indices of its compute kernels in the trace; empty on a CPU.
        microbatch: How many runs of this stage of this layer its iteration had before; None for
            a forward that backward runs again.
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
        microbatch: Which run of the stage that uses the weight it serves, counted within the
            iteration; None where that is not known.
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
        iterations: By start; our ranges, else the profiler's steps.
        compute: Device -> when anything computed there.
        communication: For each iteration, device -> when it communicated there: on a device what it
            launched, for that runs later, on a CPU what ran meanwhile. None where nothing ran.
        work: int8 [n], the `Work` of each event of the trace, unnamed collectives included.
        unattributed: int64 indices of the device's events that no launch in the trace belongs to.
        unclaimed: Device -> when kernels computed of which no launch says to which stage they
            belong: those without one, and those of a graph that no stage's range launched.
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
    unclaimed: dict[int, Intervals]
    notes: tuple[str, ...] = ()

    @cached_property
    def stage_busy(self) -> dict[tuple[Kind, str], Intervals]:
        """(stage, experts) -> when any run of it was busy."""
        parts: defaultdict[tuple[Kind, str], list[Intervals]] = defaultdict(list)
        for stage in self.stages:
            parts[stage.span.kind, stage.span.name].append(stage.busy)
        joined = {key: np.concatenate(busy) for key, busy in parts.items()}
        return {key: union(rows[:, 0], rows[:, 1]) for key, rows in joined.items()}
