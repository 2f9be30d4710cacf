"""What ran when, small enough for a page: lanes of slices, exposed parts, where collectives began.

All times are nanoseconds after the timeline's begin. Where a profile has more than a page can hold,
the last iterations of the ranks that expose most are kept, and neighbouring events that are too
short to be told apart are merged: `notes` says what was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from profiling.attribution import CPU, Attribution
from profiling.classification import has_device_work
from profiling.intervals import Intervals, intersect, total, union, window
from profiling.lanes import Lane, Paint, Slices, lanes_of
from profiling.launches import Launches
from profiling.parts import Parts, cut_up
from profiling.spans import Span
from profiling.understanding import Reading

__all__ = ["PAINTS", "Timeline", "encode", "timeline"]

ITERATIONS = 3
RANKS = 8
LANES = 16  # of a rank
SLICES = 50_000  # of all lanes together; about 30 bytes each on the page
NAMES = 5_000
LONGEST = 120  # characters of a name; names of templates are longer than anybody reads

# Key and label of each paint, in the order of `Paint`.
PAINTS = (
    ("stage1-forward", "stage 1 forward"),
    ("stage1-backward", "stage 1 backward"),
    ("stage2-forward", "stage 2 forward"),
    ("stage2-backward", "stage 2 backward"),
    ("compute", "other compute"),
    ("gather", "parameter gather"),
    ("reduce", "gradient reduce-scatter"),
    ("communication", "other communication"),
    ("copy", "copy"),
    ("memset", "memset"),
    ("wait", "compute waits"),
)


@dataclass(frozen=True, eq=False)
class Row:
    """One lane as it is drawn. The arrays are parallel.

    Attributes:
        place: "GPU 0", or "CPU".
        start, length: int64 [n].
        paint: int8 [n], index into the timeline's ``paints``.
        name: int32 [n], index into ``names``; -1 for a merged slice.
        layer: int32 [n], index into ``layers``; -1 for what belongs to none.
        collective: int32 [n], index into ``collectives``; -1 for what is none.
        count: int32 [n], how many events the slice stands for.
        exposed: When it communicated and nothing computed.
    """

    rank: str
    place: str
    title: str
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    paint: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int32]
    collective: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    exposed: Intervals


@dataclass(frozen=True)
class Shown:
    """What the page says about one collective on one rank. Times in nanoseconds.

    Attributes:
        issue: When it was issued; before the timeline's begin where negative, None if not known.
        start: When it began.
        under: (stage and layer, length) for each stage that hid a part of it.
        beside: How long something else computed meanwhile.
        late: How long it waited for a late rank.
        wait: How long compute stood still for it.
    """

    name: str
    issue: int | None
    start: int
    transfer: int
    under: tuple[tuple[str, int], ...]
    beside: int
    exposed: int
    late: int
    wait: int
    inferred: bool


@dataclass(frozen=True)
class Iteration:
    """When the work of one iteration of one rank ran."""

    rank: str
    name: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """All that is drawn.

    Attributes:
        length: From begin to end.
        paints: Key and label of each paint.
        notes: What was left out or merged, one sentence each.
    """

    length: int
    rows: tuple[Row, ...]
    paints: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    layers: tuple[str, ...]
    collectives: tuple[Shown, ...]
    iterations: tuple[Iteration, ...]
    notes: tuple[str, ...]


def encode(shown: Timeline) -> bytes:
    """Return the timeline as JSON: an object with the fields of `Timeline`."""
    return msgspec.json.encode(shown, enc_hook=_listed)


def _listed(value: Any) -> Any:
    assert isinstance(value, np.ndarray), type(value)
    return value.tolist()


def timeline(reading: Reading, *, slices: int = SLICES) -> Timeline:
    """Return the timeline of a profile.

    Args:
        slices: How many at most.
    """
    ranks = [rank.attribution for rank in reading.ranks]
    parts = cut_up(reading)
    notes: list[str] = []
    chosen = _ranks(ranks, parts, notes)
    extents = [_iterations(ranks[index]) for index in chosen]
    kept = _last(extents, notes)
    windows = [_window(ranks[index], each) for index, each in zip(chosen, kept, strict=True)]
    ahead = [reading.transfers.ahead(ranks[index].trace.rank) for index in chosen]
    begins, length = _aligned(windows, ahead, notes)
    shown = []
    for index, begin in zip(chosen, begins, strict=True):
        lanes = [_clipped(lane, begin, length) for lane in lanes_of(ranks[index], parts[index])]
        lanes = [lane for lane in lanes if len(lane.slices)]
        if len(lanes) > LANES:
            notes.append(f"{ranks[index].trace.label}: {len(lanes) - LANES} lanes left out")
        shown.append(lanes[:LANES])
    resolution = _resolution([lane.slices for lanes in shown for lane in lanes], length, slices)
    if resolution:
        notes.append(f"neighbours shorter than {_time(resolution)} are drawn as one")
    page = _Page()
    rows = [
        page.row(ranks[index], parts[index], lane, begin, resolution)
        for index, begin, lanes in zip(chosen, begins, shown, strict=True)
        for lane in lanes
    ]
    return Timeline(
        length=length,
        rows=tuple(rows),
        paints=PAINTS,
        names=tuple(page.names),
        layers=tuple(page.layers),
        collectives=tuple(page.collectives),
        iterations=tuple(
            Iteration(ranks[index].trace.label, name, start - begin, end - begin)
            for index, begin, each in zip(chosen, begins, kept, strict=True)
            for name, (start, end) in each.items()
        ),
        notes=tuple(notes),
    )


# What is shown


def _ranks(
    ranks: Sequence[Attribution], parts: Sequence[Sequence[Parts]], notes: list[str]
) -> list[int]:
    """Return which ranks are drawn: all, or those that expose most."""
    if len(ranks) <= RANKS:
        return list(range(len(ranks)))
    exposed = [sum(total(one.exposed) for one in each) for each in parts]
    worst = sorted(range(len(ranks)), key=lambda index: -exposed[index])[:RANKS]
    notes.append(f"the {RANKS} of {len(ranks)} ranks that expose most are drawn")
    return sorted(worst)


_Extents = dict[str, tuple[int, int]]  # name of an iteration -> when its work ran


def _iterations(rank: Attribution) -> _Extents:
    """Return when each iteration's work ran: on a device that is later than the range says."""
    if not has_device_work(rank.trace):
        ran = zip(rank.iterations, rank.communication, strict=True)
        return {span.name: (span.start, span.end) for span, during in ran if during is not None}
    launches = Launches(rank.trace)
    found = {span.name: _launched(rank, launches, span) for span in rank.iterations}
    return {name: extent for name, extent in found.items() if extent is not None}


def _launched(rank: Attribution, launches: Launches, span: Span) -> tuple[int, int] | None:
    events = launches.anywhere(span.start, span.end)
    if not len(events):
        return None
    return int(rank.trace.start[events].min()), int(rank.trace.end[events].max())


def _last(extents: list[_Extents], notes: list[str]) -> list[_Extents]:
    """Return the last iterations of each rank, the same for all."""
    names = list(dict.fromkeys(name for each in extents for name in each))
    last = names[-ITERATIONS:]
    if len(last) < len(names):
        notes.append(f"the last {ITERATIONS} of {len(names)} iterations are drawn")
    return [{name: each[name] for name in last if name in each} for each in extents]


def _window(rank: Attribution, iterations: _Extents) -> tuple[int, int]:
    """Return from when until when a rank is drawn: all that worked, without iterations."""
    if iterations:
        starts, ends = zip(*iterations.values(), strict=True)
        return min(starts), max(ends)
    works = rank.work > 0
    if not works.any():
        return 0, 0
    return int(rank.trace.start[works].min()), int(rank.trace.end[works].max())


def _aligned(
    windows: Sequence[tuple[int, int]], ahead: Sequence[int], notes: list[str]
) -> tuple[list[int], int]:
    """Return each rank's begin by its own clock, and the common length.

    Args:
        ahead: By how much each rank's clock is ahead, as far as that is known.
    """
    real = [
        (start - by, end - by)
        for (start, end), by in zip(windows, ahead, strict=True)
        if start < end
    ]
    if not real:
        return [0] * len(windows), 0
    if any(ahead):
        notes.append("the ranks' clocks are set by the ends of their common collectives")
    begin, end = min(start for start, _ in real), max(end for _, end in real)
    if max(start for start, _ in real) < min(end for _, end in real):
        return [begin + by for by in ahead], end - begin
    notes.append("the ranks' clocks have no time in common: each rank begins at the left edge")
    return [start for start, _ in windows], max(end - start for start, end in real)


def _clipped(lane: Lane, begin: int, length: int) -> Lane:
    slices = lane.slices
    during = (slices.start < begin + length) & (slices.end > begin)
    exposed = intersect(lane.exposed, window(begin, begin + length))
    return Lane(lane.device, lane.title, slices.pick(during), exposed)


# Merging


def _groups(slices: Slices, resolution: int) -> npt.NDArray[np.int64]:
    """Return the index of each group's first slice: short neighbours in one cell are a group."""
    if not resolution:
        return np.arange(len(slices))
    short = slices.end - slices.start < resolution
    cell = slices.start // resolution
    joins = short[1:] & short[:-1] & (cell[1:] == cell[:-1])
    return np.flatnonzero(np.append(True, ~joins))


def _resolution(lanes: Sequence[Slices], length: int, most: int) -> int:
    """Return the shortest time, in ns, to merge at so that ``most`` slices are left; 0 for none."""
    resolution = 0
    while sum(len(_groups(lane, resolution)) for lane in lanes) > most:
        resolution = resolution * 2 or max(1, length >> 20)
    return resolution


class _Page:
    """Numbers what the rows refer to."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.layers: dict[str, int] = {}
        self.collectives: list[Shown] = []

    def row(
        self, rank: Attribution, parts: Sequence[Parts], lane: Lane, begin: int, resolution: int
    ) -> Row:
        slices = lane.slices
        first = _groups(slices, resolution)
        count = np.diff(np.append(first, len(slices)))
        merged = count > 1
        end = np.maximum.reduceat(slices.end, first) if len(first) else slices.end
        paint = slices.paint[first].copy()
        paint[merged] = _heaviest(slices, count)[merged]
        name, layer, collective = (np.full(len(first), -1, np.int32) for _ in range(3))
        shown: dict[int, int] = {}
        for index in np.flatnonzero(~merged).tolist():
            at = first[index]
            owner, what = int(slices.owner[at]), Paint(int(slices.paint[at]))
            if slices.name[at] >= 0:
                name[index] = self._name(rank.trace.names[slices.name[at]])
            if owner < 0:
                continue
            if what <= Paint.STAGE2_BACKWARD:
                layer[index] = self._layer(rank.stages[owner].span.name)
            else:
                if parts[owner].subject.kind is not None:
                    layer[index] = self._layer(parts[owner].subject.name)
                if owner not in shown:
                    shown[owner] = len(self.collectives)
                    self.collectives.append(_shown(parts[owner], begin))
                collective[index] = shown[owner]
        closed = union(lane.exposed[:, 0], lane.exposed[:, 1] + resolution)
        return Row(
            rank=rank.trace.label,
            place="CPU" if lane.device == CPU else f"GPU {lane.device}",
            title=lane.title,
            start=slices.start[first] - begin,
            length=end - slices.start[first],
            paint=paint,
            name=name,
            layer=layer,
            collective=collective,
            count=count.astype(np.int32),
            exposed=closed - np.array([begin, begin + resolution], np.int64),
        )

    def _name(self, name: str) -> int:
        short = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
        if len(self.names) >= NAMES:
            return self.names.get(short, -1)
        return self.names.setdefault(short, len(self.names))

    def _layer(self, name: str) -> int:
        return self.layers.setdefault(name, len(self.layers))


def _heaviest(slices: Slices, count: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return of each group the paint that it has for longest."""
    group = np.repeat(np.arange(len(count)), count)
    spent = np.zeros((len(count), len(Paint)))
    np.add.at(spent, (group, slices.paint), slices.end - slices.start + 1)
    return spent.argmax(axis=1)


def _shown(parts: Parts, begin: int) -> Shown:
    subject = parts.subject
    return Shown(
        name=subject.name,
        issue=None if subject.issued is None else subject.issued - begin,
        start=int(subject.found.busy[0, 0]) - begin,
        transfer=total(parts.transfer),
        under=tuple(
            (f"{kind.value.split('::')[-1]} of {layer}", total(when))
            for (kind, layer), when in parts.under.items()
        ),
        beside=total(parts.beside),
        exposed=total(parts.exposed),
        late=total(parts.late),
        wait=total(parts.wait),
        inferred=subject.inferred,
    )


def _time(nanoseconds: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"
