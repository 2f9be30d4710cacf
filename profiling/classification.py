"""What an event is: computing, communicating, copying.

On a device the profiler's category comes first and the kernel's name second. On a CPU an operator
computes unless its name says that it only wraps or waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from profiling.ranges import emulated
from profiling.trace import Category, Trace

__all__ = [
    "Work",
    "c10d_calls",
    "classify",
    "gloo_ranges",
    "has_device_work",
    "is_communication_kernel",
    "is_compute_operator",
]


class Work(IntEnum):
    """What works during an event. NONE for what only wraps, waits or launches."""

    NONE = 0
    COMPUTE = 1
    COMMUNICATION = 2
    COPY = 3
    MEMSET = 4


# Kernels that move data between ranks.
_COMMUNICATION = re.compile(
    r"""
    ncclKernel | ncclDevKernel | ncclSymk | rcclGenericKernel | rcclDevKernel | mscclKernel
    | nvshmem | rocshmem
    | deep_ep:: | ::(?:intranode|internode|internode_ll)::(?:dispatch|combine)
    | emulated_collective  # overlap.emulation's
    | symm_mem | multimem_ | one_shot_all_reduce | two_shot_all_reduce
    """,
    re.VERBOSE,
)
# Operators are `namespace::name`. These namespaces wrap other events, or wait for a peer.
_OPERATOR = re.compile(r"(?P<namespace>[A-Za-z_]\w*)::\w")
_NO_COMPUTE = frozenset(
    {"autograd", "c10d", "_c10d_functional", "c10d_functional", "megamoe", "overlap", "profiler"}
    | {"torch"}  # torch::autograd::AccumulateGrad, around the hooks
)


def is_communication_kernel(name: str) -> bool:
    """Return whether a device kernel of this name moves data between ranks."""
    return _COMMUNICATION.search(name) is not None


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
    accounts = ("gloo:", emulated())
    return _by_name(trace, trace.of(Category.ANNOTATION), lambda name: name.startswith(accounts))


def c10d_calls(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the operators that hand a collective to a process group, by start."""
    return _by_name(trace, trace.of(Category.CPU_OP), lambda name: name.startswith("c10d::"))


def classify(trace: Trace) -> npt.NDArray[np.int8]:
    """Return the `Work` of each event, int8 [n].

    With device work in the trace, only the device works. Without, compute operators do, and
    gloo's ranges are the communication; what an operator does on one of gloo's own threads is
    part of that.
    """
    work = np.zeros(len(trace), np.int8)
    if has_device_work(trace):
        kernels = trace.of(Category.KERNEL)
        work[kernels] = Work.COMPUTE
        work[_by_name(trace, kernels, is_communication_kernel)] = Work.COMMUNICATION
        work[trace.category == Category.MEMCPY] = Work.COPY
        work[trace.category == Category.MEMSET] = Work.MEMSET
        return work
    operators = _by_name(trace, trace.of(Category.CPU_OP), is_compute_operator)
    gloo = gloo_ranges(trace)
    own_threads = np.setdiff1d(trace.lane[gloo], trace.lane[c10d_calls(trace)])
    work[operators[~np.isin(trace.lane[operators], own_threads)]] = Work.COMPUTE
    work[gloo] = Work.COMMUNICATION
    return work
