"""Which layer a stage belongs to, where its range does not say: in a trace that is not ours.

Such stages are primus_turbo's ranges, or those that the user's patterns match. The order of calls
tells the layer: within an iteration forward counts the layers up and backward counts them down,
microbatch after microbatch. How many layers there are the user says; else it is the length of the
shortest run of forwards without a backward between them, if all such runs (and those of backwards)
are multiples of it and most are just as long. A forward on the thread of the backwards is run again
for the backward after it, and is of its layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from profiling.assume import Assumptions
from profiling.ranges import Kind
from profiling.spans import BACKWARD, FORWARD, Span, foreign_stage, spans_of
from profiling.trace import Category, Trace

__all__ = ["Window", "stages", "windows"]

START, END = -(2**62), 2**62


class Window(NamedTuple):
    """A part of the trace whose calls are counted together: an iteration, or all of it."""

    start: int
    end: int
    iteration: int | None


def windows(iterations: Sequence[Span]) -> list[Window]:
    """Return the iterations as windows; one that holds everything where there are none."""
    found = [Window(span.start, span.end, int(span.name)) for span in iterations]
    return found or [Window(START, END, None)]


def stages(
    trace: Trace,
    iterations: Sequence[Span],
    assumptions: Assumptions | None,
    issues: Sequence[Span] = (),
) -> tuple[list[Span], list[str]]:
    """Return the stages by start, each with a layer's name, and notes on those left out.

    Layers are called as the user called them; else as our collectives call them, if those are of as
    many layers; else ``layers.0``, ``layers.1``, ...

    Args:
        issues: Our collectives.
    """
    told = _told(issues)
    patterns = assumptions.stages if assumptions else {}

    def meaning(text: str) -> tuple[Kind, str] | None:
        matched = (kind for kind, pattern in patterns.items() if pattern.fullmatch(text))
        kind = foreign_stage(text) or next(matched, None)
        return (kind, "") if kind else None

    where = (Category.ANNOTATION, Category.CPU_OP) if patterns else (Category.ANNOTATION,)
    found = spans_of(trace, meaning, *where)
    named: list[Span] = []
    notes: list[str] = []
    for forward, backward in zip(FORWARD, BACKWARD, strict=True):
        runs = [span for span in found if span.kind in (forward, backward)]
        if not runs:
            continue
        parts = [_Part(window, runs) for window in windows(iterations)]
        count = len(assumptions.layers) if assumptions else _layers(parts, bool(iterations))
        if not count:
            notes.append(
                f"{forward.value} runs {len(runs):,} times, and the order of the runs does not "
                "tell how many layers there are: list them in an --assume file"
            )
            continue
        plain = told if len(told) == count else [f"layers.{i}" for i in range(count)]
        names = assumptions.layers if assumptions else plain
        odd = 0
        for part in parts:
            odd += not part.fits(count)
            named += part.named(names)
        if odd:
            notes.append(
                f"{odd} of {len(parts)} iterations do not run {forward.value} and its backward a "
                f"whole number of times for {count} layers, and their stages are left out"
            )
    return sorted(named, key=lambda span: span.start), notes


def _told(issues: Sequence[Span]) -> list[str]:
    """Return the expert layers whose weights our collectives move, as they follow each other."""
    paths = (path for issue in issues for path in issue.name.split(","))
    layers = {
        path.rpartition(".")[0] for path in paths if path.endswith(("fc1_weight", "fc2_weight"))
    }
    return sorted(
        layers, key=lambda layer: [int(part) if part.isdigit() else -1 for part in layer.split(".")]
    )


class _Part:
    """The runs of one stage in one window."""

    def __init__(self, window: Window, runs: Iterable[Span]) -> None:
        inside = [run for run in runs if window.start <= run.start < window.end]
        self._backward = [run for run in inside if run.kind in BACKWARD]
        forward = [run for run in inside if run.kind in FORWARD]
        lanes = {run.lane for run in self._backward}
        apart = any(run.lane not in lanes for run in forward)
        self._forward = [run for run in forward if not (apart and run.lane in lanes)]
        self._again = [run for run in forward if apart and run.lane in lanes]

    def lengths(self) -> list[int]:
        """Return how many forwards, or backwards, follow each other without one of the other."""
        both = sorted((*self._forward, *self._backward), key=lambda run: run.start)
        return [len(list(group)) for _, group in groupby(both, key=lambda run: run.kind)]

    def fits(self, layers: int) -> bool:
        forward, backward = len(self._forward), len(self._backward)
        return forward % layers == 0 and backward in (0, forward)

    def named(self, layers: Sequence[str]) -> list[Span]:
        """Return the runs with their layers' names; none where their number does not fit."""
        if not self.fits(len(layers)):
            return []
        forward = [
            replace(run, name=layers[index % len(layers)])
            for index, run in enumerate(self._forward)
        ]
        backward = [
            replace(run, name=layers[-1 - index % len(layers)])
            for index, run in enumerate(self._backward)
        ]
        again = []
        for run in self._again:
            served = next((later for later in backward if later.start >= run.start), None)
            if served is not None:
                again.append(replace(run, name=served.name))
        return [*forward, *backward, *again]


def _layers(parts: Sequence[_Part], whole: bool) -> int:
    """Return how many layers there are, or 0 where the order does not tell.

    Args:
        whole: Whether the parts are whole iterations; else the first and last run may be cut off.
    """
    kept = slice(None) if whole else slice(1, -1)
    lengths = [length for part in parts for length in part.lengths()[kept]]
    if not lengths:
        return 0
    shortest = min(lengths)
    usual = Counter(lengths).most_common(1)[0][0]
    return shortest if usual == shortest and all(n % shortest == 0 for n in lengths) else 0
