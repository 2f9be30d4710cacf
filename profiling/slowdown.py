"""How much longer a stage computes while a collective runs beside it.

Both take the same memory and, on a GPU, the same SMs, so a stage that hides a collective may take
longer by as much as it hides. Its time alone is that of runs with no collective beside: of a
serialised baseline, or of the same profile where it has such runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from profiling.attribution import CPU, Stage
from profiling.evidence import FEWEST, Evidence
from profiling.intervals import EMPTY, intersect, total
from profiling.subjects import RankFacts
from profiling.understanding import Reading

__all__ = ["slowdown"]

BESIDE = 0.1  # of a run's time; from here on a collective runs beside it
ALONE = 0.01  # up to here none does


def slowdown(evidence: Evidence, baseline: Reading | None = None) -> float | None:
    """Return the stage's median time with a collective beside it over that without.

    None where either was not seen at least twice.
    """
    runs = evidence.runs
    others = runs if baseline is None else _same(evidence, baseline)
    beside = [total(run.busy) for rank, run in runs if _share_beside(rank, run) >= BESIDE]
    alone = [total(run.busy) for rank, run in others if _share_beside(rank, run) <= ALONE]
    if len(beside) < FEWEST or len(alone) < FEWEST:
        return None
    return statistics.median(beside) / statistics.median(alone)


def _same(evidence: Evidence, baseline: Reading) -> Iterable[tuple[RankFacts, Stage]]:
    names = {(run.span.kind, run.span.name) for _, run in evidence.runs}
    return [
        (rank, run)
        for rank in baseline.ranks
        for run in rank.attribution.stages
        if (run.span.kind, run.span.name) in names
    ]


def _share_beside(rank: RankFacts, run: Stage) -> float:
    """Return in which share of a stage's busy time its device communicated; 1 without any."""
    busy = total(run.busy)
    device = int(rank.trace.device[run.events[0]]) if len(run.events) else CPU
    communication = rank.communication.get(device, EMPTY)
    return total(intersect(run.busy, communication)) / busy if busy else 1.0
