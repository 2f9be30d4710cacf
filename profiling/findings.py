"""Findings: what is wrong with a layer's overlap, each kind with one sentence of advice.

A finding is made only of what was measured, and its sentence holds the figures that show it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from profiling.attribution import CPU
from profiling.evidence import FEWEST, Evidence, share
from profiling.intervals import EMPTY, intersect, total, window
from profiling.metrics import Occurrence
from profiling.rules import ANY

__all__ = ["Finding", "FindingKind", "advise", "bad_ranks"]

# Occurrences of one rank that tell something about it; threads on shared cores scatter.
FEWEST_OF_RANK, FEWEST_OF_CPU_RANK = 2, 3
SHOWN = 4  # occurrences are named
MOST = 0.5  # of the occurrences: from here on a finding speaks of the layer


class FindingKind(str, Enum):
    """What a finding is about; the value is what reports print."""

    # Why a check cannot tell.
    NOT_RECORDED = "not recorded"
    NOTHING_TO_HIDE = "nothing to hide"
    IN_DOUBT = "in doubt"
    TOO_FEW = "too few occurrences"
    OUTLIERS = "outliers"
    NO_BASELINE = "no baseline"
    # What keeps a collective from being hidden, or its hiding from paying.
    SHARED_BUCKET = "shared bucket"
    SERIALISED = "serialised"
    LATE_ISSUE = "late issue"
    PREFETCH = "no prefetch"
    WRONG_STAGE = "wrong stage"
    HALF_HIDDEN = "half-hidden"
    NOT_HIDDEN = "not hidden"
    SOMETIMES = "sometimes"
    ONE_RANK = "one rank"
    FIRST_ITERATION = "first iteration"
    NOT_EFFECTIVE = "not effective"


@dataclass(frozen=True)
class Finding:
    """One finding; ``text`` is one sentence."""

    kind: FindingKind
    text: str


def advise(evidence: Evidence, threshold: float, failed: bool) -> Iterator[Finding]:
    """Yield what explains a layer's figures, most important first.

    Args:
        threshold: The hidden share that the rule asks for.
        failed: Whether the layer fails; what passes needs no cause.
    """
    kept = evidence.kept
    if not kept:
        return
    if (shared := _shared_bucket(kept)) is not None:
        yield shared
    low = [one for one in kept if one.share < threshold]
    if low and failed:
        yield from _causes(evidence, low)
    if low:
        local = (_one_rank(evidence, threshold), _first(evidence, threshold))
        yield from filter(None, local)
        if failed and not any(local) and not _most(low, kept):
            yield _sometimes(evidence, threshold)


def _shared_bucket(kept: Sequence[Occurrence]) -> Finding | None:
    # A foreign collective is called what its kernel is, and that may hold commas.
    ours = [one.subject for one in kept if one.subject.collective is not None]
    name = next((subject.name for subject in ours if len(subject.modules) > 1), None)
    if name is None:
        return None
    return Finding(
        FindingKind.SHARED_BUCKET,
        f"its bucket is shared ({name}): give each expert weight a bucket of its own",
    )


def _causes(evidence: Evidence, low: Sequence[Occurrence]) -> list[Finding]:
    """Return why occurrences below the threshold are, if they are most of what counts."""
    if len(low) <= MOST * len(evidence.kept):
        return []
    tests: tuple[Callable[[Evidence, Sequence[Occurrence]], Finding | None], ...] = (
        _serialised,
        _late,
        _prefetch,
        _wrong_stage,
    )
    found = [finding for test in tests if (finding := test(evidence, low)) is not None]
    hidden = share(low)
    if hidden:
        found.append(_half_hidden(evidence, low, hidden))
    elif not found:
        found.append(_not_hidden(evidence, low))
    return found


def _most(part: Sequence[Occurrence], whole: Sequence[Occurrence]) -> bool:
    return len(part) > MOST * len(whole)


def _ms(values: Sequence[int]) -> str:
    return f"{statistics.median(values) / 1e6:.3f} ms"


def _serialised(evidence: Evidence, low: Sequence[Occurrence]) -> Finding | None:
    """It was waited for before the stage's work was enqueued."""
    before = [one for one in low if one.waited_first]
    if not _most(before, low):
        return None
    return Finding(
        FindingKind.SERIALISED,
        f"in {len(before)} of {len(evidence.kept)} the wait for it ended before the stage's work "
        "was enqueued, so nothing could run beside it: wait after the stage is enqueued",
    )


def _late(evidence: Evidence, low: Sequence[Occurrence]) -> Finding | None:
    """It was issued after the stage's first kernel was launched."""
    late = [one for one in low if one.lead is not None and one.lead < 0]
    if not _most(late, low):
        return None
    after = _ms([-one.lead for one in late if one.lead is not None])
    return Finding(
        FindingKind.LATE_ISSUE,
        f"in {len(late)} of {len(evidence.kept)} it was issued {after} after the stage's work: "
        "issue it before the stage's work is enqueued",
    )


def _prefetch(evidence: Evidence, low: Sequence[Occurrence]) -> Finding | None:
    """It was issued late, by whoever needs it."""
    own = [one for one in low if one.lead is not None and one.lead < 0 and one.waited_at_once]
    if not _most(own, low):
        return None
    return Finding(
        FindingKind.PREFETCH,
        f"in {len(own)} of {len(evidence.kept)} it was issued where its result is needed, and "
        "waited for at once: let the weight before it prefetch it (prefetch depth 1, fc1 "
        "registered before fc2)",
    )


def _wrong_stage(evidence: Evidence, low: Sequence[Occurrence]) -> Finding | None:
    """Most of it ran beside another stage, or beside compute of no stage."""
    if evidence.rule.stage == ANY:
        return None
    transfer = sum(one.transfer for one in low)
    under: Counter[str] = Counter()
    beside = 0
    own = {(run.span.kind, run.span.name) for _, run in evidence.runs}
    for one in low:
        for (kind, layer), length in one.subject.rank.under(one.when).items():
            if (kind, layer) not in own:
                under[f"{kind.value.removeprefix('megamoe::')} of {layer}"] += length
        compute = one.subject.rank.attribution.compute
        beside += total(intersect(one.when, compute.get(one.subject.found.device, EMPTY)))
    name = max(under, key=lambda key: under[key], default="")
    if name and under[name] > MOST * transfer:
        return Finding(
            FindingKind.WRONG_STAGE,
            f"{under[name] / transfer:.0%} of it ran under {name} instead: if that is meant, let a "
            "rule name that stage",
        )
    left = beside - sum(one.hidden for one in low)
    if left > MOST * transfer:
        return Finding(
            FindingKind.WRONG_STAGE,
            f"{left / transfer:.0%} of it ran beside other compute than the stage's, for the most "
            "part of no one stage",
        )
    return None


def _not_hidden(evidence: Evidence, low: Sequence[Occurrence]) -> Finding:
    """Say what is known where nothing else explains it."""
    who = "anything computed" if evidence.rule.stage == ANY else "the stage was busy"
    text = f"no part of it ran while {who}"
    early = [one.lead for one in low if one.lead is not None and one.lead >= 0]
    if len(early) == len(low):
        text += (
            f", though it was issued {_ms(early)} before the stage's work: look at what its own "
            "stream did until it began"
        )
    return Finding(FindingKind.NOT_HIDDEN, text)


def _half_hidden(evidence: Evidence, low: Sequence[Occurrence], hidden: float) -> Finding:
    """Say how much of it lay outside, and where; or that the stage is too short for it."""
    transfer = _ms([one.transfer for one in low])
    text = f"{hidden:.0%} hidden in {len(low)} of {len(evidence.kept)}: {transfer} each"
    stage = [total(run.busy) for _, run in evidence.runs if len(run.busy)]
    if stage:
        text += f", while the stage is busy for {_ms(stage)}"
        if statistics.median(stage) < statistics.median(one.transfer for one in low):
            text += ": only more tokens per expert or a faster link can hide it"
        else:
            text += f" and most of the rest lies {_rest(evidence, low)}"
    return Finding(FindingKind.HALF_HIDDEN, text)


def _rest(evidence: Evidence, low: Sequence[Occurrence]) -> str:
    """Return where the part of the transfers lies that their stages do not hide."""
    where = {
        "before it: begin it later, or the stage sooner": 0,
        "in gaps of its own work": 0,
        "after it: begin it earlier": 0,
    }
    before, between, after = where
    own = {(run.span.kind, run.span.name) for _, run in evidence.runs}
    for one in low:
        busy = one.subject.rank.attribution.stage_busy
        rows = [intersect(one.when, busy[key]) for key in own if key in busy]
        covered = np.concatenate([*rows, EMPTY])
        if not len(covered):
            continue
        first, last = int(covered[:, 0].min()), int(covered[:, 1].max())
        early = total(intersect(one.when, window(int(one.when[0, 0]), first)))
        late = total(intersect(one.when, window(last, int(one.when[-1, 1]))))
        where[before] += early
        where[after] += late
        where[between] += one.transfer - one.hidden - early - late
    return max(where, key=lambda key: where[key])


def bad_ranks(evidence: Evidence, threshold: float) -> list[str]:
    """Return the ranks whose own share is too low, and so in most of their occurrences.

    In the same iterations the other ranks must hide theirs: what is low on all of them, or counts
    on this one alone, is the schedule's, and weighs in the layer's own share.
    """
    return [
        rank
        for rank, ones in evidence.by_rank.items()
        if len(ones) >= _fewest(ones)
        and (share(ones) or 0) < threshold
        and _most(low := [one for one in ones if one.share < threshold], ones)
        and _others_hide(evidence, rank, low, threshold)
    ]


def _others_hide(
    evidence: Evidence, rank: str, low: Sequence[Occurrence], threshold: float
) -> bool:
    """Whether the other ranks hide theirs in the iterations of ``low``."""
    when = {one.subject.iteration for one in low}
    others = [one for one in evidence.kept if one.rank != rank and one.subject.iteration in when]
    return (share(others) or 0) >= threshold


def _fewest(ones: Sequence[Occurrence]) -> int:
    on_cpu = any(one.subject.found.device == CPU for one in ones)
    return FEWEST_OF_CPU_RANK if on_cpu else FEWEST_OF_RANK


def _one_rank(evidence: Evidence, threshold: float) -> Finding | None:
    """A minority of the ranks are the bad ones."""
    bad = bad_ranks(evidence, threshold)
    ranks = evidence.by_rank
    if not bad or len(bad) > MOST * len(ranks) or len(ranks) == 1:
        return None
    worst = min(bad, key=lambda rank: share(ranks[rank]) or 0)
    others = share([one for rank, ones in ranks.items() if rank not in bad for one in ones])
    return Finding(
        FindingKind.ONE_RANK,
        f"{', '.join(bad)} alone: {worst} hides {share(ranks[worst]) or 0:.0%}, the other ranks "
        f"{others or 0:.0%}; look at what that rank does otherwise",
    )


def _sometimes(evidence: Evidence, threshold: float) -> Finding:
    """A few are bad, on no one rank and not the first."""
    low = [one for one in evidence.kept if one.share < threshold]
    others = [one for one in evidence.kept if one.share >= threshold]
    worst = sorted(low, key=lambda one: one.share)[:SHOWN]
    where = ", ".join(
        one.rank if one.subject.iteration is None else f"{one.rank} in {one.subject.iteration}"
        for one in worst
    )
    more = f" and {len(low) - SHOWN} more" if len(low) > SHOWN else ""
    return Finding(
        FindingKind.SOMETIMES,
        f"{len(low)} of {len(evidence.kept)} hide {share(low) or 0:.0%}, the others "
        f"{share(others) or 0:.0%}: look at what these iterations do otherwise: {where}{more}",
    )


def _first(evidence: Evidence, threshold: float) -> Finding | None:
    """Only the first iteration is bad."""
    first = [one for one in evidence.kept if one.subject.iteration == evidence.first]
    rest = [one for one in evidence.kept if one.subject.iteration != evidence.first]
    if evidence.first is None or not first or len({one.subject.iteration for one in rest}) < FEWEST:
        return None
    if any(one.share >= threshold for one in first) or any(one.share < threshold for one in rest):
        return None
    return Finding(
        FindingKind.FIRST_ITERATION,
        f"only iteration {evidence.first}, the first, is below ({share(first) or 0:.0%}; later "
        f"ones {share(rest) or 0:.0%}): start the profile later, or let a rule skip it "
        "(skip_first = 1)",
    )
