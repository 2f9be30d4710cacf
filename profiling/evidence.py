"""What a profile holds on one rule: layer by layer, which occurrences there are and which count."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from profiling.attribution import CPU, Stage
from profiling.intervals import EMPTY, Intervals, union
from profiling.metrics import Occurrence, measure
from profiling.peers import Transfers
from profiling.rules import ANY, Iterations, Rule
from profiling.subjects import RankFacts, Subject

__all__ = ["FEWEST", "LONG", "STRAGGLER", "Evidence", "collect"]

FEWEST = 2  # occurrences; one alone decides nothing
STRAGGLER = 5.0  # times the siblings' median
JOINED_LATE = "in the first iteration, which a rank joined late"
LONG = "far longer than the others, as when a rank is late or starved"


@dataclass(frozen=True, eq=False)
class Evidence:
    """What there is on one rule and one layer.

    Attributes:
        layer: Empty where the profile has nothing that the rule is about.
        issued: What the rule is about, in the iterations that count.
        left_out: How many were in other iterations.
        found: How many of them left something to measure.
        kept: What counts.
        aside: Reason -> how many do not.
        runs: Runs of the stages that may hide it, each with its rank; none where any compute may.
        first: Number of the first iteration that counts, if iterations are known.
    """

    rule: Rule
    layer: str
    issued: tuple[Subject, ...]
    left_out: int
    found: int
    kept: tuple[Occurrence, ...]
    aside: dict[str, int]
    runs: tuple[tuple[RankFacts, Stage], ...]
    first: int | None

    @property
    def has_stage(self) -> bool:
        return self.rule.stage == ANY or bool(self.runs)

    @property
    def stragglers(self) -> int:
        return self.aside.get(LONG, 0)

    @cached_property
    def hidden(self) -> float | None:
        """Share of the time of what is kept that was hidden, 0 to 1; None without any."""
        return share(self.kept)

    @cached_property
    def at_best(self) -> Evidence:
        """The same, if the kernels of which nobody knows the stage were these stages'."""
        kept = (replace(one, hidden=one.hidden + one.unclaimed) for one in self.kept)
        return replace(self, kept=tuple(kept))

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest share of a single occurrence."""
        shares = [one.share for one in self.kept]
        return (min(shares), max(shares)) if shares else None

    def mean_ms(self, figure: str) -> float | None:
        """Return the mean of a figure over the occurrences that have it, in milliseconds."""
        values = [value for one in self.kept if (value := getattr(one, figure)) is not None]
        return statistics.fmean(values) / 1e6 if values else None

    @cached_property
    def by_rank(self) -> dict[str, tuple[Occurrence, ...]]:
        parts: defaultdict[str, list[Occurrence]] = defaultdict(list)
        for one in self.kept:
            parts[one.rank].append(one)
        return {rank: tuple(ones) for rank, ones in parts.items()}


def share(occurrences: Sequence[Occurrence]) -> float | None:
    """Return the hidden share of several occurrences, weighed by time."""
    transfer = sum(one.transfer for one in occurrences)
    return sum(one.hidden for one in occurrences) / transfer if transfer else None


def collect(
    rule: Rule,
    ranks: Sequence[RankFacts],
    transfers: Transfers,
    iterations: Iterations | None = None,
) -> list[Evidence]:
    """Return the evidence on each layer that the rule is about, in order of the layers.

    Where the profile has none, one entry without a layer says so.

    Args:
        iterations: Which count, beside what the rule itself says.
    """
    numbers = sorted({number for rank in ranks for number in _numbers(rank)})
    chosen = [
        number
        for number in numbers[rule.skip_first :]
        if (iterations is None or number in iterations)
        and (rule.iterations is None or number in rule.iterations)
    ]
    by_layer: defaultdict[str, list[Subject]] = defaultdict(list)
    choosy = iterations is not None or rule.iterations is not None or rule.skip_first > 0
    for rank in ranks:
        for stage in rank.attribution.stages:
            own = stage.span.name
            if rule.expects(own) and rule.hides(stage.span.kind, own, own):
                by_layer[own] += []
        for subject in rank.subjects:
            for layer, labels in subject.labels.items():
                if rule.about_layer(layer) and rule.about(labels):
                    by_layer[layer].append(subject)
    wanted = frozenset(chosen) if choosy else None
    first = min(chosen, default=None)
    return [
        _evidence(rule, layer, by_layer[layer], ranks, transfers, wanted, first)
        for layer in sorted(by_layer, key=_natural)
    ] or [Evidence(rule, "", (), 0, 0, (), {}, (), first)]


def _numbers(rank: RankFacts) -> list[int]:
    spans = rank.attribution.iterations
    return [int(span.name) for span in spans if span.name.isdecimal()]


def _evidence(
    rule: Rule,
    layer: str,
    subjects: Sequence[Subject],
    ranks: Sequence[RankFacts],
    transfers: Transfers,
    wanted: frozenset[int] | None,
    first: int | None,
) -> Evidence:
    """Return the evidence on one layer; all iterations count where ``wanted`` is None."""
    issued = [one for one in subjects if wanted is None or one.iteration in wanted]
    runs = {
        rank: tuple(
            stage
            for stage in rank.attribution.stages
            if rule.stage != ANY and rule.hides(stage.span.kind, stage.span.name, layer)
        )
        for rank in ranks
    }
    at_work: dict[tuple[RankFacts, int], Intervals] = {}
    measured = []
    for subject in issued:
        if len(subject.found.busy):
            rank, device = subject.rank, subject.found.device
            if (rank, device) not in at_work:
                at_work[rank, device] = (
                    rank.attribution.compute.get(device, EMPTY)
                    if rule.stage == ANY
                    else _busy(rank, runs[rank], device)
                )
            measured.append(measure(subject, at_work[rank, device], runs[rank], transfers))
    kept, aside = _set_aside(measured, transfers.joined_late)
    every = tuple(
        (rank, stage)
        for rank in ranks
        for stage in runs[rank]
        if wanted is None or stage.iteration in wanted
    )
    left_out = len(subjects) - len(issued)
    return Evidence(
        rule, layer, tuple(issued), left_out, len(measured), tuple(kept), aside, every, first
    )


def _busy(rank: RankFacts, runs: Sequence[Stage], device: int) -> Intervals:
    """Return when the runs were busy on a device: work on one hides nothing on another."""
    if not runs:
        return EMPTY
    if device == CPU:
        rows = np.concatenate([run.busy for run in runs])
        return union(rows[:, 0], rows[:, 1])
    events = np.concatenate([run.events for run in runs])
    events = events[rank.trace.device[events] == device]
    return union(rank.trace.start[events], rank.trace.end[events])


def _set_aside(
    measured: list[Occurrence], joined_late: int | None
) -> tuple[list[Occurrence], dict[str, int]]:
    """Return the occurrences that speak about the schedule, and why how many others do not.

    Args:
        joined_late: Number of the iteration that a rank joined late, if one did.
    """
    aside: Counter[str] = Counter()
    kept = []
    for one in measured:
        late = joined_late is not None and one.subject.iteration == joined_late
        if reason := one.aside or (JOINED_LATE if late else ""):
            aside[reason] += 1
        else:
            kept.append(one)
    if len(kept) > FEWEST:
        longest = STRAGGLER * statistics.median(one.transfer for one in kept)
        usual = [one for one in kept if one.transfer <= longest]
        if len(usual) < len(kept):
            aside[LONG] = len(kept) - len(usual)
        kept = usual
    return kept, dict(aside)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    parts = path.split(".")
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
