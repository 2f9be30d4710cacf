"""The stages on Primus-Turbo's autograd nodes; shapes as in `megamoe.stages`.

Neither dispatch_weights nor l1_out is touched between the stages: the gradient of the routing
weights travels in the gradient slot of dispatch_weights, and rows of l1_out that no token fills
hold whatever the allocation held.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megamoe.backends.primus_turbo.buffer import SHARED, Shape, Ticket
from megamoe.backends.primus_turbo.limits import check_clamp
from megamoe.backends.primus_turbo.package import operations
from megamoe.errors import InputError

__all__ = ["Handle", "fused", "stage1", "stage2"]


class Handle(tuple[Tensor, ...]):
    """Primus-Turbo's 13 routing tables, and which forward made them."""

    ticket: Ticket
    tokens: int  # before padding

    def __new__(cls, tables: Iterable[Tensor], ticket: Ticket, tokens: int) -> Handle:
        handle = super().__new__(cls, tables)
        handle.ticket, handle.tokens = ticket, tokens
        return handle


def stage1(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return (l1_out, dispatch_weights, handle).

    Raises InputError, BackendUnavailableError (see `SharedBuffer.reserve`).
    """
    ticket = SHARED.reserve(group, _shape(topk_idx, w1, group), x.shape[0])
    l1_out, dispatch_weights, tables = operations().stage1(
        *_pad(ticket.tokens, x, topk_idx, topk_weights), w1, group
    )
    SHARED.watch(l1_out.grad_fn, ticket)
    return l1_out, dispatch_weights, Handle(tables, ticket, x.shape[0])


def stage2(
    l1_out: Tensor,
    dispatch_weights: Tensor,
    handle: tuple[Tensor, ...],
    topk_idx: Tensor,
    topk_weights: Tensor,
    w2: Tensor,
    clamp: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return y.

    Raises InputError for a handle that is not of this backend or is out of date,
    BackendUnavailableError for a clamp that the kernels do not have.
    """
    check_clamp(clamp)
    if not isinstance(handle, Handle):
        raise InputError("the handle is not from backend 'primus_turbo': pass stage 1's as it is")
    if topk_idx.shape[0] != handle.tokens:
        raise InputError(
            f"the handle is from another stage 1: it was made for {handle.tokens} tokens, but "
            f"topk_idx has {topk_idx.shape[0]}"
        )
    SHARED.check(handle.ticket)
    topk_idx, topk_weights = _pad_routing(handle.ticket.tokens, topk_idx, topk_weights)
    y: Tensor = operations().stage2(
        l1_out, dispatch_weights, tuple(handle), topk_idx, topk_weights, w2, group
    )
    SHARED.watch(y.grad_fn, handle.ticket)
    return y[: handle.tokens]


def fused(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    clamp: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return y of Primus-Turbo's single op; raises what the stages raise."""
    check_clamp(clamp)
    ticket = SHARED.reserve(group, _shape(topk_idx, w1, group), x.shape[0])
    y: Tensor = operations().fused(group, *_pad(ticket.tokens, x, topk_idx, topk_weights), w1, w2)
    SHARED.watch(y.grad_fn, ticket)
    return y[: x.shape[0]]


def _shape(topk_idx: Tensor, w1: Tensor, group: dist.ProcessGroup) -> Shape:
    local, rows, hidden = w1.shape
    experts = local * dist.get_world_size(group)
    return Shape(experts, topk_idx.shape[1], hidden, rows // 2)


def _pad(
    tokens: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append tokens that go to no expert."""
    more = tokens - x.shape[0]
    return F.pad(x, (0, 0, 0, more)) if more else x, *_pad_routing(tokens, topk_idx, topk_weights)


def _pad_routing(tokens: int, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    more = tokens - topk_idx.shape[0]
    if not more:
        return topk_idx, topk_weights
    return F.pad(topk_idx, (0, 0, 0, more), value=-1), F.pad(topk_weights, (0, 0, 0, more))
