"""What one rank's trace is in memory: columns, one entry per event that matters here.

A trace of a training step has millions of events, so there is no object per event. Times are
integer nanoseconds of the trace's own clock. An event's *lane* is a CPU thread (pid and tid); what
ran on a device has a device and a stream beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Category", "Details", "Group", "Lane", "Profile", "Trace"]


class Category(IntEnum):
    """What recorded an event. Spans that a device's annotations cover are not kept: they say when
    a range's first and last kernel ran, not that anything ran in between."""

    CPU_OP = 0
    ANNOTATION = 1  # a range on a CPU thread
    LAUNCH = 2  # a call of the CUDA or HIP runtime or driver
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5


class Lane(NamedTuple):
    """A CPU thread, or a stream's row in the viewer."""

    pid: int | str
    tid: int | str


class Group(NamedTuple):
    """A process group that the trace's rank is in."""

    name: str
    description: str  # "" where its maker gave none
    ranks: tuple[int, ...]


class Details(NamedTuple):
    """What a collective's event says about itself; None where it does not."""

    collective: str | None = None  # c10d's word for it: "_allgather_base", "allreduce", ...
    group: str | None = None  # name of the process group
    group_ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    sizes: frozenset[int] = frozenset()  # numbers of elements of its tensors
    dtype: str | None = None  # c10d's word for it: "BFloat16", "Float", ...
    in_elements: int | None = None
    out_elements: int | None = None
    sequence: int | None = None  # the group counts its collectives; newer torch only
    comms_id: str | None = None  # the same on every rank of the collective, and for no other


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank's events.

    Attributes:
        path: The file it came from.
        rank, world_size: None where neither the file nor its name says.
        groups: The process groups that this rank is in.
        start, end: int64 [n], nanoseconds; half-open.
        name: int32 [n], index into ``names``.
        category: int8 [n], a `Category`.
        lane: int32 [n], index into ``lanes``.
        device, stream: int32 [n], -1 for what did not run on a device.
        correlation: int64 [n], shared by a launch and what it launched; -1 for none.
        thread_names: Lane index -> name of the thread.
        details: Event index -> what it says about its collective.
        metadata: The trace's other top-level entries.
        notes: What was dropped or repaired on loading, one sentence each.
        complete: Whether the file was read to its end; if not, ``notes`` say so.
    """

    path: str
    rank: int | None
    world_size: int | None
    groups: tuple[Group, ...]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    name: npt.NDArray[np.int32]
    category: npt.NDArray[np.int8]
    lane: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    correlation: npt.NDArray[np.int64]
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    thread_names: dict[int, str]
    details: dict[int, Details]
    metadata: dict[str, Any]
    notes: tuple[str, ...]
    complete: bool = True

    def __len__(self) -> int:
        return len(self.start)

    @property
    def label(self) -> str:
        """How reports call it."""
        return f"rank {self.rank}" if self.rank is not None else self.path

    def of(self, *categories: Category) -> npt.NDArray[np.int64]:
        """Return the indices of the events of any of ``categories``, by start."""
        found = np.flatnonzero(np.isin(self.category, categories))
        return found[np.argsort(self.start[found], kind="stable")]


@dataclass(frozen=True)
class Profile:
    """The traces of one run, by rank."""

    path: str
    traces: tuple[Trace, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What loading dropped or repaired, with the rank and the file that it concerns."""
        return tuple(
            f"{trace.label}{place}: {note}"
            for trace in self.traces
            for place in (f" ({Path(trace.path).name})" if trace.rank is not None else "",)
            for note in trace.notes
        )
