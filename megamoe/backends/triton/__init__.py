"""Backend `triton`: the stages as Triton kernels for NVIDIA Hopper GPUs.

    stage 1 forward    tables | x gathered into the A loads of GEMM1
    stage 2 forward    SwiGLU | GEMM2 | weighted gather-and-sum to the tokens
    stage 2 backward   dy gathered into the A loads of dy @ W2 | SwiGLU backward | dW2
    stage 1 backward   dW1, x gathered again inside the product | dl1 @ W1 | gather-and-sum to dx

Nothing waits for the device, no launch depends on a count, and every result has the same bits in
every run. Rows are expert-major with each expert's run padded to a multiple of ROW_ALIGN; rows past
the last run hold whatever the allocation held. Shapes are those of `megamoe.stages`; the handle is
`tables.RoutingTables`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .activation import swiglu, swiglu_backward
from .combine import combine, slot_values
from .gemm import GemmConfig, rows_by_weight, weight_grad
from .tables import RoutingTables, build_tables

__all__ = ["stage1_backward", "stage1_forward", "stage2_backward", "stage2_forward"]

Group = dist.ProcessGroup | None
CONFIG = {k: GemmConfig() for k in ("fc1", "fc2", "dact", "dx", "dw1", "dw2")}
PROGRAMS = 2


def stage1_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor, group: Group
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return (l1_out, dispatch_weights, tables)."""
    tables, dispatch_weights = build_tables(
        topk_idx.contiguous(), topk_weights.contiguous(), w1.shape[0]
    )
    l1_out = rows_by_weight(
        x.contiguous(), w1.contiguous(), tables, gather=True, transposed=True,
        config=CONFIG["fc1"], programs=PROGRAMS,
    )  # fmt: skip
    return l1_out, dispatch_weights, tables


def stage2_forward(
    l1_out: Tensor,
    handle: tuple[Tensor, ...],
    topk_weights: Tensor,
    w2: Tensor,
    clamp: float | None,
    group: Group,
) -> Tensor:
    """Return y."""
    tables = RoutingTables(*handle)
    act = swiglu(l1_out, tables.starts, clamp)
    rows = rows_by_weight(
        act, w2.contiguous(), tables, gather=False, transposed=True, config=CONFIG["fc2"], programs=PROGRAMS
    )
    return combine(rows, tables.slot_row, topk_weights.contiguous())


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
    """Return (grad l1_out, grad dispatch_weights, dW2)."""
    tables = RoutingTables(*handle)
    dy = dy.contiguous()
    d_act = rows_by_weight(
        dy, w2.contiguous(), tables, gather=True, transposed=False, config=CONFIG["dact"], programs=PROGRAMS
    )
    d_l1, weighted, d_weights = swiglu_backward(
        d_act, l1_out, dispatch_weights, tables.row_token, tables.starts, clamp
    )
    dw2 = None
    if needs_w2:
        dw2 = weight_grad(
            dy, weighted, tables, gather_a=True, gather_b=False, config=CONFIG["dw2"], programs=PROGRAMS
        )
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
    tables = RoutingTables(*handle)
    d_l1 = d_l1.contiguous()
    dx = d_weights = dw1 = None
    if needs_w1:
        dw1 = weight_grad(
            d_l1, x.contiguous(), tables, gather_a=False, gather_b=True, config=CONFIG["dw1"], programs=PROGRAMS
        )
    if needs_x:
        rows = rows_by_weight(
            d_l1, w1.contiguous(), tables, gather=False, transposed=False, config=CONFIG["dx"], programs=PROGRAMS
        )
        dx = combine(rows, tables.slot_row, None)
    if needs_weights:
        d_weights = slot_values(d_dispatch_weights, tables.slot_row)
    return dx, d_weights, dw1
