"""The four functions of the backend, composed of the operators; shapes as in `megamoe.stages`.

The handle is `tables.RoutingTables`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.backends import Group
from megamoe.backends.triton.ops import ops
from megamoe.backends.triton.router import routable
from megamoe.backends.triton.support import runs_on
from megamoe.backends.triton.tables import RoutingTables
from megamoe.config import MegaMoEConfig

__all__ = ["fused_router", "stage1_backward", "stage1_forward", "stage2_backward", "stage2_forward"]


def stage1_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor, group: Group
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return (l1_out, dispatch_weights, tables)."""
    l1_out, dispatch_weights, tables = ops.stage1_forward(x, topk_idx, topk_weights, w1)
    return l1_out, dispatch_weights, RoutingTables(*tables)


def stage2_forward(
    l1_out: Tensor,
    handle: tuple[Tensor, ...],
    topk_weights: Tensor,
    w2: Tensor,
    clamp: float | None,
    group: Group,
) -> Tensor:
    """Return y."""
    return ops.stage2_forward(l1_out, topk_weights, w2, list(handle), clamp)


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
    """Return (grad l1_out, grad dispatch_weights, dW2). The first two come in one pass with what
    dW2 needs, so they are computed whoever asks."""
    tables = list(handle)
    d_l1, d_weights, weighted_act = ops.stage2_backward(
        dy, l1_out, dispatch_weights, w2, tables, clamp
    )
    dw2 = _weight_grad(w2, dy, weighted_act, tables, tokens_first=True) if needs_w2 else None
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
    """Return (dx, grad topk_weights, dW1)."""
    tables = list(handle)
    dx = d_weights = dw1 = None
    if needs_w1:
        dw1 = _weight_grad(w1, x, d_l1, tables, tokens_first=False)
    if needs_x:
        dx = ops.rows_to_tokens(d_l1, w1, tables)
    if needs_weights:
        d_weights = ops.slot_values(d_dispatch_weights, RoutingTables(*handle).slot_row)
    return dx, d_weights, dw1


def fused_router(
    logits: Tensor, config: MegaMoEConfig, balance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return (ids, weights, score sums, tokens per expert), or None where the kernel does not fit.

    It does for fp32 logits on a device that runs the kernels, with expert and group counts that
    are powers of two if there are groups. Ties go to the lower id.
    """
    groups, group_topk = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is None or group_topk is None:
        groups = group_topk = 1
    if not (runs_on(logits.device) and logits.dtype == torch.float32):
        return None
    if not routable(logits.shape[1], groups):
        return None
    scaling = config.moe_router_topk_scaling_factor
    return ops.route(
        logits,
        config.moe_router_topk,
        config.moe_router_score_function == "sigmoid",
        config.moe_router_pre_softmax,
        groups,
        group_topk,
        1.0 if scaling is None else scaling,
        balance,
    )


def _weight_grad(
    weight: Tensor, tokens: Tensor, rows: Tensor, tables: list[Tensor], *, tokens_first: bool
) -> Tensor:
    """Return the weight's gradient, or write it to fp32 memory where the engine offers some.

    The offer is Megatron's: a parameter with a ``main_grad`` and a ``grad_added_to_main_grad``; a
    ``get_main_grad()`` may refuse for now, by None. The gradient is added to what is there, unless
    a true ``overwrite_main_grad`` says that it means nothing. The flag is then set, and a stand-in
    is returned, so that autograd still runs the parameter's hooks: with ``zero_out_wgrad`` a zero
    that takes no memory, else an unwritten tensor, which nobody may read.
    """
    main_grad = _offered(weight)
    if main_grad is None:
        return ops.weight_grad(tokens, rows, tables, tokens_first)
    # Another use of the weight in this backward may have been here first.
    add = weight.grad_added_to_main_grad or not getattr(weight, "overwrite_main_grad", False)  # type: ignore[attr-defined]
    ops.weight_grad_out(main_grad, tokens, rows, tables, tokens_first, add)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch._efficientzerotensor(weight.shape, dtype=weight.dtype, device=weight.device)
    return torch.empty_like(weight)


def _offered(weight: Any) -> Tensor | None:
    """Return the fp32 memory that the engine offers now, or None."""
    # A compiled backward knows no attributes of parameters; its gradients go through autograd.
    if torch.compiler.is_compiling() or getattr(weight, "grad_added_to_main_grad", None) is None:
        return None
    ask = getattr(weight, "get_main_grad", None)
    main_grad: Tensor | None = ask() if ask else weight.main_grad
    # Megatron-core's may be in bf16, where each addition would round.
    return main_grad if main_grad is not None and main_grad.dtype is torch.float32 else None
