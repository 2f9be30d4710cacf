"""Recording a profile that `load` and TensorBoard can read: a schedule, one file per rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from profiling import ranges
from profiling.ranges import Kind

__all__ = ["Recorder", "record"]


class Recorder:
    """Tells the profiler where an iteration ends; `record` makes one.

    Attributes:
        iteration: Number of the running iteration, from 0.
    """

    def __init__(self, profiler: profile, last: int, settle: Callable[[], None]) -> None:
        self.iteration = 0
        self._profiler = profiler
        self._last = last
        self._settle = settle
        self._range: AbstractContextManager[object] | None = None
        self._open()

    def step(self) -> None:
        """End the running iteration and begin the next. Call it once at the end of each."""
        self.close()
        self.iteration += 1
        if self.iteration == self._last:
            self._settle()
        self._profiler.step()
        if self.iteration < self._last:
            self._open()

    def _open(self) -> None:
        self._range = ranges.span(Kind.ITERATION, str(self.iteration))
        self._range.__enter__()

    def close(self) -> None:
        """End the running iteration's range."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


@contextmanager
def record(
    directory: str | Path,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    settle: Callable[[], None] = lambda: None,
    record_shapes: bool = True,
    with_stack: bool = False,
) -> Iterator[Recorder]:
    """Record ``active`` iterations of this rank, after ``wait`` ignored and ``warmup`` traced ones.

        with profiling.record("runs/profile") as recorder:
            for batch in batches:
                train_step(batch)
                recorder.step()

    Every rank calls it and writes ``rank0-of-4.<time>.pt.trace.json.gz`` into ``directory``, which
    is what TensorBoard's profiler plugin expects. Further iterations cost nothing and are not
    recorded.

    Args:
        directory: Made where it does not exist. One recording per directory: `load` refuses two
            files of one rank.
        settle: Called before the profiler stops. On gloo give the engine's
            ``ddp.finish_in_flight``: torch (2.13, at least) crashes if a profile stops while a gloo
            collective is on its way.
        record_shapes: Tensor sizes. They tell gloo's collectives apart, so leave it on for CPU
            runs.
        with_stack: Python stacks, at a price in time and size.

    Raises:
        ValueError: ``wait`` or ``warmup`` is negative, or ``active`` is less than 1.

    Warns:
        UserWarning: CUDA_DEVICE_MAX_CONNECTIONS is 1; or the block ended before anything was
            recorded.
    """
    if wait < 0 or warmup < 0 or active < 1:
        raise ValueError(
            f"wait={wait}, warmup={warmup}, active={active}: the first two must be at least 0 and "
            "active at least 1"
        )
    if torch.cuda.is_available() and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 leaves one hardware queue to all streams, so that they "
            "may run in turn under a profiler: unset it to see what overlaps",
            stacklevel=3,
        )
    last = wait + warmup + active
    rank, world_size = _rank()
    name = f"rank{rank}-of-{world_size}"
    write = tensorboard_trace_handler(str(directory), worker_name=name, use_gzip=True)
    written = False

    def on_trace_ready(profiler: profile) -> None:
        nonlocal written
        written = True
        write(profiler)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=on_trace_ready,
        record_shapes=record_shapes,
        with_stack=with_stack,
    ) as profiler:
        if not dist.is_initialized():  # otherwise torch writes it, with the process groups
            profiler.preset_metadata_json("distributedInfo", '{"rank": 0, "world_size": 1}')
        recorder = Recorder(profiler, last, settle)
        try:
            yield recorder
        finally:
            recorder.close()
            if recorder.iteration < last:  # the block ended early
                settle()
    if not written:
        warnings.warn(
            f"nothing was recorded into {directory}: that takes wait + warmup = {wait + warmup} "
            f"iterations before the first recorded one, and the block made {recorder.iteration}",
            stacklevel=3,
        )


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
