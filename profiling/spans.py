"""Our ranges as a trace has them: spans of CPU time with a kind and a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiling.ranges import Kind, Range, parse
from profiling.trace import Category, Trace

__all__ = ["STAGES", "WAIT_OF", "Span", "find_spans", "iteration_at", "waits_for"]

STAGES = (
    Kind.STAGE1_FORWARD,
    Kind.STAGE1_BACKWARD,
    Kind.STAGE2_FORWARD,
    Kind.STAGE2_BACKWARD,
)
WAIT_OF = {Kind.PARAM_GATHER: Kind.PARAM_WAIT, Kind.GRAD_REDUCE: Kind.GRAD_WAIT}


@dataclass(frozen=True)
class Span:
    """One range on a CPU thread; times in nanoseconds."""

    kind: Kind
    name: str
    lane: int
    start: int
    end: int


def find_spans(trace: Trace) -> Iterator[Span]:
    """Yield our ranges by start."""
    parsed: dict[int, Range] = {}
    for index, name in enumerate(trace.names):
        found = parse(name)
        if found is not None:
            parsed[index] = found
    for event in trace.of(Category.ANNOTATION):
        label = parsed.get(int(trace.name[event]))
        if label is not None:
            yield Span(
                label.kind,
                label.name,
                int(trace.lane[event]),
                int(trace.start[event]),
                int(trace.end[event]),
            )


def iteration_at(iterations: Sequence[Span], at: int) -> int | None:
    """Return the number of the iteration that was open then, on any thread."""
    for span in reversed(iterations):
        if span.start <= at < span.end and span.name.isdecimal():
            return int(span.name)
    return None


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
