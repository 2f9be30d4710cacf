"""Makes a timeline of a profile, small enough for a page.

Where a profile has more than a page can hold, the last iterations of the ranks that expose most are
kept, and neighbouring events that are too short to be told apart are merged: the timeline's notes
say what was done.
"""

from __future__ import annotations

from collections.abc import Sequence

from profiling.attribution import Attribution
from profiling.classification import has_device_work
from profiling.intervals import intersect, total, window
from profiling.lanes import Lane, lanes_of
from profiling.launches import Launches
from profiling.merging import Page, resolution
from profiling.parts import Parts, cut_up
from profiling.spans import Span
from profiling.timeline import PAINTS, Iteration, Timeline
from profiling.understanding import Reading

__all__ = ["draw"]

ITERATIONS = 3
RANKS = 8
LANES = 16  # of a rank
SLICES = 50_000  # of all lanes together; about 30 bytes each on the page


def draw(reading: Reading, *, slices: int = SLICES) -> Timeline:
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
    shortest = resolution([lane.slices for lanes in shown for lane in lanes], length, slices)
    if shortest:
        notes.append(f"neighbours shorter than {_time(shortest)} are drawn as one")
    page = Page()
    rows = [
        page.row(ranks[index], parts[index], lane, begin, shortest)
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


def _time(nanoseconds: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"
