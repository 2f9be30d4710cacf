"""Verdicts: did the named collective run under the named stage, in every layer?

A check that cannot tell says so: INCONCLUSIVE is never success.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiling.bounds import bounds
from profiling.effectiveness import Effective, against, effective
from profiling.evidence import FEWEST, STRAGGLER, Evidence, collect
from profiling.findings import Finding, FindingKind, advise, bad_ranks
from profiling.metrics import Occurrence, exposed_communication
from profiling.overview import overview
from profiling.results import Measured, Report, Row
from profiling.rules import BUILT_IN, THRESHOLD, Iterations, Rule
from profiling.slowdown import slowdown
from profiling.trace import Profile
from profiling.understanding import Reading, read
from profiling.verdicts import Verdict

__all__ = ["check", "judge"]

LITTLE = 0.5  # of the communication's time; who saves less, though it is hidden, should know
MOST_ASIDE = 0.2  # of the occurrences may be stragglers; more are no exception


def check(
    profile: Reading | Profile | str | Path,
    *,
    rules: Sequence[Rule] = BUILT_IN,
    iterations: Iterations | None = None,
    baseline: Reading | None = None,
) -> Report:
    """Judge a profile.

    Args:
        profile: What `read` or `load` returned, or a path for it.
        rules: What to judge; by default the two built-in checks.
        iterations: Which count, beside what each rule says; all by default.
        baseline: A profile of the same run with synchronous collectives.

    Raises:
        LoadError: The path holds no usable profile.
        NotComparableError: The baseline is not of the same run.
    """
    reading = profile if isinstance(profile, Reading) else read(profile)
    ranks, transfers = reading.ranks, reading.transfers
    saving = None if baseline is None else effective(baseline, reading, iterations=iterations)
    return Report(
        path=reading.path,
        ranks=len(ranks),
        rows=tuple(
            judge(evidence, baseline, saving)
            for rule in rules
            for evidence in collect(rule, ranks, transfers, iterations)
        ),
        notes=reading.notes,
        exposed_ms=exposed_communication([rank.attribution for rank in ranks], iterations),
        bounds=bounds(reading, iterations),
        effective=saving,
        clocks={f"rank {rank}": offset for rank, offset in transfers.offsets.items()},
        devices={rank.trace.label: overview(rank.trace, rank.attribution.work) for rank in ranks},
    )


def judge(
    evidence: Evidence, baseline: Reading | None = None, saving: Effective | None = None
) -> Row:
    """Return the verdict of a rule on one layer.

    Args:
        baseline: The same run with synchronous collectives.
        saving: What the run saves against it.
    """
    rule = evidence.rule
    slower = slowdown(evidence, baseline)
    doubt = _cannot_tell(evidence)
    if doubt is not None:
        verdict, findings = Verdict.INCONCLUSIVE, [doubt]
    else:
        verdict = Verdict.of_all([_verdict(evidence), _saves(rule, saving)])
        asked = rule.min_hidden or rule.min_spread or THRESHOLD
        findings = list(advise(evidence, asked, verdict is Verdict.FAIL))
        if verdict is Verdict.INCONCLUSIVE and not _hides(evidence):
            findings = [_unclaimed(evidence)]
        findings += _not_effective(evidence, saving, slower)
        if rule.min_effective is not None and saving is None:
            findings.append(Finding(FindingKind.NO_BASELINE, "min_effective needs a baseline"))
        if verdict is Verdict.PASS and (outliers := _outliers(evidence)) is not None:
            verdict, findings = Verdict.INCONCLUSIVE, [outliers]
    return Row(
        check=rule.name,
        bounds=rule.bounds,
        threshold=rule.min_hidden,
        layer=evidence.layer,
        verdict=verdict,
        hidden=evidence.hidden,
        spread=evidence.spread,
        exposed_ms=evidence.mean_ms("exposed"),
        wait_ms=evidence.mean_ms("wait"),
        lead_ms=evidence.mean_ms("lead"),
        skew_ms=evidence.mean_ms("skew"),
        slowdown=slower,
        occurrences=len(evidence.kept),
        set_aside=evidence.aside,
        inferred=any(one.inferred for one in evidence.issued),
        findings=tuple(findings),
        measured=tuple(map(_measured, evidence.kept)),
    )


def _measured(one: Occurrence) -> Measured:
    return Measured(
        rank=one.rank,
        iteration=one.subject.iteration,
        hidden=one.share,
        duration_ms=one.duration / 1e6,
        transfer_ms=one.transfer / 1e6,
        exposed_ms=one.exposed / 1e6,
        wait_ms=one.wait / 1e6,
        lead_ms=None if one.lead is None else one.lead / 1e6,
        skew_ms=None if one.skew is None else one.skew / 1e6,
    )


def _verdict(evidence: Evidence) -> Verdict:
    """Return whether what counts is within the rule's bounds, on every rank."""
    rule = evidence.rule
    exposed, wait = evidence.mean_ms("exposed"), evidence.mean_ms("wait")
    within = (
        rule.max_exposed_ms is None or (exposed or 0) <= rule.max_exposed_ms,
        rule.max_wait_ms is None or (wait or 0) <= rule.max_wait_ms,
    )
    if not all(within) or not _hides(evidence.at_best):
        return Verdict.FAIL
    return Verdict.PASS if _hides(evidence) else Verdict.INCONCLUSIVE


def _hides(evidence: Evidence) -> bool:
    """Return whether as much is hidden as the rule asks for."""
    rule, hidden, spread = evidence.rule, evidence.hidden, evidence.spread
    assert hidden is not None
    assert spread is not None
    if rule.min_spread is not None and spread[0] < rule.min_spread:
        return False
    asked = rule.min_hidden
    return asked is None or (hidden >= asked and not bad_ranks(evidence, asked))


def _saves(rule: Rule, saving: Effective | None) -> Verdict:
    """Return whether the run saves as much as the rule asks for."""
    if rule.min_effective is None:
        return Verdict.PASS
    if saving is None or saving.interval is None or saving.verdict is Verdict.INCONCLUSIVE:
        return Verdict.INCONCLUSIVE
    return against(saving.interval, rule.min_effective)


def _not_effective(
    evidence: Evidence, saving: Effective | None, slower: float | None
) -> list[Finding]:
    """Return a finding where a hidden collective is in a run that saves far less than it hides."""
    asked = evidence.rule.min_effective or LITTLE
    hidden = evidence.hidden or 0
    if saving is None or saving.interval is None or not _hides(evidence):
        return []
    if saving.interval[1] >= min(asked, hidden):
        return []
    low, high = saving.interval
    text = (
        f"{hidden:.0%} of it is hidden, yet the run saves only {low:.0%} to {high:.0%} of its "
        "communication's time"
    )
    if slower is not None and slower > 1:
        text += f": beside a collective this stage takes {slower:.2f} times as long"
    return [Finding(FindingKind.NOT_EFFECTIVE, text)]


def _cannot_tell(evidence: Evidence) -> Finding | None:
    """Return why there is no verdict, if there is none."""
    rule, layer, issued, kept = evidence.rule, evidence.layer, evidence.issued, evidence.kept
    if not layer:
        return Finding(
            FindingKind.NOT_RECORDED,
            f"no collective of the profile is called {rule.collective}, and it has no expert layer "
            "that should have one: record a whole step of a model that the overlap engine wraps, "
            "or write a rule for what is there",
        )
    if not issued and evidence.left_out:
        return Finding(
            FindingKind.TOO_FEW,
            f"all {evidence.left_out} that were recorded are outside of the iterations asked for",
        )
    if not issued:
        return Finding(
            FindingKind.NOT_RECORDED,
            f"no {rule.collective} of {layer} was recorded: a group of one rank issues none, and "
            "then there is nothing to hide; else record a whole step",
        )
    if not evidence.has_stage:
        return Finding(FindingKind.NOT_RECORDED, f"no {rule.stage} of {layer} was recorded")
    doubts = [subject.found.doubt for subject in issued if subject.found.doubt]
    if doubts:
        return Finding(
            FindingKind.IN_DOUBT,
            f"{len(doubts)} of {len(issued)} could not be attributed: {doubts[0]}",
        )
    if all(subject.found.group_size == 1 for subject in issued):
        return Finding(
            FindingKind.NOTHING_TO_HIDE, "its group has one rank: there is nothing to hide"
        )
    if len(kept) < FEWEST:
        return Finding(
            FindingKind.TOO_FEW,
            f"{len(kept)} of {len(issued)} occurrences could be measured, which is too few: record "
            f"at least {FEWEST} iterations",
        )
    if evidence.found * 2 < len(issued):
        return Finding(
            FindingKind.TOO_FEW,
            f"only {evidence.found} of {len(issued)} left a trace of their own: record whole "
            "iterations",
        )
    return None


def _unclaimed(evidence: Evidence) -> Finding:
    """Return the finding where kernels of which nobody knows the stage could turn the verdict."""
    return Finding(
        FindingKind.IN_DOUBT,
        f"{evidence.hidden or 0:.0%} of it is hidden, but up to {evidence.at_best.hidden or 0:.0%} "
        "could be: kernels ran beside it of which no launch says whether they are the stage's",
    )


def _outliers(evidence: Evidence) -> Finding | None:
    """Return a finding where more was set aside as an exception than a PASS can leave out."""
    stragglers, kept = evidence.stragglers, len(evidence.kept)
    if stragglers <= MOST_ASIDE * (stragglers + kept):
        return None
    return Finding(
        FindingKind.OUTLIERS,
        f"{stragglers} occurrences lasted over {STRAGGLER:g} times as long as the others, too many "
        f"to set aside beside {kept}: record more iterations, with every rank",
    )
