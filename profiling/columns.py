"""From decoded events to columns: one array per field.

While events come in, a column is an `array.array`: it grows in place, where a list of parts would
leave its memory in holes between the parts of the other columns.
"""

from __future__ import annotations

import json
import math
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from profiling.decoding import Dropped, Event
from profiling.trace import Category, Details, Lane

__all__ = ["COLLECTIVE", "Columns", "Half", "Table"]

CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "cuda_runtime": Category.LAUNCH,
    "cuda_driver": Category.LAUNCH,
    "hip_runtime": Category.LAUNCH,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    # as torch before 1.12 wrote them
    "Operator": Category.CPU_OP,
    "Runtime": Category.LAUNCH,
    "Kernel": Category.KERNEL,
    "Memcpy": Category.MEMCPY,
    "Memset": Category.MEMSET,
}
OTHER = -1  # the category of an event that is read only because it closes another
LONGEST = 86_400e6  # us; an event that lasts longer than a day did not happen
LATEST = 4e15  # us; the year 2096, and far from where int64 nanoseconds end
COLLECTIVE = ("gloo:", "c10d::", "nccl:")


class Half(IntEnum):
    """Whether an event is whole, or the beginning or end of one."""

    WHOLE = 0  # ph X
    BEGIN = 1  # ph B
    END = 2  # ph E


_HALF = {"X": Half.WHOLE, "B": Half.BEGIN, "E": Half.END}
_CODES = {np.int64: "q", np.int32: "i", np.int8: "b"}
_DTYPES: dict[str, type[np.signedinteger[Any]]] = {
    "start": np.int64,
    "end": np.int64,
    "name": np.int32,
    "category": np.int8,
    "lane": np.int32,
    "device": np.int32,
    "stream": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "rank": np.int32,
    "half": np.int8,
}


@dataclass
class Table:
    """The events of a file, as it has them.

    Attributes:
        columns: Name -> array [n]: those of a `Trace` and besides ``external`` (its External id)
            and ``rank``, as the event names them (-1: it does not), and ``half``, a `Half`.
        names, lanes: What the columns ``name`` and ``lane`` index.
        thread_names: Lane index -> name of the thread.
        process_names: pid -> what metadata events call the process.
        details: Event index -> what it says about its collective.
        dropped: What was left out.
    """

    columns: dict[str, npt.NDArray[Any]]
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    thread_names: dict[int, str]
    process_names: dict[int | str, str]
    details: dict[int, Details]
    dropped: Dropped

    def __len__(self) -> int:
        return len(self.columns["start"])

    def part(self, chosen: npt.NDArray[np.bool_]) -> Table:
        """Return a table of the ``chosen`` events, bool [n]."""
        moved = np.cumsum(chosen) - 1
        return replace(
            self,
            columns={name: column[chosen] for name, column in self.columns.items()},
            details={
                int(moved[event]): detail for event, detail in self.details.items() if chosen[event]
            },
        )


class Columns:
    """Collects events. ``take`` is what `decoding.scan` calls."""

    def __init__(self) -> None:
        self._dropped = Dropped()
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[int | str, int | str], int] = {}
        self._thread_names: dict[tuple[int | str, int | str], str] = {}
        self._process_names: dict[int | str, str] = {}
        self._details: dict[int, Details] = {}
        self._columns = {name: array(_CODES[dtype]) for name, dtype in _DTYPES.items()}

    def take(self, events: list[Event]) -> None:
        """Add the events that a category of ours has, and what names threads and processes."""
        kept: list[Event] = []
        for event in events:
            ph = event.ph
            if ph == "X":
                if event.cat in CATEGORIES:
                    kept.append(event)
            elif ph == "B" or ph == "E":
                event.dur = 0.0  # not known yet
                kept.append(event)
            elif ph == "M":
                self._metadata(event)
            elif event.cat in CATEGORIES:
                self._dropped.add(f"of a phase ({ph}) that says no duration", event.name)
        ts = np.array([event.ts for event in kept], np.float64)
        dur = np.array([event.dur for event in kept], np.float64)
        sound = self._sound(kept, ts, dur)
        if not sound.all():
            kept = [event for event, good in zip(kept, sound, strict=True) if good]
            ts, dur = ts[sound], dur[sound]
        for index, event in enumerate(kept, len(self._columns["start"])):
            args = event.args
            if args.collective or (args.dims and event.name.startswith(COLLECTIVE)):
                self._details[index] = _details(event)
        whole = np.floor(ts)  # apart, for microseconds since 1970 have no ns digits in a float
        start = whole.astype(np.int64) * 1000 + np.rint((ts - whole) * 1000).astype(np.int64)
        names, lanes = self._names, self._lanes
        part = {
            "start": start,
            "end": start + np.rint(dur * 1000).astype(np.int64),
            "name": [names.setdefault(event.name, len(names)) for event in kept],
            "category": [CATEGORIES.get(event.cat, OTHER) for event in kept],
            "lane": [lanes.setdefault((event.pid, event.tid), len(lanes)) for event in kept],
            "device": [max(event.args.device, event.args.in_device) for event in kept],
            "stream": [event.args.stream for event in kept],
            "correlation": [event.args.correlation or -1 for event in kept],  # 0 is no call's
            "external": [event.args.external for event in kept],
            "rank": [event.args.rank for event in kept],
            "half": [_HALF[event.ph] for event in kept],
        }
        for name, values in part.items():
            self._columns[name].frombytes(np.asarray(values, _DTYPES[name]).data.cast("B"))

    def _metadata(self, event: Event) -> None:
        if event.name == "thread_name":
            self._thread_names[event.pid, event.tid] = event.args.name
        elif event.name in ("process_name", "process_labels"):
            before = self._process_names.get(event.pid, "")
            said = event.args.name or event.args.labels
            self._process_names[event.pid] = f"{before} {said}".strip()

    def _sound(
        self, events: list[Event], ts: npt.NDArray[Any], dur: npt.NDArray[Any]
    ) -> npt.NDArray[np.bool_]:
        """Return which events have a time that can be, and count the others."""
        missing = ~((dur >= 0) & (ts >= 0))  # NaN is neither
        absurd = ~missing & ((dur > LONGEST) | (ts > LATEST))
        for bad, reason in (
            (missing, "without a start and a duration of at least 0"),
            (absurd, "longer than a day, or in another century"),
        ):
            if bad.any():
                self._dropped.add(reason, events[int(bad.argmax())].name, int(bad.sum()))
        return ~(missing | absurd)

    def table(self) -> Table:
        """Return what was taken."""
        return Table(
            columns={
                name: np.frombuffer(column, _DTYPES[name]) for name, column in self._columns.items()
            },
            names=tuple(self._names),
            lanes=tuple(Lane(*lane) for lane in self._lanes),
            thread_names={
                index: self._thread_names[lane]
                for lane, index in self._lanes.items()
                if lane in self._thread_names
            },
            process_names=self._process_names,
            details=self._details,
            dropped=self._dropped,
        )


def _details(event: Event) -> Details:
    args = event.args
    sizes = {size for size in (args.in_elements, args.out_elements) if size >= 0}
    if args.dims:
        with suppress(msgspec.MsgspecError, RecursionError):  # nested beyond any real shape
            sizes |= set(_sizes(msgspec.json.decode(args.dims)))
    return Details(
        collective=args.collective or None,
        group=args.group or None,
        group_ranks=_ranks(args.group_ranks),
        group_size=_known(args.group_size),
        sizes=frozenset(sizes),
        dtype=args.dtype or None,
        in_elements=_known(args.in_elements),
        out_elements=_known(args.out_elements),
        sequence=_known(args.sequence),
        comms_id=str(args.comms_id) or None,
    )


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def _ranks(text: str) -> tuple[int, ...] | None:
    """Return the ranks of a group; torch writes a long list with dots in the middle: None."""
    try:
        ranks = json.loads(text)
    except (ValueError, RecursionError):
        return None
    listed = isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks)
    return tuple(ranks) if listed else None


def _sizes(dims: Any) -> list[int]:
    """Return how many elements each tensor of "Input Dims" has: the innermost lists are shapes."""
    if not isinstance(dims, list) or not dims:
        return []
    if all(isinstance(extent, int) for extent in dims):
        return [math.prod(dims)]
    return [size for inner in dims for size in _sizes(inner)]
