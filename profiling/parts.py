"""Each collective's time, cut up by what went on meanwhile.

`metrics` has the lengths that verdicts rest on; this has the intervals, for whoever draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

from profiling.attribution import CPU, Collective
from profiling.intervals import EMPTY, Intervals, intersect, subtract, window
from profiling.metrics import measure
from profiling.peers import Transfers
from profiling.ranges import Kind
from profiling.subjects import Subject
from profiling.understanding import Reading

__all__ = ["Parts", "cut_up"]


@dataclass(frozen=True, eq=False)
class Parts:
    """Where the time of one collective on one rank went.

    Attributes:
        transfer: When it moved data: hidden and exposed are shares of this.
        under: (stage, layer) -> the parts of the transfer in which that stage was busy.
        beside: The parts in which something else computed.
        exposed: The parts in which nothing computed.
        late: When it was on its way but did not transfer: a rank was late.
        wait: When compute stood still until it ended.
    """

    collective: Collective
    transfer: Intervals
    under: dict[tuple[Kind, str], Intervals]
    beside: Intervals
    exposed: Intervals
    late: Intervals
    wait: Intervals


def cut_up(reading: Reading) -> list[list[Parts]]:
    """Return for each of the reading's ranks its collectives' parts.

    A collective that was not found in its trace has none and is left out.
    """
    return [
        [
            _parts(subject, subject.collective, reading.transfers)
            for subject in rank.subjects
            if subject.collective is not None and len(subject.found.busy)
        ]
        for rank in reading.ranks
    ]


def _parts(subject: Subject, collective: Collective, transfers: Transfers) -> Parts:
    rank, found = subject.rank.attribution, subject.found
    whole, _ = transfers.of(subject)
    occurrence = measure(subject, EMPTY, (), transfers)
    transfer = occurrence.when
    compute = rank.compute.get(found.device, EMPTY)
    under = {}
    beside = intersect(transfer, compute)
    for stage, busy in rank.stage_busy.items():
        if len(shared := intersect(transfer, busy)):
            under[stage] = shared
            beside = subtract(beside, shared)
    return Parts(
        collective=collective,
        transfer=transfer,
        under=under,
        beside=beside,
        exposed=subtract(transfer, compute),
        late=subtract(found.busy, whole),
        wait=_wait(collective, occurrence.wait),
    )


def _wait(collective: Collective, length: int) -> Intervals:
    """Return when those ``length`` nanoseconds were: on a device just before its end."""
    if collective.found.device != CPU:
        end = int(collective.found.busy[-1, 1])
        return window(end - length, end)
    if collective.wait is None:
        return EMPTY
    return window(collective.wait.start, collective.wait.start + length)
