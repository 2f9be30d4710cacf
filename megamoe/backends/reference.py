"""Backend `reference`: the stages in plain torch, on any device and any process group.

It is the oracle that faster backends are held against, so it reads as the definition: dispatch,
GEMM1 | SwiGLU, GEMM2, combine, and their gradients. SwiGLU and the combine compute in fp32 (fp64
for fp64 rows) and round once. Shapes are those of `megamoe.stages`; `Routes` is the handle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe import checks
from megamoe.backends import Group
from megamoe.backends.dispatch import (
    Routes,
    combine,
    dispatch,
    dispatch_slots,
    plan_routes,
    undispatch,
)
from megamoe.backends.products import rows_by_weight, rows_by_weight_t, weight_grad
from megamoe.errors import InputError

__all__ = [
    "check_stage1",
    "stage1_backward",
    "stage1_forward",
    "stage2_backward",
    "stage2_forward",
]


def check_stage1(x: Tensor, topk_idx: Tensor, w1: Tensor, group: Group) -> None:
    """Raise InputError for an id out of range. Reads the ids on the host."""
    checks.check_ids(topk_idx, w1, group)


def stage1_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor, group: Group
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return (l1_out, dispatch_weights, routes): dispatch and GEMM1."""
    routes = plan_routes(topk_idx, w1.shape[0], group)
    dispatch_weights = dispatch_slots(topk_weights, routes, group)
    rows = dispatch(x, routes, group)
    return rows_by_weight_t(rows, w1, routes.expert_rows), dispatch_weights, routes


def stage2_forward(
    l1_out: Tensor,
    handle: tuple[Tensor, ...],
    topk_weights: Tensor,
    w2: Tensor,
    clamp: float | None,
    group: Group,
) -> Tensor:
    """Return y: SwiGLU, GEMM2 and the weighted combine."""
    routes = Routes(*handle)
    _check_handle(routes, topk_weights, w2)
    act = _swiglu(l1_out, clamp).act.to(l1_out.dtype)
    returned = undispatch(rows_by_weight_t(act, w2, routes.expert_rows), routes, group)
    return combine(returned, routes, topk_weights, _math_dtype(l1_out))


def stage2_backward(
    dy: Tensor,
    l1_out: Tensor,
    dispatch_weights: Tensor,
    handle: tuple[Tensor, ...],
    w2: Tensor,
    clamp: float | None,
    group: Group,
    needs_rows: bool,
    needs_w2: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (grad l1_out, grad dispatch_weights, dW2).

    The routing weight of a row multiplies its expert's output, so its gradient is the product of
    that output with dy; here it is taken one product earlier, as sum(dact * act).
    """
    routes = Routes(*handle)
    dy_rows = dispatch(dy, routes, group)
    swiglu = _swiglu(l1_out, clamp)
    row_weight = dispatch_weights.to(swiglu.act.dtype)[:, None]
    d_l1 = d_weights = dw2 = None
    if needs_w2:
        weighted = (swiglu.act * row_weight).to(l1_out.dtype)
        dw2 = weight_grad(dy_rows, weighted, routes.expert_rows)
    if needs_rows:
        # Before weighting: a row of weight zero has a gradient too.
        d_act = rows_by_weight(dy_rows, w2, routes.expert_rows).to(swiglu.act.dtype)
        d_weights = (d_act * swiglu.act).sum(1).to(dispatch_weights.dtype)
        d_l1 = _swiglu_backward(d_act * row_weight, swiglu).to(l1_out.dtype)
    return d_l1, d_weights, dw2


def stage1_backward(
    d_l1: Tensor,
    d_dispatch_weights: Tensor,
    x: Tensor,
    handle: tuple[Tensor, ...],
    w1: Tensor,
    group: Group,
    needs_x: bool,
    needs_weights: bool,
    needs_w1: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, grad topk_weights, dW1); x is dispatched again instead of having been kept."""
    routes = Routes(*handle)
    dx = d_weights = dw1 = None
    if needs_w1:
        dw1 = weight_grad(d_l1, dispatch(x, routes, group), routes.expert_rows)
    if needs_x:
        returned = undispatch(rows_by_weight(d_l1, w1, routes.expert_rows), routes, group)
        dx = combine(returned, routes, None, _math_dtype(x))
    if needs_weights:
        d_weights = undispatch(d_dispatch_weights, routes, group)[routes.row_of_slot]
    return dx, d_weights, dw1


def _check_handle(routes: Routes, topk_weights: Tensor, w2: Tensor) -> None:
    made_for = (*routes.row_of_slot.shape, len(routes.expert_rows))
    given = (*topk_weights.shape, w2.shape[0])
    if made_for != given:
        raise InputError(
            "the handle is from another stage 1: it was made for (tokens, k, local experts) "
            f"{made_for}, but topk_weights and w2 are for {given}"
        )


def _math_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


class _SwiGLU(NamedTuple):
    act: Tensor  # [P, I]
    gate: Tensor  # [P, I], clamped
    up: Tensor  # [P, I], clamped
    keep_gate: Tensor | None  # [P, I] bool: where the clamp lets the gradient through
    keep_up: Tensor | None


def _swiglu(l1_out: Tensor, clamp: float | None) -> _SwiGLU:
    """silu(gate) * up; with a clamp c, gate is first cut to (-inf, c] and up to [-c, c]."""
    gate, up = l1_out.to(_math_dtype(l1_out)).chunk(2, dim=1)
    keep_gate = keep_up = None
    if clamp is not None:
        keep_gate, keep_up = gate <= clamp, up.abs() <= clamp
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return _SwiGLU(torch.nn.functional.silu(gate) * up, gate, up, keep_gate, keep_up)


def _swiglu_backward(d_act: Tensor, forward: _SwiGLU) -> Tensor:
    """Return [P, 2I]: the gradient of gate, then that of up."""
    sigmoid = torch.sigmoid(forward.gate)
    d_gate = d_act * forward.up * sigmoid * (1 + forward.gate * (1 - sigmoid))
    d_up = d_act * forward.gate * sigmoid
    if forward.keep_gate is not None and forward.keep_up is not None:
        d_gate = d_gate.where(forward.keep_gate, 0)
        d_up = d_up.where(forward.keep_up, 0)
    return torch.cat((d_gate, d_up), dim=1)
