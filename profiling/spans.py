"""The ranges that have a meaning: spans of CPU time with a kind and a name.

Ours say both themselves. primus_turbo's stages say their kind only, the profiler's own steps count.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from profiling.ranges import Kind, parse
from profiling.trace import Category, Trace

__all__ = [
    "BACKWARD",
    "FORWARD",
    "STAGES",
    "WAIT_OF",
    "Span",
    "find_iterations",
    "find_spans",
    "foreign_stage",
    "is_stage",
    "iteration_at",
    "spans_of",
    "waits_for",
]

FORWARD = (Kind.STAGE1_FORWARD, Kind.STAGE2_FORWARD)
BACKWARD = (Kind.STAGE1_BACKWARD, Kind.STAGE2_BACKWARD)
STAGES = (*FORWARD, *BACKWARD)
WAIT_OF = {Kind.PARAM_GATHER: Kind.PARAM_WAIT, Kind.GRAD_REDUCE: Kind.GRAD_WAIT}
_FOREIGN = re.compile(r"(?:\w+::)*fused_mega_moe_(?P<stage>stage[12])_(?P<way>forward|backward)\Z")
_STEP = re.compile(r"ProfilerStep#\s*(?P<number>\d+)\Z")


@dataclass(frozen=True)
class Span:
    """One range on a CPU thread; times in nanoseconds."""

    kind: Kind
    name: str
    lane: int
    start: int
    end: int


def foreign_stage(name: str) -> Kind | None:
    """Return the stage that one of primus_turbo's ranges is, or None."""
    match = _FOREIGN.match(name)
    return Kind(f"megamoe::{match['stage']}.{match['way']}") if match else None


def is_stage(name: str) -> bool:
    """Return whether a range of this name is a stage, ours or primus_turbo's."""
    label = parse(name)
    return foreign_stage(name) is not None or (label is not None and label.kind in STAGES)


def spans_of(
    trace: Trace, meaning: Callable[[str], tuple[Kind, str] | None], *categories: Category
) -> tuple[Span, ...]:
    """Return the ranges that mean something by start; one in another of its meaning counts once.

    Args:
        meaning: Kind and name for a range's text, or None; it sees every text once.
        categories: What to look at; the CPU's annotations if not given.
    """
    meanings = [meaning(text) for text in trace.names]
    known = np.array([found is not None for found in meanings] or [False])
    events = np.flatnonzero(np.isin(trace.category, categories or (Category.ANNOTATION,)))
    events = events[known[trace.name[events]]]
    events = events[np.lexsort((-trace.end[events], trace.start[events]))]
    columns = (trace.name[events], trace.lane[events], trace.start[events], trace.end[events])
    spans: list[Span] = []
    reach: dict[tuple[tuple[Kind, str] | None, int], int] = {}
    for text, lane, start, end in zip(*(column.tolist() for column in columns), strict=True):
        found = meanings[text]
        if found is not None and start >= reach.get((found, lane), start):
            reach[found, lane] = end
            kind, name = found
            spans.append(Span(kind, name, lane, start, end))
    return tuple(spans)


def find_spans(trace: Trace) -> tuple[Span, ...]:
    """Return our ranges by start."""
    return spans_of(trace, parse)


def find_iterations(trace: Trace, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the iterations by start, none inside another: ours, else the profiler's steps.

    Args:
        spans: Our ranges.
    """
    found = [span for span in spans if span.kind is Kind.ITERATION and span.name.isdecimal()]
    if not found:
        found = list(spans_of(trace, _step, Category.ANNOTATION, Category.CPU_OP))
    iterations: list[Span] = []
    for span in found:
        if not iterations or span.end > iterations[-1].end:
            iterations.append(span)
    return tuple(iterations)


def _step(text: str) -> tuple[Kind, str] | None:
    match = _STEP.match(text)
    return (Kind.ITERATION, match["number"]) if match else None


def iteration_at(iterations: Sequence[Span], at: int) -> int | None:
    """Return the number of the iteration that was open then, on any thread.

    Args:
        iterations: As `find_iterations` returns them.
    """
    index = bisect_right(iterations, at, key=lambda span: span.start) - 1
    return int(iterations[index].name) if index >= 0 and at < iterations[index].end else None


def waits_for(issues: Sequence[Span], spans: Sequence[Span]) -> list[Span | None]:
    """Return for each issue the wait for it: the first of its name before its next issue.

    None where the recording ended before anybody waited.
    """
    waits: dict[int, Span] = {}
    open_issue: dict[tuple[Kind, str], Span] = {}
    for span in spans:
        if span.kind in WAIT_OF:
            open_issue[WAIT_OF[span.kind], span.name] = span
        elif issue := open_issue.pop((span.kind, span.name), None):
            waits[id(issue)] = span
    return [waits.get(id(issue)) for issue in issues]
