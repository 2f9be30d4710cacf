"""What belongs to what: a collective's busy time to its parameter, a stage's work to its layer.

A collective is known by our range around its issue; in a trace without such ranges, `layering` and
`inference` say what follows from the order of calls. What it then kept busy is, on a device, the
communication that was launched inside that range (by correlation); on a CPU, the gloo range that
`gloo.match` finds. A stage's busy time is, on a device, the compute kernels launched inside its
range; on a CPU, where a range lasts as long as what is in it, the range itself without the waits
for collectives inside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from profiling import cpu, inference, layering
from profiling.assume import Assumptions
from profiling.attributed import (
    CPU,
    NO_EVENTS,
    Attribution,
    Collective,
    Found,
    Source,
    Stage,
)
from profiling.classification import Work, classify, has_device_work
from profiling.device import Device, by_device
from profiling.intervals import Intervals, union
from profiling.launches import Launches
from profiling.ranges import Kind
from profiling.spans import (
    BACKWARD,
    FORWARD,
    STAGES,
    WAIT_OF,
    Span,
    find_iterations,
    find_spans,
    iteration_at,
    waits_for,
)
from profiling.trace import Trace

__all__ = ["CPU", "Attribution", "Collective", "Found", "Source", "Stage", "attribute"]


def attribute(trace: Trace, assumptions: Assumptions | None = None) -> Attribution:
    """Return what of ``trace`` is known to belong to what.

    Args:
        assumptions: What the user says about a trace without our ranges.
    """
    spans = find_spans(trace)
    iterations = find_iterations(trace, spans)
    if not has_device_work(trace):
        return _on_cpu(trace, spans, iterations, assumptions)
    issues = [span for span in spans if span.kind in WAIT_OF]
    waits = waits_for(issues, spans)
    runs = [span for span in spans if span.kind in STAGES]
    launches = Launches(trace)
    work = classify(trace, launches)
    device = Device(trace, work, launches)
    notes: list[str] = []
    if not runs:
        runs, remarks = layering.stages(trace, iterations, assumptions, issues)
        notes += remarks
    own = device.stages(runs)
    stages = _stages(iterations, runs, [union(trace.start[at], trace.end[at]) for at in own], own)
    collectives = [
        Collective(issue, iteration_at(iterations, issue.start), 0, wait, device.moved(issue))
        for issue, wait in zip(issues, waits, strict=True)
    ]
    if not issues:
        calls = inference.calls(trace, work, launches)
        collectives, remarks = inference.collectives(
            calls, stages, iterations, assumptions, device.found
        )
        notes += remarks
    unclaimed, said = device.unclaimed(own)
    return Attribution(
        trace,
        stages,
        _numbered(collectives, stages),
        iterations,
        by_device(trace, np.flatnonzero(work == Work.COMPUTE)),
        tuple(device.sent(iterations)),
        work,
        launches.missing,
        by_device(trace, unclaimed),
        (*notes, *said),
    )


def _on_cpu(
    trace: Trace,
    spans: tuple[Span, ...],
    iterations: tuple[Span, ...],
    assumptions: Assumptions | None,
) -> Attribution:
    """Return what is known of a trace without device work."""
    work = classify(trace)
    issues = [span for span in spans if span.kind in WAIT_OF]
    runs = [span for span in spans if span.kind in STAGES]
    notes: list[str] = []
    if not runs and issues:
        runs, notes = layering.stages(trace, iterations, assumptions, issues)
        spans = tuple(sorted((*spans, *runs), key=lambda span: span.start))
    waits = waits_for(issues, spans)
    found = cpu.ran(trace, issues, waits, cpu.resumed(trace, work, issues, spans))
    stages = _stages(iterations, runs, cpu.worked(runs, spans), [NO_EVENTS] * len(runs))
    collectives = [
        Collective(issue, iteration_at(iterations, issue.start), 0, wait, what)
        for issue, wait, what in zip(issues, waits, found, strict=True)
    ]
    return Attribution(
        trace,
        stages,
        _numbered(collectives, stages),
        iterations,
        by_device(trace, np.flatnonzero(work == Work.COMPUTE)),
        tuple(cpu.meanwhile(trace, work, iterations)),
        work,
        NO_EVENTS,
        {},
        tuple(notes),
    )


def _stages(
    iterations: Sequence[Span],
    runs: Sequence[Span],
    busy: Sequence[Intervals],
    events: Sequence[npt.NDArray[np.int64]],
) -> tuple[Stage, ...]:
    """Return the runs of stages with their places in their iterations."""
    backward = {run.lane for run in runs if run.kind in BACKWARD}
    forward = {run.lane for run in runs if run.kind in FORWARD}
    again = backward if forward - backward else set()  # there backward runs a forward once more
    counts: Counter[tuple[Kind, str, int | None]] = Counter()
    stages = []
    for run, when, own in zip(runs, busy, events, strict=True):
        iteration = iteration_at(iterations, run.start)
        microbatch = None
        if not (run.kind in FORWARD and run.lane in again):
            microbatch = counts[run.kind, run.name, iteration]
            counts[run.kind, run.name, iteration] += 1
        stages.append(Stage(run, iteration, when, own, microbatch))
    return tuple(stages)


def _numbered(collectives: Iterable[Collective], stages: Iterable[Stage]) -> tuple[Collective, ...]:
    """Return the collectives with their ordinals and microbatches.

    A gather serves the next forward of the stage that uses its weight, a reduction the last
    backward. The number in the weight's name says which stage that is.
    """
    runs: defaultdict[tuple[Kind, str, int | None], list[int]] = defaultdict(list)
    for stage in stages:
        if stage.microbatch is not None:
            runs[stage.span.kind, stage.span.name, stage.iteration].append(stage.span.start)
    ordinals: Counter[tuple[Kind, str, int | None]] = Counter()
    numbered = []
    for one in collectives:
        kind, name = one.issue.kind, one.issue.name
        experts, _, weight = name.rpartition(".")
        microbatch = None
        if weight in _USERS[kind] and "," not in name:
            starts = runs[_USERS[kind][weight], experts, one.iteration]
            before = bisect_left(starts, one.issue.start)
            place = before if kind is Kind.PARAM_GATHER else before - 1
            microbatch = place if 0 <= place < len(starts) else None
        ordinal = ordinals[kind, name, one.iteration]
        ordinals[kind, name, one.iteration] += 1
        numbered.append(replace(one, ordinal=ordinal, microbatch=microbatch))
    return tuple(numbered)


_USERS = {
    Kind.PARAM_GATHER: {"fc1_weight": FORWARD[0], "fc2_weight": FORWARD[1]},
    Kind.GRAD_REDUCE: {"fc1_weight": BACKWARD[0], "fc2_weight": BACKWARD[1]},
}
