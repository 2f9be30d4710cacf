"""The autograd nodes: stage 1, stage 2, and both in one (the fused baseline).

Two nodes instead of one is what this library is about: autograd runs the gradient hooks of W2
between the backward of stage 2 and that of stage 1, so dW2's collective can start there. The
fused node runs the very same backend bodies, but both weight gradients leave it together.

Every body runs inside its profiler range, forward and backward, in either form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamoe.backends import Backend, Group
from profiling.ranges import Kind, span

__all__ = ["FusedStages", "Stage1", "Stage2"]


class Stage1(torch.autograd.Function):
    """(x, topk_weights, w1) -> (l1_out, dispatch_weights, *handle)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        group: Group,
        name: str,
        backend: Backend,
    ) -> tuple[Tensor, ...]:
        with span(Kind.STAGE1_FORWARD, name):
            l1_out, dispatch_weights, handle = backend.stage1_forward(
                x, topk_idx, topk_weights, w1, group
            )
        ctx.save_for_backward(x, w1, *handle)
        ctx.mark_non_differentiable(*handle)
        ctx.group, ctx.name, ctx.backend = group, name, backend
        return l1_out, dispatch_weights, *handle

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_l1: Tensor, d_dispatch_weights: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, w1, *handle = ctx.saved_tensors
        needs_x, _, needs_weights, needs_w1 = ctx.needs_input_grad[:4]
        with span(Kind.STAGE1_BACKWARD, ctx.name):
            dx, d_weights, dw1 = ctx.backend.stage1_backward(
                d_l1,
                d_dispatch_weights,
                x,
                tuple(handle),
                w1,
                ctx.group,
                needs_x,
                needs_weights,
                needs_w1,
            )
        return dx, None, d_weights, dw1, None, None, None


class Stage2(torch.autograd.Function):
    """(l1_out, dispatch_weights, w2) -> y; the gradient of the routing weights leaves through
    dispatch_weights, from where stage 1 carries it on to topk_weights."""

    @staticmethod
    def forward(
        ctx: Any,
        l1_out: Tensor,
        dispatch_weights: Tensor,
        topk_weights: Tensor,
        w2: Tensor,
        clamp: float | None,
        group: Group,
        name: str,
        backend: Backend,
        *handle: Tensor,
    ) -> Tensor:
        with span(Kind.STAGE2_FORWARD, name):
            y = backend.stage2_forward(l1_out, handle, topk_weights, w2, clamp, group)
        ctx.save_for_backward(l1_out, dispatch_weights, w2, *handle)
        ctx.clamp, ctx.group, ctx.name, ctx.backend = clamp, group, name, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        l1_out, dispatch_weights, w2, *handle = ctx.saved_tensors
        needs_l1, needs_dispatch, _, needs_w2 = ctx.needs_input_grad[:4]
        with span(Kind.STAGE2_BACKWARD, ctx.name):
            d_l1, d_dispatch, dw2 = ctx.backend.stage2_backward(
                dy,
                l1_out,
                dispatch_weights,
                tuple(handle),
                w2,
                ctx.clamp,
                ctx.group,
                needs_l1 or needs_dispatch,
                needs_w2,
            )
        return d_l1, d_dispatch, None, dw2, *(None,) * (4 + len(handle))


class FusedStages(torch.autograd.Function):
    """(x, topk_weights, w1, w2) -> y in one node: the baseline that cannot hide a collective."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        clamp: float | None,
        group: Group,
        name: str,
        backend: Backend,
    ) -> Tensor:
        with span(Kind.STAGE1_FORWARD, name):
            l1_out, dispatch_weights, handle = backend.stage1_forward(
                x, topk_idx, topk_weights, w1, group
            )
        with span(Kind.STAGE2_FORWARD, name):
            y = backend.stage2_forward(l1_out, handle, topk_weights, w2, clamp, group)
        ctx.save_for_backward(x, l1_out, dispatch_weights, w1, w2, *handle)
        ctx.clamp, ctx.group, ctx.name, ctx.backend = clamp, group, name, backend
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, l1_out, dispatch_weights, w1, w2, *tables = ctx.saved_tensors
        handle = tuple(tables)
        needs_x, _, needs_weights, needs_w1, needs_w2 = ctx.needs_input_grad[:5]
        needs_stage1 = needs_x or needs_weights or needs_w1
        with span(Kind.STAGE2_BACKWARD, ctx.name):
            d_l1, d_dispatch, dw2 = ctx.backend.stage2_backward(
                dy,
                l1_out,
                dispatch_weights,
                handle,
                w2,
                ctx.clamp,
                ctx.group,
                needs_stage1,
                needs_w2,
            )
        dx = d_weights = dw1 = None
        if needs_stage1:
            with span(Kind.STAGE1_BACKWARD, ctx.name):
                dx, d_weights, dw1 = ctx.backend.stage1_backward(
                    d_l1, d_dispatch, x, handle, w1, ctx.group, needs_x, needs_weights, needs_w1
                )
        return dx, None, d_weights, dw1, dw2, None, None, None, None
