"""What `annotate` puts into a trace: its events, in the Chrome trace format that Perfetto reads.

Complete events of one track must nest, so here they never overlap: what would goes to another
track. An arrow is a start (`s`) in the issue's slice and an end (`f`) that binds to the slice
around it (`bp: e`), the collective's first kernel or gloo range; its id is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from profiling.attribution import CPU, Attribution
from profiling.intervals import Intervals, total
from profiling.parts import Parts

__all__ = ["Tracks"]

CATEGORY = "overlap"  # of all that is put in; readers of profiles know no such category
ARROW = "issue"
FIRST_ID = 2_000_000_000  # of processes and threads put in; beyond any of a real process
LATEST = 4 * 10**18  # ns; a base beyond is none, for the reader of traces as well


class _Slice(NamedTuple):
    start: int
    end: int
    name: str
    args: dict[str, Any]


class Tracks:
    """Collects the events to put in.

    Attributes:
        events: Ready to be encoded.
        slices, arrows: How many of the events are slices, and pairs of an arrow's ends.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.slices = 0
        self.arrows = 0
        self._ids = itertools.count(FIRST_ID)
        self._arrow_ids = itertools.count(1)

    def add(self, rank: Attribution, parts: Sequence[Parts]) -> None:
        """Draw one rank's collectives.

        Args:
            parts: What `cut_up` returned for it.
        """
        base = _base(rank)
        devices = sorted({one.subject.found.device for one in parts})
        for device in devices:
            here = [one for one in parts if one.subject.found.device == device]
            place = "CPU" if device == CPU else f"GPU {device}"
            process = self._process(f"{rank.trace.label}, {place}: communication")
            for title, slices in (
                ("hidden", _hidden(here)),
                ("exposed", _plain(here, "exposed")),
                ("compute waits", _plain(here, "wait")),
                ("waits for a late rank", _plain(here, "late")),
            ):
                self._tracks(process, title, slices, base)
        for one in parts:
            self._arrow(rank, one, base)

    def _process(self, name: str) -> int:
        process = next(self._ids)
        self._say(process, 0, "process_name", name=name)
        self._say(process, 0, "process_sort_index", sort_index=-1)
        return process

    def _tracks(self, process: int, title: str, slices: Iterator[_Slice], base: int) -> None:
        """Draw slices on as few tracks as keep them apart."""
        free: list[int] = []  # when the last slice of each track ends
        threads: list[int] = []
        for each in sorted(slices):
            at = next((at for at, end in enumerate(free) if end <= each.start), len(free))
            if at == len(free):
                free.append(0)
                threads.append(thread := next(self._ids))
                name = f"{title} {at + 1}" if at else title
                self._say(process, thread, "thread_name", name=name)
                self._say(process, thread, "thread_sort_index", sort_index=thread)
            free[at] = each.end
            self.slices += 1
            self.events.append(
                {"ph": "X", "cat": CATEGORY, "name": each.name, "pid": process}
                | {"tid": threads[at], "ts": _us(each.start - base)}
                | {"dur": _us(each.end - each.start), "args": each.args}
            )

    def _say(self, process: int, thread: int, what: str, **args: Any) -> None:
        self.events.append(
            {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}
        )

    def _arrow(self, rank: Attribution, one: Parts, base: int) -> None:
        """Draw the arrow from an issue of ours to what it started, if that began no earlier."""
        trace, collective, events = rank.trace, one.subject.collective, one.subject.found.events
        if collective is None or not len(events):
            return
        issue = collective.issue
        first = int(events[trace.start[events].argmin()])
        # Clocks of a device and its host differ by microseconds: the end must follow the start.
        end = max(int(trace.start[first]), issue.start + 1)
        if end >= trace.end[first]:
            return
        common = {"cat": CATEGORY, "name": ARROW, "id": next(self._arrow_ids)}
        source, target = trace.lanes[issue.lane], trace.lanes[trace.lane[first]]
        self.events += [
            {"ph": "s", **common, "pid": source.pid, "tid": source.tid}
            | {"ts": _us(issue.start - base)},
            {"ph": "f", "bp": "e", **common, "pid": target.pid, "tid": target.tid}
            | {"ts": _us(end - base)},
        ]
        self.arrows += 1


def _hidden(parts: Sequence[Parts]) -> Iterator[_Slice]:
    for one in parts:
        for (kind, layer), when in one.under.items():
            yield from _named(one, when, f"under {kind.value.split('::')[-1]}[{layer}]")
        yield from _named(one, one.beside, "under other compute")


def _plain(parts: Sequence[Parts], which: str) -> Iterator[_Slice]:
    for one in parts:
        yield from _named(one, getattr(one, which), which)


def _named(one: Parts, when: Intervals, how: str) -> Iterator[_Slice]:
    subject = one.subject
    args = {
        "name": subject.name,
        "kind": "foreign" if subject.kind is None else subject.kind.value,
        "iteration": subject.iteration,
        "how": how,
        "transfer_us": total(one.transfer) / 1000,
        "inferred": subject.inferred,
    }
    for start, end in when.tolist():
        yield _Slice(start, end, f"{subject.name} {how}", args)


def _base(rank: Attribution) -> int:
    """Return what the trace's own times are after."""
    base = rank.trace.metadata.get("baseTimeNanoseconds")
    return base if isinstance(base, int) and 0 < base < LATEST else 0


def _us(nanoseconds: int) -> msgspec.Raw:
    """Return a time as the trace has it, exact: no float holds every nanosecond since 1970."""
    sign, size = "-" * (nanoseconds < 0), abs(nanoseconds)
    return msgspec.Raw(f"{sign}{size // 1000}.{size % 1000:03d}".encode())
