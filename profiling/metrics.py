"""The figures of one collective: hidden, exposed, wait.

All are taken over the *transfer*: without the time spent waiting for late ranks (see `peers`), and
on a CPU without what ran before the issuing thread went on to something else. There a woken gloo
thread often takes the caller's core at once, in the middle of the issuing call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiling.attribution import CPU, Attribution, Collective, Found
from profiling.intervals import EMPTY, Intervals, intersect, subtract, total, window
from profiling.peers import Transfers
from profiling.ranges import Kind

__all__ = ["AT_ISSUE", "LATE_PEER", "STARVED", "Occurrence", "exposed_communication", "measure"]

AT_ONCE = 50_000  # ns; compute that starts this soon after a collective had waited for it

# Why an occurrence says nothing about the schedule.
AT_ISSUE = "over before the thread that issued it went on"
LATE_PEER = "the stage ran while the collective waited for a late rank"
STARVED = "the stage ran while the collective waited for a core"
SLICES = 5_000_000  # ns; more than one time slice of the scheduler
LATE = 0.1  # of the transfer; whoever waits longer has less of the stage left to hide it


@dataclass(frozen=True)
class Occurrence:
    """One collective on one rank, measured against one stage. Times in nanoseconds.

    Attributes:
        duration: How long it took on this rank.
        transfer: How long it took without waiting for late ranks, as far as that is known.
        hidden: How much of the transfer the stage was busy in.
        exposed: How much of the transfer nothing computed in.
        wait: How long compute stood still until it ended.
        peers: Whether a peer's trace says how long the transfer was.
        aside: Why it says nothing about the schedule, or empty.
    """

    rank: int | None
    iteration: int | None
    name: str
    duration: int
    transfer: int
    hidden: int
    exposed: int
    wait: int
    peers: bool
    aside: str

    @property
    def share(self) -> float:
        """How much of the transfer was hidden, 0 to 1."""
        return self.hidden / self.transfer


def measure(
    rank: Attribution, collective: Collective, stage: tuple[Kind, str], transfers: Transfers
) -> Occurrence:
    """Return the figures of ``collective``, which must have been found in the trace."""
    found = collective.found
    assert len(found.busy), "measure() of a collective that was not found"
    transfer, peers = transfers.of(rank.trace.rank, collective)
    whole = transfer
    if found.resumed is not None:
        transfer = subtract(transfer, window(collective.issue.start, found.resumed))
    compute = rank.compute.get(found.device, EMPTY)
    at_work = rank.stage_busy.get(stage, EMPTY)
    return Occurrence(
        rank=rank.trace.rank,
        iteration=collective.iteration,
        name=collective.issue.name,
        duration=total(found.busy),
        transfer=total(transfer),
        hidden=total(intersect(transfer, at_work)),
        exposed=total(subtract(transfer, compute)),
        wait=_wait_of_thread(collective) if found.device == CPU else _gap(found.busy, compute),
        peers=peers,
        aside=_aside(found, whole, at_work) if len(transfer) else AT_ISSUE,
    )


def _aside(found: Found, transfer: Intervals, at_work: Intervals) -> str:
    """Return why the stage had less time for this collective than it would have had, if so."""
    begin = int(found.busy[0, 0])
    since = begin if found.resumed is None else found.resumed  # the call may queue until begin
    waited = total(found.busy) - total(transfer)
    if waited > LATE * total(transfer) and _works(at_work, since, int(transfer[0, 0])):
        return LATE_PEER
    if found.ready is not None:
        since = max(since, found.ready)
        if begin - since > max(total(transfer), SLICES) and _works(at_work, since, begin):
            return STARVED
    return ""


def _works(at_work: Intervals, start: int, end: int) -> bool:
    return len(intersect(at_work, window(start, end))) > 0


def _wait_of_thread(collective: Collective) -> int:
    """Return how long the thread that needed the result waited for the collective's end."""
    if collective.wait is None:
        return 0
    end = min(int(collective.found.busy[-1, 1]), collective.wait.end)
    return max(0, end - collective.wait.start)


def _gap(busy: Intervals, compute: Intervals) -> int:
    """Return how long a device computed nothing until the collective ended, then went on."""
    end = int(busy[-1, 1])
    following = int(np.searchsorted(compute[:, 0], end))
    if not 0 < following < len(compute) or compute[following, 0] - end > AT_ONCE:
        return 0
    return max(0, end - int(compute[following - 1, 1]))


def exposed_communication(ranks: Sequence[Attribution]) -> dict[str, list[float]]:
    """Return for each rank and iteration how long it communicated and did not compute, in ms.

    Everything that communicates counts, a stage's own exchanges as well, and so does waiting for
    a late rank. On a device it is the iteration's that launched it, however much later it ran. An
    iteration in which nothing ran (the one that the recorder opened last) is left out; a rank
    whose trace has no iteration ranges has an empty list.
    """
    return {
        rank.trace.label: [
            sum(
                total(subtract(when, rank.compute.get(device, EMPTY)))
                for device, when in communication.items()
            )
            / 1e6
            for communication in rank.communication
            if communication is not None
        ]
        for rank in ranks
    }
