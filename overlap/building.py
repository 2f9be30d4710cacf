"""Makes the buckets: their layouts, the transports of each group, and the memory these ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.bucket import Bucket
from overlap.budget import SmBudget
from overlap.buffer import FlatBuffer
from overlap.collectives import Collective, Gathers, Reduces
from overlap.config import OverlapConfig
from overlap.copy_engine import PullGather, PullReduce, Staging
from overlap.errors import TransportError
from overlap.groups import ProcessGroups
from overlap.layout import BucketLayout, ParamSpec, plan_buckets
from overlap.streams import Streams
from overlap.symmetric import obstacle
from overlap.waiting import WaitClock

__all__ = ["make_buckets"]

_log = logging.getLogger("overlap")


class _Transports(NamedTuple):
    gather: Gathers
    reduce: Reduces


def make_buckets(
    specs: Sequence[ParamSpec],
    trainable: dict[str, nn.Parameter],
    config: OverlapConfig,
    groups: ProcessGroups,
    device: torch.device,
    streams: Streams,
    clock: WaitClock,
) -> tuple[tuple[Bucket, ...], SmBudget]:
    """Lay the parameters out and move them into buckets, in the order of first registration. A
    collective where a transport has memory of its own.

    Raises:
        TransportError: A transport that was asked for cannot run here.
    """
    dp_size = dist.get_world_size(groups.dp)
    layouts = plan_buckets(
        specs,
        dense_group_size=dp_size,
        expert_group_size=dist.get_world_size(groups.edp),
        bucket_bytes=config.bucket_bytes,
        share_expert_buckets=config.share_expert_buckets,
    )
    reduce_dtype = config.reduce_dtype or config.grad_dtype
    buckets: dict[BucketLayout, Bucket] = {}
    budget = SmBudget(streams)
    staging = cache(partial(Staging, device, streams))
    for expert, group in ((False, groups.dp), (True, groups.edp)):
        own = [layout for layout in layouts if layout.expert is expert]
        if not own:
            continue
        gather, reduce = _transports(config, groups, group, device, streams, staging)
        if dist.get_world_size(group) > 1:
            budget.expect(gather, reduce)
        params: dict[BucketLayout, Tensor] = {}
        for dtype in dict.fromkeys(layout.dtype for layout in own):
            params.update(_buffer([x for x in own if x.dtype is dtype], gather.allocate, dtype))
        # What travels lies in the transport's memory, in the dtype in which it travels.
        wires: dict[BucketLayout, Tensor] = {}
        if isinstance(reduce, Collective) or reduce_dtype is config.grad_dtype:
            grads = _buffer(own, reduce.allocate, config.grad_dtype)
        else:
            grads = _buffer(own, Collective(group, device, 0).allocate, config.grad_dtype)
            wires = _buffer(own, reduce.allocate, reduce_dtype)
        for layout in own:
            bucket = Bucket(
                layout,
                params[layout],
                grads[layout],
                group,
                streams,
                clock,
                budget,
                gather_by=gather,
                reduce_by=reduce,
                reduce_dtype=reduce_dtype,
                scale=1 / dp_size if config.grad_reduction == "average" else 1.0,
                wire=wires.get(layout),
            )
            bucket.attach([trainable[member.spec.name] for member in layout.members])
            buckets[layout] = bucket
    return tuple(buckets[layout] for layout in layouts), budget


def _buffer(
    layouts: Sequence[BucketLayout],
    allocate: Callable[[int, torch.dtype], Tensor],
    dtype: torch.dtype,
) -> dict[BucketLayout, Tensor]:
    buffer = FlatBuffer(layouts, lambda numel: allocate(numel, dtype))
    return dict(zip(layouts, buffer.slices, strict=True))


def _transports(
    config: OverlapConfig,
    groups: ProcessGroups,
    group: dist.ProcessGroup,
    device: torch.device,
    streams: Streams,
    staging: Callable[[], Staging],
) -> _Transports:
    """Who moves the buckets of one group, each way."""
    sms = groups.collective_sms if config.collective_sms is None else config.collective_sms
    collective = Collective(group, device, sms or 0)
    wanted = (config.param_gather_transport, config.grad_reduce_transport)
    if dist.get_world_size(group) == 1 or not {"auto", "copy_engine"} & set(wanted):
        return _Transports(collective, collective)
    reason = obstacle(device, group)
    if reason is not None:
        if "copy_engine" in wanted:
            raise TransportError(
                f'the transport "copy_engine" cannot run here, for {reason}: use "collective"'
            )
        _log.info("collectives of %s use the group's own transport: %s", group.group_name, reason)
        return _Transports(collective, collective)
    gather, reduce = (way in ("auto", "copy_engine") for way in wanted)
    own_sms = {} if config.collective_sms is None else {"sms": config.collective_sms}
    return _Transports(
        PullGather(group, device, streams) if gather else collective,
        PullReduce(group, device, streams, staging(), **own_sms) if reduce else collective,
    )
