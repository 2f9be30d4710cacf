"""What is in a profile, before any judgement: devices, iterations, layers, collectives, groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from profiling.overview import DeviceOverview, overview
from profiling.subjects import RankFacts, Subject
from profiling.trace import Group
from profiling.understanding import Reading

__all__ = ["CollectiveCount", "Listing", "RankListing", "listing"]


@dataclass(frozen=True)
class CollectiveCount:
    """How often a rank issued a collective.

    Attributes:
        name: Its label, or what the trace calls it.
        source: How its parameter is known; empty for a collective that is none of ours.
        issued, found: How many there were, and how many of them left something to measure.
        group_size: Ranks that took part; None where the trace does not say, or it differs.
    """

    name: str
    source: str
    issued: int
    found: int
    group_size: int | None


@dataclass(frozen=True)
class RankListing:
    """What one rank's trace holds.

    Attributes:
        events: How many events were kept on loading.
        devices: Per device, then all together; empty without a device.
        iterations: Their numbers; empty where the trace has none.
        layers: Paths of the experts modules that have stages or collectives.
        stages: Label of the stage without its layer -> how many runs.
        unattributed: Events of devices that have no launch in the trace.
    """

    rank: str
    path: str
    events: int
    devices: tuple[DeviceOverview, ...]
    iterations: tuple[int, ...]
    layers: tuple[str, ...]
    stages: dict[str, int]
    collectives: tuple[CollectiveCount, ...]
    groups: tuple[Group, ...]
    unattributed: int


@dataclass(frozen=True)
class Listing:
    """What a profile holds."""

    path: str
    ranks: tuple[RankListing, ...]
    notes: tuple[str, ...]


def listing(reading: Reading) -> Listing:
    """Return what a profile holds."""
    return Listing(reading.path, tuple(map(_rank, reading.ranks)), reading.notes)


def _rank(rank: RankFacts) -> RankListing:
    attribution, trace = rank.attribution, rank.trace
    layers = dict.fromkeys(stage.span.name for stage in attribution.stages)
    for subject in rank.subjects:
        if subject.collective is not None:  # a dense bucket is in no layer: its own name is there
            layers.update(dict.fromkeys(layer for layer in subject.labels if layer != subject.name))
    by_name: dict[tuple[str, str], list[Subject]] = {}
    for subject in rank.subjects:
        source = "" if subject.collective is None else subject.collective.source.value
        by_name.setdefault((subject.label, source), []).append(subject)
    return RankListing(
        rank=trace.label,
        path=trace.path,
        events=len(trace),
        devices=overview(trace, attribution.work),
        iterations=tuple(
            int(span.name) for span in attribution.iterations if span.name.isdecimal()
        ),
        layers=tuple(layers),
        stages=dict(Counter(stage.span.kind.value for stage in attribution.stages)),
        collectives=tuple(
            CollectiveCount(
                name,
                source,
                len(subjects),
                sum(len(subject.found.busy) > 0 for subject in subjects),
                _only(subject.found.group_size for subject in subjects),
            )
            for (name, source), subjects in by_name.items()
        ),
        groups=trace.groups,
        unattributed=len(attribution.unattributed),
    )


def _only(sizes: Iterable[int | None]) -> int | None:
    found = set(sizes)
    return found.pop() if len(found) == 1 else None
