"""Each collective's time, cut up by what went on meanwhile.

`metrics` has the lengths that verdicts rest on; this has the intervals, for whoever draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.attribution import CPU, Attribution
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

    subject: Subject
    transfer: Intervals
    under: dict[tuple[Kind, str], Intervals]
    beside: Intervals
    exposed: Intervals
    late: Intervals
    wait: Intervals


def cut_up(reading: Reading) -> list[list[Parts]]:
    """Return for each of the reading's ranks the parts of every collective found in its trace."""
    found = []
    for rank in reading.ranks:
        runs = _Runs(rank.attribution)
        subjects = [subject for subject in rank.subjects if len(subject.found.busy)]
        found.append([_parts(subject, runs, reading.transfers) for subject in subjects])
    return found


class _Runs:
    """The stage runs of a rank, to find those near a transfer without looking at all."""

    def __init__(self, rank: Attribution) -> None:
        self._busy = rank.stage_busy
        runs = [stage for stage in rank.stages if len(stage.busy)]
        self._stages = [(stage.span.kind, stage.span.name) for stage in runs]
        self._first = np.array([stage.busy[0, 0] for stage in runs], np.int64)
        self._last = np.array([stage.busy[-1, 1] for stage in runs], np.int64)

    def under(self, transfer: Intervals) -> dict[tuple[Kind, str], Intervals]:
        """Return for each stage that was busy meanwhile when it was."""
        if not len(transfer):
            return {}
        near = np.flatnonzero((self._first < transfer[-1, 1]) & (self._last > transfer[0, 0]))
        stages = dict.fromkeys(self._stages[at] for at in near.tolist())
        shared = {stage: intersect(transfer, self._busy[stage]) for stage in stages}
        return {stage: when for stage, when in shared.items() if len(when)}


def _parts(subject: Subject, runs: _Runs, transfers: Transfers) -> Parts:
    found = subject.found
    whole, _ = transfers.of(subject)
    occurrence = measure(subject, EMPTY, (), transfers)
    transfer = occurrence.when
    compute = subject.rank.attribution.compute.get(found.device, EMPTY)
    under = runs.under(transfer)
    beside = intersect(transfer, compute)
    for shared in under.values():
        beside = subtract(beside, shared)
    return Parts(
        subject=subject,
        transfer=transfer,
        under=under,
        beside=beside,
        exposed=subtract(transfer, compute),
        late=subtract(found.busy, whole),
        wait=_wait(subject, occurrence.wait),
    )


def _wait(subject: Subject, length: int) -> Intervals:
    """Return when those ``length`` nanoseconds were: on a device just before its end."""
    if subject.found.device != CPU:
        end = int(subject.found.busy[-1, 1])
        return window(end - length, end)
    if subject.collective is None or subject.collective.wait is None:
        return EMPTY
    start = subject.collective.wait.start
    return window(start, start + length)
