"""The figures of one collective: hidden, exposed, wait, lead, skew.

Hidden and exposed are taken over the *transfer*: without the time spent waiting for late ranks (see
`peers`), and on a CPU without what ran before the issuing thread went on to something else. There a
woken gloo thread often takes the caller's core at once, in the middle of the issuing call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiling.attribution import CPU, Attribution, Found, Stage
from profiling.intervals import EMPTY, Intervals, intersect, subtract, total, window
from profiling.peers import Transfers
from profiling.rules import Iterations
from profiling.spans import iteration_at
from profiling.subjects import Queue, Subject

__all__ = ["AT_ISSUE", "LATE_PEER", "STARVED", "Occurrence", "exposed_communication", "measure"]

# Why an occurrence says nothing about the schedule.
AT_ISSUE = "over before the thread that issued it went on"
LATE_PEER = "the stage ran while the collective waited for a late rank"
STARVED = "the stage ran while the collective waited for a core"
SLICES = 5_000_000  # ns; more than one time slice of the scheduler
LATE = 0.1  # of the transfer; whoever waits longer has less of the stage left to hide it


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One collective on one rank, measured against stages. Times in nanoseconds.

    Attributes:
        when: The transfer.
        duration: How long it took on this rank.
        transfer: How long it took without waiting for late ranks, as far as that is known.
        hidden: How much of the transfer the stages were busy in.
        unclaimed: How much more of it kernels ran in that may be the stages', for no launch says.
        exposed: How much of the transfer nothing computed in.
        wait: How long compute stood still until it ended.
        lead: From its issue to the launch of the stage's first kernel (on a CPU, to the stage);
            negative where it was issued after. None where either is not known.
        waited_first: Whether the wait for it was over before that launch.
        waited_at_once: Whether nothing was computed or enqueued between its issue and the wait.
        skew: How much longer than on the rank where it was shortest; None without a peer.
        aside: Why it says nothing about the schedule, or empty.
    """

    subject: Subject
    when: Intervals
    duration: int
    transfer: int
    hidden: int
    unclaimed: int
    exposed: int
    wait: int
    lead: int | None
    waited_first: bool
    waited_at_once: bool
    skew: int | None
    aside: str

    @property
    def share(self) -> float:
        """How much of the transfer was hidden, 0 to 1."""
        return self.hidden / self.transfer

    @property
    def rank(self) -> str:
        return self.subject.rank.trace.label


def measure(
    subject: Subject, at_work: Intervals, runs: Sequence[Stage], transfers: Transfers
) -> Occurrence:
    """Return the figures of a collective, which must have been found in the trace.

    Args:
        at_work: When the stages that may hide it were busy on its rank.
        runs: Those stages' runs there, by start; none where any compute may hide it.
    """
    rank, found = subject.rank, subject.found
    assert len(found.busy), "measure() of a collective that was not found"
    whole, has_peers = transfers.of(subject)
    when = whole
    if found.resumed is not None and subject.issued is not None:
        when = subtract(when, window(subject.issued, found.resumed))
    compute = rank.attribution.compute.get(found.device, EMPTY)
    unclaimed = rank.attribution.unclaimed.get(found.device, EMPTY)
    wait = None if subject.collective is None else subject.collective.wait
    enqueued = _enqueued(subject, runs)
    return Occurrence(
        subject=subject,
        when=when,
        duration=total(found.busy),
        transfer=total(when),
        hidden=total(intersect(when, at_work)),
        unclaimed=total(intersect(subtract(when, at_work), unclaimed)),
        exposed=total(when) - total(intersect(when, compute)),
        wait=_wait_of_thread(subject) if found.device == CPU else _wait_of_streams(subject),
        lead=None if enqueued is None or subject.issued is None else enqueued - subject.issued,
        waited_first=wait is not None and enqueued is not None and wait.end <= enqueued,
        waited_at_once=_waited_at_once(subject),
        skew=total(found.busy) - total(whole) if has_peers else None,
        aside=_aside(found, whole, at_work) if len(when) else AT_ISSUE,
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


def _wait_of_thread(subject: Subject) -> int:
    """Return how long the thread that needed the result waited for the collective's end."""
    wait = None if subject.collective is None else subject.collective.wait
    if wait is None:
        return 0
    end = min(int(subject.found.busy[-1, 1]), wait.end)
    return max(0, end - wait.start)


def _wait_of_streams(subject: Subject) -> int:
    """Return how long a compute stream had stood still for the collective when it ended.

    A stream did if it was idle when the collective ended although its next kernel was enqueued by
    then (or the thread that should enqueue it stood in the wait for this collective), and no other
    collective ended before that kernel began. The idle time counts from the end of the stream's
    kernel before. Of several streams the one that stood longest counts.
    """
    rank, device = subject.rank, subject.found.device
    streams = rank.compute_streams.get(device, ())
    return max((_idle(subject, rank.queue(device, stream)) for stream in streams), default=0)


def _idle(subject: Subject, queue: Queue) -> int:
    end = int(subject.found.busy[-1, 1])
    following = int(np.searchsorted(queue.starts, end))
    if not 0 < following < len(queue.starts):
        return 0
    since, launched = int(queue.done[following - 1]), int(queue.launched[following])
    wait = None if subject.collective is None else subject.collective.wait
    blocked = wait is not None and wait.start <= end <= wait.end
    if since >= end or launched < 0 or (launched > end and not blocked):
        return 0
    ends = subject.rank.communication_ends(subject.found.device)
    later = np.searchsorted(ends, [end, queue.starts[following]], side="right")
    return 0 if later[0] < later[1] else end - since


def _enqueued(subject: Subject, runs: Sequence[Stage]) -> int | None:
    """Return when the first kernel of the stage's run was launched; on a CPU, when it began.

    Of several runs in the iteration it is the last one that began before the result was waited
    for; the first, if all began later.
    """
    wait = None if subject.collective is None else subject.collective.wait
    needed = subject.issued if wait is None else wait.start
    if needed is None:
        return None
    iteration = iteration_at(subject.rank.attribution.iterations, needed)
    near = [run for run in runs if run.iteration == iteration]
    before = [run for run in near if wait is None or run.span.start < wait.start]
    if not near:
        return None
    run = before[-1] if before else near[0]
    if not len(run.events):
        return run.span.start if subject.found.device == CPU else None
    launched = subject.rank.launched[run.events]
    return int(launched[launched >= 0].min()) if (launched >= 0).any() else None


def _waited_at_once(subject: Subject) -> bool:
    collective = subject.collective
    if collective is None or collective.wait is None:
        return False
    between = collective.issue.end, collective.wait.start
    if subject.found.device == CPU:
        return not _works(subject.rank.attribution.compute.get(CPU, EMPTY), *between)
    first, last = np.searchsorted(subject.rank.launches, between)
    return bool(first == last)


def exposed_communication(
    ranks: Sequence[Attribution], iterations: Iterations | None = None
) -> dict[str, list[float]]:
    """Return for each rank and iteration how long it communicated and did not compute, in ms.

    Everything that communicates counts, a stage's own exchanges as well, and so does waiting for
    a late rank. On a device it is the iteration's that launched it, however much later it ran. An
    iteration in which nothing ran (the one that the recorder opened last) is left out; a rank
    whose trace has no iteration ranges has an empty list.

    Args:
        iterations: Which count; all by default.
    """
    return {
        rank.trace.label: [
            sum(
                total(subtract(when, rank.compute.get(device, EMPTY)))
                for device, when in communication.items()
            )
            / 1e6
            for span, communication in zip(rank.iterations, rank.communication, strict=True)
            if communication is not None
            and (iterations is None or (span.name.isdecimal() and int(span.name) in iterations))
        ]
        for rank in ranks
    }
