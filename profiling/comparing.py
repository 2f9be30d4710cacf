"""What changed from one profile to another, per collective, and whether by more than its scatter.

A figure's change is that of its median over occurrences. It is *beyond the spread* if it is larger
than the wider of the two interquartile ranges, and than `LEAST` of the larger median (of 1, for the
hidden share): what one run scatters by anyway is no change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiling.evidence import FEWEST, collect
from profiling.intervals import EMPTY
from profiling.metrics import Occurrence, measure
from profiling.rules import BUILT_IN, Iterations, Rule
from profiling.steps import steps
from profiling.subjects import Subject
from profiling.understanding import Reading

__all__ = ["Change", "Diff", "Entry", "diff"]

LEAST = 0.01
# Figure -> whether more of it is better; None where it depends: beside compute all takes longer.
_FIGURES = {"hidden": True, "exposed_ms": False, "wait_ms": False, "duration_ms": None}


@dataclass(frozen=True)
class Change:
    """One figure in both profiles: a share for "hidden", milliseconds for the others.

    Attributes:
        before, after: Medians over the occurrences.
        spread: The wider interquartile range of the two.
        beyond: Whether the change is larger than the spread.
        better: Whether it is one for the better; None where it is not beyond the spread, and for
            a duration.
    """

    figure: str
    before: float
    after: float
    spread: float
    beyond: bool
    better: bool | None


@dataclass(frozen=True)
class Entry:
    """A collective's changes.

    Attributes:
        check: Name of the rule whose stage may hide it, or "any compute" where no rule is about it.
        name: The layer; a collective's label where no rule is about it.
        occurrences: Before and after.
    """

    check: str
    name: str
    occurrences: tuple[int, int]
    changes: tuple[Change, ...]

    @property
    def beyond(self) -> bool:
        return any(change.beyond for change in self.changes)


@dataclass(frozen=True)
class Diff:
    """All changes from one profile to another.

    Attributes:
        step: The change of the step's time; None where one of them has no iterations.
        only_before, only_after: What only one of them could be measured for, at least twice.
    """

    before: str
    after: str
    step: Change | None
    entries: tuple[Entry, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def worse(self) -> bool:
        """Whether anything got worse beyond its spread."""
        changes = [change for entry in self.entries for change in entry.changes]
        return any(change.better is False for change in (*changes, self.step) if change)


def diff(
    before: Reading,
    after: Reading,
    *,
    rules: Sequence[Rule] = BUILT_IN,
    iterations: Iterations | None = None,
) -> Diff:
    """Compare two profiles.

    Args:
        rules: Which stage may hide which collective; any compute may hide what they are not about.
        iterations: Which count; all by default.
    """
    old, new = _measured(before, rules, iterations), _measured(after, rules, iterations)
    times = [np.array(steps(reading, iterations).step_ms) for reading in (before, after)]
    enough = all(len(values) >= FEWEST for values in times)
    return Diff(
        before.path,
        after.path,
        _change("step_ms", times[0], times[1], False) if enough else None,
        tuple(_entry(key, old[key], new[key]) for key in old if key in new),
        tuple(": ".join(key) for key in old if key not in new),
        tuple(": ".join(key) for key in new if key not in old),
    )


def _measured(
    reading: Reading, rules: Sequence[Rule], iterations: Iterations | None
) -> dict[tuple[str, str], Sequence[Occurrence]]:
    """Return what can be compared: rule and layer, or collective -> occurrences that count."""
    found: dict[tuple[str, str], Sequence[Occurrence]] = {}
    taken: set[Subject] = set()
    for rule in rules:
        for evidence in collect(rule, reading.ranks, reading.transfers, iterations):
            taken.update(evidence.issued)
            found[rule.name, evidence.layer] = evidence.kept
    others: defaultdict[tuple[str, str], list[Occurrence]] = defaultdict(list)
    for rank in reading.ranks:
        for subject in rank.subjects:
            if subject in taken or not len(subject.found.busy):
                continue
            if iterations is None or subject.iteration in iterations:
                compute = rank.attribution.compute.get(subject.found.device, EMPTY)
                others["any compute", subject.label].append(
                    measure(subject, compute, (), reading.transfers)
                )
    found |= {key: [one for one in ones if not one.aside] for key, ones in others.items()}
    return {key: ones for key, ones in found.items() if len(ones) >= FEWEST}


def _entry(key: tuple[str, str], old: Sequence[Occurrence], new: Sequence[Occurrence]) -> Entry:
    changes = [
        _change(figure, _values(figure, old), _values(figure, new), more)
        for figure, more in _FIGURES.items()
    ]
    return Entry(*key, (len(old), len(new)), tuple(changes))


def _values(figure: str, occurrences: Sequence[Occurrence]) -> npt.NDArray[np.float64]:
    if figure == "hidden":
        return np.array([one.share for one in occurrences])
    return np.array([getattr(one, figure.removesuffix("_ms")) / 1e6 for one in occurrences])


def _change(
    figure: str,
    old: npt.NDArray[np.float64],
    new: npt.NDArray[np.float64],
    more_is_better: bool | None,
) -> Change:
    before, after = float(np.median(old)), float(np.median(new))
    spread = max(float(np.subtract(*np.quantile(values, [0.75, 0.25]))) for values in (old, new))
    least = LEAST * (1 if figure == "hidden" else max(before, after))
    beyond = abs(after - before) > max(spread, least)
    known = beyond and more_is_better is not None
    better = (after > before) is more_is_better if known else None
    return Change(figure, before, after, spread, beyond, better)
