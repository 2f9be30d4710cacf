"""What an event is: computing, communicating, copying.

On a device the profiler's category comes first and the kernel's name second, and then what launched
it: a collective may run kernels of any name, or none but the copy engines. On a CPU an operator
computes unless its name says that it only wraps or waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from profiling.launches import Launches
from profiling.names import (
    is_collective_call,
    is_communication_kernel,
    is_peer_copy,
    is_signal,
    is_within_devices,
)
from profiling.nesting import Outermost
from profiling.ranges import emulated
from profiling.spans import is_stage
from profiling.trace import Category, Trace

__all__ = [
    "Work",
    "c10d_calls",
    "classify",
    "gloo_ranges",
    "has_device_work",
    "is_compute_operator",
]


class Work(IntEnum):
    """What works during an event. NONE for what only wraps, waits or launches."""

    NONE = 0
    COMPUTE = 1
    COMMUNICATION = 2
    COPY = 3
    MEMSET = 4


# Operators are `namespace::name`. These namespaces wrap other events, or wait for a peer.
_OPERATOR = re.compile(r"(?P<namespace>[A-Za-z_]\w*)::\w")
_NO_COMPUTE = frozenset(
    {"autograd", "c10d", "_c10d_functional", "c10d_functional", "megamoe", "overlap", "profiler"}
    | {"torch"}  # torch::autograd::AccumulateGrad, around the hooks
)


def is_compute_operator(name: str) -> bool:
    """Return whether a CPU operator of this name computes.

    Operators with a namespace do (`aten::mm`, a custom `mylib::op`). Autograd's nodes and
    `autograd::engine::evaluate_function` wrap others, and c10d's hand over to another thread.
    """
    match = _OPERATOR.match(name)
    return match is not None and match["namespace"] not in _NO_COMPUTE


def _by_name(
    trace: Trace, events: npt.NDArray[np.int64], test: Callable[[str], bool]
) -> npt.NDArray[np.int64]:
    """Return those of ``events`` whose name passes ``test``, which sees every name once."""
    passes = np.array([test(name) for name in trace.names] or [False])
    return events[passes[trace.name[events]]]


def has_device_work(trace: Trace) -> bool:
    """Return whether anything ran on a device; if not, the CPU's threads are what works."""
    return bool((trace.category >= Category.KERNEL).any())


def gloo_ranges(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the events that are a CPU collective's own account of itself, by start: gloo's, or
    those of `overlap.emulation`."""
    return _annotations(trace, "gloo:", emulated())


def _annotations(trace: Trace, *beginnings: str) -> npt.NDArray[np.int64]:
    annotations = trace.of(Category.ANNOTATION)
    return _by_name(trace, annotations, lambda name: name.startswith(beginnings))


def c10d_calls(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the operators that hand a collective to a process group, by start."""
    return _by_name(trace, trace.of(Category.CPU_OP), lambda name: name.startswith("c10d::"))


def classify(trace: Trace, launches: Launches | None = None) -> npt.NDArray[np.int8]:
    """Return the `Work` of each event, int8 [n].

    With device work in the trace, only the device works. Without, compute operators do, and
    gloo's ranges are the communication; what an operator does on one of gloo's own threads is
    part of that.

    Args:
        launches: Those of ``trace``, where they are at hand.
    """
    work = np.zeros(len(trace), np.int8)
    if has_device_work(trace):
        kernels = np.flatnonzero(trace.category == Category.KERNEL)
        work[kernels] = Work.COMPUTE
        work[_by_name(trace, kernels, is_communication_kernel)] = Work.COMMUNICATION
        work[trace.category == Category.MEMCPY] = Work.COPY
        work[trace.category == Category.MEMSET] = Work.MEMSET
        launches = launches or Launches(trace)
        _mark_emulated(trace, work, launches)
        _mark_unnamed(trace, work, launches)
        return work
    operators = _by_name(trace, trace.of(Category.CPU_OP), is_compute_operator)
    gloo = gloo_ranges(trace)
    own_threads = np.setdiff1d(trace.lane[gloo], trace.lane[c10d_calls(trace)])
    work[operators[~np.isin(trace.lane[operators], own_threads)]] = Work.COMPUTE
    work[gloo] = Work.COMMUNICATION
    return work


def _mark_emulated(trace: Trace, work: npt.NDArray[np.int8], launches: Launches) -> None:
    """Change ``work`` of what an emulated collective launched, copies from the host included."""
    ranges = Outermost(trace, _annotations(trace, emulated()))
    if len(ranges.events):
        launch, events = launches.pairs()
        owner = ranges.at(trace.lane[launch], trace.start[launch])
        work[events[owner >= 0]] = Work.COMMUNICATION


def _mark_unnamed(trace: Trace, work: npt.NDArray[np.int8], launches: Launches) -> None:
    """Change ``work`` of what a collective launched, though its name does not say so.

    That is a kernel or a copy on a stream of its own, or a copy to a peer on any. What a call
    launches on a stream that computes packs or casts for the collective, and a call that launched
    a known kernel that moves data has its collective; both stay as they are.
    """
    cpu = np.flatnonzero(trace.category <= Category.ANNOTATION)
    calls = Outermost(trace, _by_name(trace, cpu, is_collective_call))
    if not len(calls.events):
        return
    launch, events = launches.pairs()
    owner = calls.at(trace.lane[launch], trace.start[launch])
    inside = owner >= 0
    computing = _computing_streams(trace, work, launches, np.unique(events[inside]))
    events, owner = events[inside], owner[inside]

    known = np.zeros(len(calls.events), bool)
    signals = np.isin(events, _by_name(trace, events, is_signal))
    known[owner[(work[events] == Work.COMMUNICATION) & ~signals]] = True
    events = events[~known[owner]]
    copies = events[work[events] == Work.COPY]
    kernels = events[work[events] == Work.COMPUTE]
    moved = np.union1d(kernels, _by_name(trace, copies, is_within_devices))
    work[moved[~np.isin(_stream(trace, moved), computing)]] = Work.COMMUNICATION
    work[_by_name(trace, copies, is_peer_copy)] = Work.COMMUNICATION


def _computing_streams(
    trace: Trace,
    work: npt.NDArray[np.int8],
    launches: Launches,
    collective: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return the streams that compute: those of stages, or where none is known, of any kernel.

    Args:
        collective: What collectives launched, which does not count.
    """
    stages = Outermost(
        trace, _by_name(trace, np.flatnonzero(trace.category == Category.ANNOTATION), is_stage)
    )
    launch, events = launches.pairs()
    staged = events[stages.at(trace.lane[launch], trace.start[launch]) >= 0]
    for candidates in (staged, np.flatnonzero(work == Work.COMPUTE)):
        kernels = candidates[work[candidates] == Work.COMPUTE]
        kernels = kernels[~np.isin(kernels, collective)]
        if len(kernels):
            return np.unique(_stream(trace, kernels))
    return np.zeros(0, np.int64)


def _stream(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return one number for each device and stream, int64 [n]."""
    return (trace.device[events].astype(np.int64) << 32) + trace.stream[events]
