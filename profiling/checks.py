"""Verdicts: did the named collective run under the named stage, in every layer?

A check that cannot tell says so: INCONCLUSIVE is never success.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from profiling.attribution import Attribution, Collective, attribute
from profiling.loading import load
from profiling.metrics import Occurrence, exposed_communication, measure
from profiling.peers import Transfers
from profiling.ranges import Kind
from profiling.trace import Profile

__all__ = ["BUILT_IN", "Check", "Report", "Row", "Verdict", "check"]

THRESHOLD = 0.9
FEWEST = 2  # occurrences; one alone decides nothing
STRAGGLER = 5.0  # times the siblings' median
LONG = "far longer than the others, as when a rank is late or starved"


class Verdict(str, Enum):
    """What a check says; the value is what reports print."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}[self]

    @classmethod
    def of_all(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """Return FAIL if any is, else INCONCLUSIVE if any is or there is none, else PASS."""
        found = set(verdicts)
        if cls.FAIL in found:
            return cls.FAIL
        return cls.PASS if found == {cls.PASS} else cls.INCONCLUSIVE


@dataclass(frozen=True)
class Check:
    """A collective of each layer that should run under one of the layer's stages.

    Attributes:
        title: What it claims, for people.
        collective: PARAM_GATHER or GRAD_REDUCE.
        weight: The weight module's name inside the experts module.
        stage: The stage that should hide it.
    """

    title: str
    collective: Kind
    weight: str
    stage: Kind


BUILT_IN = (
    Check(
        "fc2 gather overlaps stage1 forward", Kind.PARAM_GATHER, "fc2_weight", Kind.STAGE1_FORWARD
    ),
    Check(
        "dW2 reduce-scatter overlaps stage1 backward",
        Kind.GRAD_REDUCE,
        "fc2_weight",
        Kind.STAGE1_BACKWARD,
    ),
)


@dataclass(frozen=True)
class Row:
    """The verdict of one check on one layer, over all ranks and iterations.

    Attributes:
        check: Title of the check.
        layer: Path of the experts module; empty where the trace has none.
        hidden: Hidden time over collective time, 0 to 1; None where nothing was measured.
        spread: Lowest and highest share of a single occurrence.
        exposed_ms, wait_ms: Mean of an occurrence.
        occurrences: What was measured, over all ranks and iterations.
        set_aside: Reason -> how many occurrences it keeps out of the figures.
        finding: One sentence: why the verdict is what it is, or what to know about it.
    """

    check: str
    layer: str
    verdict: Verdict
    hidden: float | None
    spread: tuple[float, float] | None
    exposed_ms: float | None
    wait_ms: float | None
    occurrences: int
    set_aside: dict[str, int]
    finding: str


@dataclass(frozen=True)
class Report:
    """All rows of a profile, with what loading had to say.

    Attributes:
        exposed_ms: Rank -> per iteration, how long it communicated and did not compute.
    """

    path: str
    ranks: int
    threshold: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    exposed_ms: dict[str, list[float]]

    @property
    def verdict(self) -> Verdict:
        return Verdict.of_all(row.verdict for row in self.rows)


def check(
    profile: Profile | str | Path,
    *,
    threshold: float = THRESHOLD,
    checks: Sequence[Check] = BUILT_IN,
) -> Report:
    """Judge a profile.

    Args:
        profile: What `load` returned, or a path for it.
        threshold: The share of each collective's time that has to be hidden, in (0, 1].
        checks: What to judge; by default the two built-in checks.

    Raises:
        LoadError: The path holds no usable profile.
        ValueError: The threshold is out of range.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}, but must be above 0 and at most 1")
    loaded = profile if isinstance(profile, Profile) else load(profile)
    ranks = [attribute(trace) for trace in loaded.traces]
    transfers = Transfers(ranks)
    return Report(
        path=loaded.path,
        ranks=len(ranks),
        threshold=threshold,
        rows=tuple(
            _judge(which, layer, ranks, transfers, threshold)
            for which in checks
            for layer in _layers(which, ranks) or [""]
        ),
        notes=loaded.notes,
        exposed_ms=exposed_communication(ranks),
    )


def _layers(which: Check, ranks: Sequence[Attribution]) -> list[str]:
    """Return the experts modules that the check is about, in order of appearance."""
    layers: dict[str, None] = {}
    for rank in ranks:
        for stage in rank.stages:
            if stage.span.kind is which.stage:
                layers[stage.span.name] = None
        for collective in rank.collectives:
            layers.update(dict.fromkeys(_experts(which, collective)))
    return sorted(layers, key=_natural)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    parts = path.split(".")
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _experts(which: Check, collective: Collective) -> list[str]:
    """Return the experts modules whose weight this collective moves, if the check is about it."""
    if collective.issue.kind is not which.collective:
        return []
    suffix = f".{which.weight}"
    names = collective.issue.name.split(",")
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def _judge(
    which: Check,
    layer: str,
    ranks: Sequence[Attribution],
    transfers: Transfers,
    threshold: float,
) -> Row:
    """Return the row of one layer."""
    issued = [
        (rank, collective)
        for rank in ranks
        for collective in rank.collectives
        if layer in _experts(which, collective)
    ]
    measured = [
        measure(rank, collective, (which.stage, layer), transfers)
        for rank, collective in issued
        if len(collective.found.busy)
    ]
    kept, aside = _set_aside(measured)
    transfer = sum(one.transfer for one in kept)
    hidden = sum(one.hidden for one in kept) / transfer if kept else None
    verdict, finding = _verdict(which, layer, ranks, issued, kept, hidden, threshold)
    return Row(
        check=which.title,
        layer=layer,
        verdict=verdict,
        hidden=hidden,
        spread=(min(one.share for one in kept), max(one.share for one in kept)) if kept else None,
        exposed_ms=_mean_ms(one.exposed for one in kept),
        wait_ms=_mean_ms(one.wait for one in kept),
        occurrences=len(kept),
        set_aside=aside,
        finding=finding,
    )


def _mean_ms(times: Iterable[int]) -> float | None:
    values = list(times)
    return statistics.fmean(values) / 1e6 if values else None


def _set_aside(measured: list[Occurrence]) -> tuple[list[Occurrence], dict[str, int]]:
    """Return the occurrences that speak about the schedule, and why how many others do not."""
    aside = Counter(one.aside for one in measured if one.aside)
    kept = [one for one in measured if not one.aside]
    if len(kept) > FEWEST:
        longest = STRAGGLER * statistics.median(one.transfer for one in kept)
        usual = [one for one in kept if one.transfer <= longest]
        if len(usual) < len(kept):
            aside[LONG] = len(kept) - len(usual)
        kept = usual
    return kept, dict(aside)


def _verdict(
    which: Check,
    layer: str,
    ranks: Sequence[Attribution],
    issued: Sequence[tuple[Attribution, Collective]],
    kept: Sequence[Occurrence],
    hidden: float | None,
    threshold: float,
) -> tuple[Verdict, str]:
    """Return the verdict on one layer, and the sentence that goes with it."""
    if not layer:
        return Verdict.INCONCLUSIVE, (
            "no stage and no collective of an expert layer is in the trace: record a whole step of "
            "a model that is wrapped by the overlap engine"
        )
    what = f"{layer}.{which.weight}"
    if not issued:
        return Verdict.INCONCLUSIVE, (
            f"no {which.collective.value} of {what} was recorded: a group of one rank issues none, "
            "and then there is nothing to hide; else record a whole step"
        )
    if not any((which.stage, layer) in rank.stage_busy for rank in ranks):
        return Verdict.INCONCLUSIVE, f"no {which.stage.value} of {layer} was recorded"
    doubts = [collective.found.doubt for _, collective in issued if collective.found.doubt]
    if doubts:
        return Verdict.INCONCLUSIVE, (
            f"{len(doubts)} of {len(issued)} could not be attributed: {doubts[0]}"
        )
    if all(collective.found.group_size == 1 for _, collective in issued):
        return Verdict.INCONCLUSIVE, "its group has one rank: there is nothing to hide"
    if len(kept) < FEWEST or hidden is None:
        return Verdict.INCONCLUSIVE, (
            f"{len(kept)} of {len(issued)} occurrences could be measured, which is too few: record "
            f"at least {FEWEST} iterations"
        )
    verdict = Verdict.PASS if hidden >= threshold else Verdict.FAIL
    return verdict, _finding(which, kept, verdict)


def _finding(which: Check, kept: Sequence[Occurrence], verdict: Verdict) -> str:
    shared = next((one.name for one in kept if "," in one.name), None)
    if shared is not None:
        return f"its bucket is shared ({shared}): give each expert weight a bucket of its own"
    if verdict is Verdict.PASS:
        return ""
    if max(one.share for one in kept) == 0:
        return "no part of it ran under the stage: issue it before the stage's work is enqueued"
    return ""
