"""The least that an iteration can leave exposed, whatever the schedule of the same collectives.

With G_j and R_j the transfers of the gathers and the reductions (j from 1), C_j the compute between
the first uses of buckets j and j + 1 (C_0: in the iteration before any), or from the issue of
gather j + 1 where that came earlier (in the optimizer step, say), t_j the compute done when
reduction j was issued, d_j when its result is needed, and one in-order communicator:

    forward, prefetch depth 1     E_f = sum_j max(0, G_j - C_{j-1})
    forward, unlimited prefetch   E_f = max_j [ sum_{i<=j} G_i - sum_{i<j} C_i ]+
    backward                      E_b = max_{i<=j} [ t_i + R_i + ... + R_j - d_j ]+

Where nothing computes before the first bucket is used, E_f >= G_1; where the last gradient ends the
backward and the whole optimizer step needs it, E_b >= R_last. A bucket's first use is the end of
the wait for it; a reduction is needed at the wait for it, but not before the backward has ended:
an optimizer may step some buckets before it waits for the others. All is counted in compute time,
idle time left out, so that waiting does not move a bound. Transfers are the profile's own: beside
compute they may take longer than alone, and what several communicators move at the same time counts
once. A gradient's readiness is not in a trace, its issue is.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiling.intervals import EMPTY, intersect, subtract, total, union
from profiling.ranges import Kind
from profiling.rules import Iterations
from profiling.spans import iteration_at
from profiling.subjects import RankFacts, Subject
from profiling.understanding import Reading

__all__ = ["Bound", "backward_bound", "bounds", "forward_bound", "forward_bound_unlimited"]


@dataclass(frozen=True)
class Bound:
    """A bound and what was measured; means of an iteration of a rank, in milliseconds.

    Attributes:
        name: Which bound.
        least_ms: The bound; None where something is missing that it needs.
        exposed_ms: What the same collectives left exposed; None likewise.
        missing: What is missing, one sentence; empty where nothing is.
    """

    name: str
    least_ms: float | None
    exposed_ms: float | None
    missing: str

    @property
    def ratio(self) -> float | None:
        """Measured over the bound; None without a bound, or where it is 0."""
        if self.exposed_ms is None or not self.least_ms:
            return None
        return self.exposed_ms / self.least_ms


def forward_bound(gathers: Sequence[int], compute: Sequence[int]) -> int:
    """Return E_f at prefetch depth 1: each gather beside the compute of the bucket before.

    Args:
        gathers: [n], in order of first use.
        compute: [n], before the first use and between a use and the next.
    """
    return sum(max(0, gather - before) for gather, before in zip(gathers, compute, strict=True))


def forward_bound_unlimited(gathers: Sequence[int], compute: Sequence[int]) -> int:
    """Return E_f where gathers may run arbitrarily far ahead; arguments as in `forward_bound`."""
    return max(0, int((np.cumsum(gathers) - np.cumsum(compute)).max()))


def backward_bound(reductions: Sequence[int], ready: Sequence[int], needed: Sequence[int]) -> int:
    """Return E_b.

    Args:
        reductions: [n], n > 0, in order of issue.
        ready: [n], the compute done when each gradient was ready.
        needed: [n], the compute done when each result is needed, none before the last is ready.
    """
    sums = np.cumsum(reductions)
    ends = sums + np.maximum.accumulate(np.array(ready) - (sums - reductions))
    return max(0, int((ends - needed).max()))


def bounds(reading: Reading, iterations: Iterations | None = None) -> tuple[Bound, ...]:
    """Return the three bounds of a profile, or for each what is missing."""
    names = ("forward, prefetch depth 1", "forward, unlimited prefetch", "backward")
    forward: list[tuple[int, int, int]] = []  # depth 1, unlimited, exposed
    backward: list[tuple[int, int]] = []
    waited = False
    for rank in reading.ranks:
        begins = {span.name: span.start for span in rank.attribution.iterations}
        for number, gathers in _used(rank, Kind.PARAM_GATHER, iterations):
            forward.append(_forward(reading, rank, gathers, begins[str(number)]))
        for _, reductions in _used(rank, Kind.GRAD_REDUCE, iterations):
            backward.append(_backward(reading, rank, reductions))
        waited = waited or any(one.wait is not None for one in rank.attribution.collectives)
    missing = "" if waited else "no wait for a collective was recorded"
    return (
        _bound(names[0], [row[0] for row in forward], [row[2] for row in forward], missing),
        _bound(names[1], [row[1] for row in forward], [row[2] for row in forward], missing),
        _bound(names[2], [row[0] for row in backward], [row[1] for row in backward], missing),
    )


def _bound(name: str, least: list[int], exposed: list[int], missing: str) -> Bound:
    if not least:
        return Bound(name, None, None, missing or "no iteration has all of its waits recorded")
    return Bound(name, statistics.fmean(least) / 1e6, statistics.fmean(exposed) / 1e6, "")


def _used(
    rank: RankFacts, kind: Kind, iterations: Iterations | None
) -> list[tuple[int, list[tuple[Subject, int]]]]:
    """Return for each iteration its collectives of a kind with the end of the wait for each.

    By the iteration that waited: a gather may have been issued by the one before. An iteration
    with a collective that left no trace has no bound.
    """
    parts: defaultdict[int, list[tuple[Subject, int]]] = defaultdict(list)
    incomplete: set[int | None] = set()
    for subject in rank.subjects:
        collective = subject.collective
        if collective is None or subject.kind is not kind or subject.found.group_size == 1:
            continue
        if collective.wait is None or not len(subject.found.busy):
            incomplete.add(subject.iteration)
            continue
        number = iteration_at(rank.attribution.iterations, collective.wait.start)
        if number is not None and (iterations is None or number in iterations):
            parts[number].append((subject, collective.wait.end))
    return [(number, rows) for number, rows in parts.items() if number not in incomplete]


def _forward(
    reading: Reading, rank: RankFacts, gathers: list[tuple[Subject, int]], begin: int
) -> tuple[int, int, int]:
    ordered = sorted(gathers, key=lambda row: row[1])
    device = ordered[0][0].found.device
    lengths = _lengths(reading, [subject for subject, _ in ordered])
    issued = [used if subject.issued is None else subject.issued for subject, used in ordered]
    # An optimizer step that issues gathers hides them under what it computes after that.
    uses = [min(begin, *issued), *(used for _, used in ordered)]
    at = [rank.done(device, instant) for instant in uses]
    since = [rank.done(device, instant) for instant in issued]
    between = [max(0, later - earlier) for earlier, later in itertools.pairwise(at)]
    beside = [max(0, at[j + 1] - min(at[j], since[j])) for j in range(len(ordered))]
    exposed = sum(_exposed(reading, subject) for subject, _ in ordered)
    return forward_bound(lengths, beside), forward_bound_unlimited(lengths, between), exposed


def _backward(
    reading: Reading, rank: RankFacts, reductions: list[tuple[Subject, int]]
) -> tuple[int, int]:
    ordered = sorted(reductions, key=lambda row: row[0].issued or 0)
    device = ordered[0][0].found.device
    lengths = _lengths(reading, [subject for subject, _ in ordered])
    ready = [rank.done(device, subject.issued or 0) for subject, _ in ordered]
    last = ordered[-1][0].issued or 0
    waits = [
        subject.collective.wait.start
        for subject, _ in ordered
        if subject.collective is not None and subject.collective.wait is not None
    ]
    end = min((wait for wait in waits if wait >= last), default=last)
    needed = [rank.done(device, max(wait, end)) for wait in waits]
    exposed = sum(_exposed(reading, subject) for subject, _ in ordered)
    return backward_bound(lengths, ready, needed), exposed


def _lengths(reading: Reading, subjects: Sequence[Subject]) -> list[int]:
    """The transfers, of each what none before it has covered: of two communicators' at the same
    time, the sum would need more compute to hide than they do."""
    covered = EMPTY
    lengths = []
    for subject in subjects:
        when, _ = reading.transfers.of(subject)
        lengths.append(total(subtract(when, covered)))
        joined = np.concatenate((covered, when))
        covered = union(joined[:, 0], joined[:, 1])
    return lengths


def _exposed(reading: Reading, subject: Subject) -> int:
    compute = subject.rank.attribution.compute.get(subject.found.device, EMPTY)
    when, _ = reading.transfers.of(subject)
    return total(when) - total(intersect(when, compute))
