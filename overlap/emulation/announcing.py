"""How an emulated collective shows in a profile: by c10d's operator, and as "emulated:...".

The range "emulated:all_gather" is around the launch on a device, where the kernel or the copies
show the duration. On a CPU it lasts until the collective has arrived, as gloo's ranges do, and
c10d's operator around its start carries the shapes; the methods of a Python process group are
called without one. Both cost nothing when no profiler runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from profiling import ranges

__all__ = ["announced"]

_C10D = {
    "all_gather": "c10d::_allgather_base_",
    "all_reduce": "c10d::allreduce_",
    "all_to_all": "c10d::alltoall_base_",
    "barrier": "c10d::barrier",
    "broadcast": "c10d::broadcast_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
}


@contextmanager
def announced(
    operation: str, tensors: Sequence[Tensor], until: torch.futures.Future[Any] | None = None
) -> Iterator[None]:
    """Mark the body in a running profiler; the range goes on to ``until``, if given."""
    if not torch._C._autograd._profiler_enabled():
        yield
        return
    shapes = list(tensors)
    with (
        torch._C._profiler._RecordFunctionFast(_C10D[operation], shapes),
        torch.profiler.record_function(ranges.emulated(operation)) as span,
    ):
        if until is not None:
            span._call_end_callbacks_on_future(until)
        yield
