"""From decoded events to the columns of a `Trace`."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from profiling.decoding import Event, Scan
from profiling.trace import Category, Details, Group, Lane, Trace

__all__ = ["Columns"]

CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "cuda_runtime": Category.LAUNCH,
    "cuda_driver": Category.LAUNCH,
    "hip_runtime": Category.LAUNCH,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
}
LONGEST = 86_400e6  # us; an event that lasts longer than a day did not happen
LATEST = 4e15  # us; the year 2096, and far from where int64 nanoseconds end
_COLLECTIVE = ("gloo:", "c10d::", "nccl:")


class Columns:
    """Collects events; `trace` then joins them. ``take`` is what `decoding.scan` calls."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[int | str, int | str], int] = {}
        self._thread_names: dict[tuple[int | str, int | str], str] = {}
        self._details: dict[int, Details] = {}
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []
        self._count = 0

    def take(self, events: list[Event]) -> None:
        """Add the events that a category of ours has; a metadata event names its thread."""
        kept = [event for event in events if event.ph == "X" and event.cat in CATEGORIES]
        for event in events:
            if event.ph == "M" and event.name == "thread_name":
                self._thread_names[event.pid, event.tid] = event.args.name
        ts = np.array([event.ts for event in kept], np.float64)
        dur = np.array([event.dur for event in kept], np.float64)
        sound = self._sound(ts, dur)
        if not sound.all():
            kept = [event for event, good in zip(kept, sound, strict=True) if good]
            ts, dur = ts[sound], dur[sound]
        start = np.rint(ts * 1000).astype(np.int64)
        names, lanes = self._names, self._lanes
        for offset, event in enumerate(kept):
            args = event.args
            if args.collective or (args.dims and event.name.startswith(_COLLECTIVE)):
                self._details[self._count + offset] = _details(event)
        self._parts.append(
            (
                start,
                start + np.rint(dur * 1000).astype(np.int64),
                np.array([names.setdefault(e.name, len(names)) for e in kept], np.int32),
                np.array([CATEGORIES[e.cat] for e in kept], np.int8),
                np.array([lanes.setdefault((e.pid, e.tid), len(lanes)) for e in kept], np.int32),
                np.array([e.args.device for e in kept], np.int32),
                np.array([e.args.stream for e in kept], np.int32),
                np.array([e.args.correlation for e in kept], np.int64),
            )
        )
        self._count += len(kept)

    def _sound(self, ts: npt.NDArray[Any], dur: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which events have a time that can be, and count the others."""
        missing = ~((dur >= 0) & (ts >= 0))  # NaN is neither
        absurd = ~missing & ((dur > LONGEST) | (ts > LATEST))
        if missing.any():
            self.dropped["without a start and a duration of at least 0"] += int(missing.sum())
        if absurd.any():
            self.dropped["longer than a day, or in another century"] += int(absurd.sum())
        return ~(missing | absurd)

    def trace(self, path: str, found: Scan, rank: int | None, world_size: int | None) -> Trace:
        """Join what was taken. ``rank`` and ``world_size`` are used where the file has none."""
        columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
        base = _whole(found.metadata.get("baseTimeNanoseconds"), 0) or 0
        if 0 < base < LATEST * 1000 and self._count:
            for times in columns[:2]:
                times += base
        info = found.metadata.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        dropped = found.dropped + self.dropped
        notes = [f"{count:,} events dropped: {reason}" for reason, count in sorted(dropped.items())]
        if not found.complete:
            notes.insert(0, "the file is cut off: read up to the cut")
        start, end, name, category, lane, device, stream, correlation = columns
        return Trace(
            path=path,
            rank=_whole(info.get("rank"), rank),
            world_size=_whole(info.get("world_size"), world_size),
            groups=_groups(info),
            start=start,
            end=end,
            name=name,
            category=category,
            lane=lane,
            device=device,
            stream=stream,
            correlation=correlation,
            names=tuple(self._names),
            lanes=tuple(Lane(*lane) for lane in self._lanes),
            thread_names={
                index: self._thread_names[lane]
                for lane, index in self._lanes.items()
                if lane in self._thread_names
            },
            details=self._details,
            metadata=found.metadata,
            notes=tuple(notes),
        )


def _whole(value: object, default: int | None) -> int | None:
    try:
        return int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return default


def _groups(info: dict[str, Any]) -> tuple[Group, ...]:
    groups = []
    config = info.get("pg_config")
    for entry in config if isinstance(config, list) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            name, description = str(entry.get("pg_name")), str(entry.get("pg_desc"))
            groups.append(Group(name, description, tuple(ranks)))
    return tuple(groups)


def _details(event: Event) -> Details:
    args = event.args
    sizes = {size for size in (args.in_elements, args.out_elements) if size >= 0}
    if args.dims:
        with suppress(msgspec.MsgspecError, RecursionError):  # nested beyond any real shape
            sizes |= set(_sizes(msgspec.json.decode(args.dims)))
    return Details(
        args.collective or None,
        args.group or None,
        _ranks(args.group_ranks),
        args.group_size if args.group_size >= 0 else None,
        frozenset(sizes),
        args.dtype or None,
        str(args.comms_id) or None,
    )


def _ranks(text: str) -> tuple[int, ...] | None:
    """Return the ranks of a group; torch writes a long list with dots in the middle: None."""
    try:
        ranks = json.loads(text)
    except ValueError:
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
