"""Megatron-core's DDP with a bucket per expert weight, its collectives inside our profiler ranges.

Everything is done to the instances that are built here; no class of Megatron-core is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.utils import get_model_config
from torch import nn

from overlap.budget import SmBudget, attach
from overlap.errors import SplitLostError, WrapError
from overlap.megatron.explain import (
    buckets_of_groups,
    explain,
    module_paths,
    process_group,
    watch_order,
)
from overlap.nccl import ctas_of_group
from overlap.parameters import is_weight_module
from overlap.streams import Streams
from overlap.waiting import WaitClock
from profiling.ranges import Kind, span

__all__ = ["ddp_config", "finish_in_flight", "take_waited_ms", "wrap"]


_MARK = "shared_embedding"  # DDP closes a bucket before and after a parameter that has it
_OVERLAPPED = {
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "use_distributed_optimizer": True,
    "grad_reduce_in_fp32": True,
}


def ddp_config(**options: Any) -> Any:
    """Return a DistributedDataParallelConfig with both overlaps, the distributed optimizer and
    reduction in fp32 switched on. ``options`` are its fields, and win over these."""
    return DistributedDataParallelConfig(**{**_OVERLAPPED, **options})


def wrap(
    model_chunks: nn.Module | Sequence[nn.Module],
    ddp_config: Any = None,
    *,
    config: Any = None,
    pg_collection: Any = None,
    own_buckets: bool = True,
    strict: bool = False,
    measure_waits: bool = False,
    collective_sms: int | None = None,
) -> list[Any]:
    """Wrap this rank's model chunks in Megatron-core's DDP, so that their collectives hide.

    Each expert weight gets a bucket of its own, on every pipeline stage and in every chunk; the
    bucket size goes on for the other parameters. The first gathers of a forward are issued when it
    begins. Every gather, reduce-scatter and wait is inside a profiler range. Modules with a
    ``set_sm_budget`` are told how many SMs the collectives take that are under way.

    Build the optimizer from what is returned, as always. `explain` says what came out.

    Args:
        ddp_config: By default that of `overlap.megatron.ddp_config`. Each chunk gets a copy.
        config: A TransformerConfig; by default that of the first chunk.
        pg_collection: Megatron's process groups, for its DDP.
        own_buckets: False leaves Megatron's layout as it is, to compare with.
        strict: Raise where a collective could not hide, also after the first forward if that used
            the weights in another order than their gathers'.
        measure_waits: Let `take_waited_ms` tell how long compute stood still.
        collective_sms: SMs that the stages leave free while a collective is under way. None takes
            what the groups' NCCL options say (see `write_nccl_config`), 0 where NCCL chooses.

    Raises:
        WrapError: A chunk is wrapped already.
        ValueError: collective_sms is negative.
        SplitLostError: See ``strict``.
    """
    if collective_sms is not None and collective_sms < 0:
        raise ValueError(f"collective_sms must be 0 or more, got {collective_sms}")
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    wrapped = []
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            raise WrapError("the model chunk is a DistributedDataParallel already: wrap it once")
        options = ddp_config or DistributedDataParallelConfig(**_OVERLAPPED)
        extra = {} if pg_collection is None else {"pg_collection": pg_collection}
        with _own_buckets(chunk if own_buckets else None):
            # disable_bucketing would put all buckets of a later chunk into one group.
            ddp = DistributedDataParallel(
                config or get_model_config(chunk),
                copy.copy(options),  # DDP writes its bucket size into it
                chunk,
                disable_bucketing=False,
                **extra,
            )
        _wire(ddp, strict, measure_waits)
        wrapped.append(ddp)
    if wrapped:
        _budget(wrapped, collective_sms)
    if strict:
        _raise_lost(wrapped)
    return wrapped


def finish_in_flight(model_chunks: Iterable[Any]) -> None:
    """Wait for the gathers that are on their way, and issue none: hand it to `profiling.record` as
    ``settle``."""
    for ddp in model_chunks:
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()


def take_waited_ms(model_chunks: Iterable[Any]) -> float:
    """Return how many milliseconds this rank's compute stood still for the collectives of wrapped
    chunks since the last call (on a GPU the host waits for the figure).

    Raises:
        RuntimeError: They were wrapped without measure_waits.
    """
    return sum(float(ddp.wait_clock.take_ms()) for ddp in model_chunks)


@contextmanager
def _own_buckets(chunk: nn.Module | None) -> Iterator[None]:
    """Have each expert weight of a chunk laid out by itself inside the block."""
    params = [
        param
        for module in (chunk.modules() if chunk is not None else ())
        if is_weight_module(module)
        for param in module.parameters(recurse=False)
    ]
    for param in params:
        setattr(param, _MARK, True)
    try:
        yield
    finally:
        for param in params:
            delattr(param, _MARK)  # it means something else to the optimizer


def _wire(ddp: Any, strict: bool, measure_waits: bool) -> None:
    for module, path in module_paths(ddp.module).items():
        if hasattr(module, "range_name"):
            setattr(module, "range_name", path)  # noqa: B010 - torch declares no such attribute
    ddp.wait_clock = WaitClock(next(ddp.module.parameters()).device, enabled=measure_waits)
    ddp.module.register_forward_pre_hook(lambda *_: _start_gathers(ddp), prepend=True)
    _watch_first_forward(ddp, strict)


def _budget(model_chunks: list[Any], collective_sms: int | None) -> None:
    """Hand the stages of all chunks one budget, since they share the groups, and surround every
    collective."""
    books = SmBudget(Streams(next(model_chunks[0].module.parameters()).device))
    lanes: dict[Any, _Lane] = {}
    for ddp in model_chunks:
        for group, buckets in buckets_of_groups(ddp).items():
            ranks = process_group(group)
            if ranks not in lanes:
                sms = ctas_of_group(ranks) if collective_sms is None else collective_sms
                lanes[ranks] = _Lane(0 if ranks.size() == 1 else sms or 0)
            name = ",".join(bucket.name for bucket in buckets)
            _surround(group, name, ddp.wait_clock, books, lanes[ranks])
    books.expect(*lanes.values())
    attach(books, model_chunks[0], nn.ModuleList(model_chunks))


@dataclass(frozen=True, eq=False)
class _Lane:
    """A process group, whose collectives run one after the other."""

    sms: int


def _surround(group: Any, name: str, clock: WaitClock, books: SmBudget, lane: _Lane) -> None:
    """Put a bucket group's collectives and its waits for them into ranges and into the books."""
    start_param_sync, start_grad_sync = group.start_param_sync, group.start_grad_sync

    def gather(*args: Any, **kwargs: Any) -> None:
        if group.param_gather_handle is not None:  # it only waits, then
            start_param_sync(*args, **kwargs)
            return
        with span(Kind.PARAM_GATHER, name):
            start_param_sync(*args, **kwargs)
        if group.param_gather_handle is not None:
            group.param_gather_handle = watched(group.param_gather_handle, Kind.PARAM_WAIT)

    def reduce(*args: Any, **kwargs: Any) -> None:
        if group.grad_reduce_handle is not None:  # of the first iteration: it does nothing, then
            start_grad_sync(*args, **kwargs)
            return
        with span(Kind.GRAD_REDUCE, name):
            start_grad_sync(*args, **kwargs)
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle = watched(group.grad_reduce_handle, Kind.GRAD_WAIT)

    def watched(handle: Any, kind: Kind) -> _Handle:
        flight = _Handle(handle, kind, name, clock, books, lane)
        books.issued(lane, flight)
        return flight

    group.start_param_sync, group.start_grad_sync = gather, reduce


@dataclass(frozen=True, eq=False)
class _Handle:
    """What Megatron-core waits for, in a range, timed, and in the books of the SMs."""

    handle: Any
    kind: Kind
    name: str
    clock: WaitClock
    books: SmBudget
    lane: _Lane

    def wait(self) -> None:
        with span(self.kind, self.name):
            self.clock.around(self.handle.wait)
        self.books.waited(self.lane, self)

    def done(self) -> bool:
        works = getattr(self.handle, "works", ())  # some of Megatron's handles can only be waited
        return bool(works) and all(work.is_completed() for work in works)


def _start_gathers(ddp: Any) -> None:
    """Issue the first gather of each chain, which its own pre-hook would issue too late to hide."""
    config = ddp.ddp_config
    hooked = bool(ddp.remove_forward_pre_hook_handles)  # off during Megatron's evaluation
    elsewhere = config.align_param_gather or ddp.overlap_param_gather_with_optimizer_step
    if not hooked or elsewhere or is_graph_capturing():
        return
    for chain in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups):
        if chain and not chain[-1].param_gather_dispatched:
            chain[-1].start_param_sync()


def _watch_first_forward(ddp: Any, strict: bool) -> None:
    watching = ExitStack()
    seen = watching.enter_context(watch_order(ddp))

    def done(*_: Any) -> None:
        watching.close()
        ddp.observed_order = tuple(seen)
        if strict:
            _raise_lost([ddp])

    watching.callback(ddp.module.register_forward_hook(done).remove)


def _raise_lost(model_chunks: Iterable[Any]) -> None:
    found = [str(finding) for ddp in model_chunks for finding in explain(ddp).findings]
    if found:
        raise SplitLostError("; ".join(found))
