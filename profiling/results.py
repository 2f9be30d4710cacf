"""What judging a profile gives: a row for each rule and layer, and the figures of the run."""

from __future__ import annotations

from dataclasses import dataclass

from profiling.bounds import Bound
from profiling.clocks import Offset
from profiling.effectiveness import Effective
from profiling.findings import Finding
from profiling.overview import DeviceOverview
from profiling.verdicts import Verdict

__all__ = ["Measured", "Report", "Row"]


@dataclass(frozen=True)
class Measured:
    """The figures of one occurrence, for whoever wants to look closer than a row.

    Attributes:
        rank: Label of the rank.
        iteration: That issued it; None where iterations are not known.
        hidden: Share of the transfer, 0 to 1.
        duration_ms: On this rank, waiting for late ranks included; ``transfer_ms`` without.
    """

    rank: str
    iteration: int | None
    hidden: float
    duration_ms: float
    transfer_ms: float
    exposed_ms: float
    wait_ms: float
    lead_ms: float | None
    skew_ms: float | None


@dataclass(frozen=True)
class Row:
    """The verdict of one rule on one layer, over all ranks and iterations.

    Attributes:
        check: Name of the rule.
        bounds: What the rule asks for, for people.
        threshold: The hidden share that the rule asks for; None where it bounds other figures.
        layer: Path of the experts module; what a collective without one is called; empty where the
            profile has nothing that the rule is about.
        hidden: Hidden time over collective time, 0 to 1; None where nothing was measured.
        spread: Lowest and highest share of a single occurrence.
        exposed_ms, wait_ms: Mean of an occurrence.
        lead_ms: Mean time from its issue to the launch of the stage's first kernel; negative where
            it was issued after; None where that is not known.
        skew_ms: Mean of how much longer it took than on the rank where it was shortest; None
            without peers in the profile.
        slowdown: The stage's time with a collective beside it over that without; None where one of
            them was not seen.
        occurrences: What was measured, over all ranks and iterations.
        set_aside: Reason -> how many occurrences it keeps out of the figures.
        inferred: Whether which parameter it is was concluded, not recorded.
        findings: Why the verdict is what it is, and what to know about it.
        measured: Each occurrence.
    """

    check: str
    bounds: str
    threshold: float | None
    layer: str
    verdict: Verdict
    hidden: float | None
    spread: tuple[float, float] | None
    exposed_ms: float | None
    wait_ms: float | None
    lead_ms: float | None
    skew_ms: float | None
    slowdown: float | None
    occurrences: int
    set_aside: dict[str, int]
    inferred: bool
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...]

    @property
    def finding(self) -> str:
        """The findings' sentences in one text."""
        return "; ".join(finding.text for finding in self.findings)


@dataclass(frozen=True)
class Report:
    """All rows of a profile, with what loading had to say.

    Attributes:
        exposed_ms: Rank -> per iteration, how long it communicated and did not compute.
        bounds: The least that an iteration could leave exposed.
        effective: What the run saves against its baseline; None without one.
        clocks: Rank -> how far its clock is from the lowest rank's; None where nothing tells.
        devices: Rank -> what each device did, then all together; empty without a device.
    """

    path: str
    ranks: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    exposed_ms: dict[str, list[float]]
    bounds: tuple[Bound, ...]
    effective: Effective | None
    clocks: dict[str, Offset | None]
    devices: dict[str, tuple[DeviceOverview, ...]]

    @property
    def verdict(self) -> Verdict:
        return Verdict.of_all(row.verdict for row in self.rows)

    @property
    def every_exposed_ms(self) -> list[float]:
        """The values of ``exposed_ms``, of all ranks together."""
        return [value for per_rank in self.exposed_ms.values() for value in per_rank]
