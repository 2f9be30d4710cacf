"""How long a profile's iterations took, where the work was done, and how much they communicated.

On a device a step is the time from its first kernel to the next step's first kernel: both are
launched inside the step's iteration range and run later, so the range's own length says how long
the CPU took to enqueue the work and nothing else. The last step ends with its last kernel. On a CPU
the range is the step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiling.classification import Work, has_device_work
from profiling.intervals import total
from profiling.peers import Transfers
from profiling.rules import Iterations
from profiling.subjects import RankFacts, Subject
from profiling.understanding import Reading

__all__ = ["NotComparableError", "Steps", "same_run", "steps"]

_RAN = (Work.COMPUTE, Work.COMMUNICATION)


class NotComparableError(ValueError):
    """Two profiles are not of the same run configuration. The message is one sentence."""


@dataclass(frozen=True)
class Steps:
    """The steps of a profile, mean over its ranks; in milliseconds.

    Attributes:
        step_ms: How long each took.
        communication_ms: How long each one's collectives transferred, added up: those with a name
            of ours, or all where none has one.
    """

    path: str
    step_ms: tuple[float, ...]
    communication_ms: tuple[float, ...]


def steps(reading: Reading, iterations: Iterations | None = None) -> Steps:
    """Return the steps that every rank of a profile has.

    A collective counts for the iteration that issued it. Those over a group of one rank move
    nothing and do not count. A first iteration that a rank joined late is no step.
    """
    lengths = [_lengths(rank) for rank in reading.ranks]
    common = sorted(set.intersection(*map(set, lengths))) if lengths else []
    common = [number for number in common if iterations is None or number in iterations]
    common = [number for number in common if number != reading.transfers.joined_late]
    moved = [_communication(rank, reading.transfers) for rank in reading.ranks]
    return Steps(
        reading.path,
        tuple(statistics.fmean(each[number] for each in lengths) / 1e6 for number in common),
        tuple(statistics.fmean(each.get(number, 0) for each in moved) / 1e6 for number in common),
    )


def _lengths(rank: RankFacts) -> dict[int, int]:
    """Return number of the iteration -> nanoseconds that it took."""
    attribution, trace = rank.attribution, rank.trace
    numbered = [span for span in attribution.iterations if span.name.isdecimal()]
    if not has_device_work(trace):
        ran = dict(zip(attribution.iterations, attribution.communication, strict=True))
        return {int(span.name): span.end - span.start for span in numbered if ran[span] is not None}
    kernels = np.flatnonzero(np.isin(attribution.work, _RAN))
    launched = rank.launched[kernels]
    begins: dict[int, int] = {}
    end = 0
    for span in numbered:
        own = kernels[(launched >= span.start) & (launched < span.end)]
        if len(own):
            begins[int(span.name)] = int(trace.start[own].min())
            end = int(trace.end[own].max())
    edges = [*begins.values(), end]
    return {
        number: later - begin
        for (number, begin), later in zip(begins.items(), edges[1:], strict=True)
    }


def _communication(rank: RankFacts, transfers: Transfers) -> dict[int, int]:
    """Return number of the iteration -> nanoseconds of transfer that it issued."""
    moved: defaultdict[int, int] = defaultdict(int)
    for subject in _compared(rank):
        found = subject.found
        if subject.iteration is not None and len(found.busy) and found.group_size != 1:
            moved[subject.iteration] += total(transfers.of(subject)[0])
    return moved


def _compared(rank: RankFacts) -> Sequence[Subject]:
    """Return the collectives that have a name of ours; all, in a trace that has none such."""
    named = [subject for subject in rank.subjects if subject.collective is not None]
    return named or rank.subjects


def same_run(ours: Reading, theirs: Reading) -> None:
    """Make sure that two profiles differ in nothing but when things ran.

    Raises:
        NotComparableError: They have different ranks, layers or collectives.
    """
    for what, get in (
        ("rank", _rank_names),
        ("layer", _layer_names),
        ("collective", _collective_names),
    ):
        here, there = get(ours.ranks), get(theirs.ranks)
        for name in sorted(here ^ there):
            has, lacks = ours.path, theirs.path
            if name in there:
                has, lacks = lacks, has
            raise NotComparableError(
                f"{has} and {lacks} are not of the same run: {what} {name} is only in {has}"
            )


def _rank_names(ranks: Sequence[RankFacts]) -> set[str]:
    return {str(rank.trace.rank) for rank in ranks}


def _layer_names(ranks: Sequence[RankFacts]) -> set[str]:
    return {stage.span.name for rank in ranks for stage in rank.attribution.stages}


def _collective_names(ranks: Sequence[RankFacts]) -> set[str]:
    return {subject.label for rank in ranks for subject in _compared(rank)}
