"""SwiGLU over expert rows: forward, and the one backward pass that emits all three of its results.

Both passes are bound by memory: each reads and writes every row once. Rows past the last run are
not touched (except for the routing-weight gradient, which is written for all of them); padding rows
are written as zeros by a select, because a product with zero would keep a NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["swiglu", "swiglu_backward"]


@triton.jit
def _clamped(gate, up, clamp, CLAMP: tl.constexpr):
    if CLAMP:
        gate = tl.minimum(gate, clamp)
        up = tl.minimum(tl.maximum(up, -clamp), clamp)
    return gate, up


@triton.jit
def _swiglu(
    l1_ptr, act_ptr, rows_used_ptr, clamp, WIDTH, num_rows,
    CLAMP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < tl.load(rows_used_ptr):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        mask = (row < num_rows)[:, None] & (col < WIDTH)[None, :]
        at = row.to(tl.int64)[:, None] * (2 * WIDTH) + col[None, :]
        gate = tl.load(l1_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(l1_ptr + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        gate, up = _clamped(gate, up, clamp, CLAMP)
        act = gate * tl.sigmoid(gate) * up
        out = act_ptr + row.to(tl.int64)[:, None] * WIDTH + col[None, :]
        tl.store(out, act.to(act_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(
    grad_act_ptr, l1_ptr, row_weight_ptr, row_token_ptr, grad_l1_ptr, grad_weight_ptr,
    rows_used_ptr, clamp, WIDTH, num_rows,
    CLAMP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = (row < num_rows) & (row < tl.load(rows_used_ptr))
    token = tl.load(row_token_ptr + row, mask=used, other=-1)
    held = (token >= 0)[:, None]
    weight = tl.load(row_weight_ptr + row, mask=used, other=0.0)[:, None]
    row64 = row.to(tl.int64)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, WIDTH, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        mask = used[:, None] & (col < WIDTH)
        read = mask & held
        at = row64 * (2 * WIDTH) + col
        gate = tl.load(l1_ptr + at, mask=read, other=0.0).to(tl.float32)
        up = tl.load(l1_ptr + at + WIDTH, mask=read, other=0.0).to(tl.float32)
        act_ptrs = grad_act_ptr + row64 * WIDTH + col
        grad = tl.load(act_ptrs, mask=read, other=0.0).to(tl.float32)
        # The clamp passes a gradient where it changed nothing, both bounds included.
        raw_gate, raw_up = gate, up
        gate, up = _clamped(gate, up, clamp, CLAMP)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        act = silu * up
        total += tl.sum(grad * act, 1)
        grad *= weight
        grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
        grad_gate = tl.where(held & (raw_gate == gate), grad_gate, 0.0)
        grad_up = tl.where(held & (raw_up == up), grad * silu, 0.0)
        dtype = grad_l1_ptr.dtype.element_ty
        tl.store(grad_l1_ptr + at, grad_gate.to(dtype), mask=mask)
        tl.store(grad_l1_ptr + at + WIDTH, grad_up.to(dtype), mask=mask)
        weighted = tl.where(held, weight * act, 0.0).to(dtype)
        tl.store(act_ptrs, weighted, mask=mask)
    tl.store(grad_weight_ptr + row, total, mask=row < num_rows)


def swiglu(l1: torch.Tensor, starts: torch.Tensor, clamp: float | None = None) -> torch.Tensor:
    """Return silu(gate) * up, [P, I], of ``l1`` [P, 2I] (gate columns, then up columns).

    ``starts`` [g + 1] int32 ends with the number of rows in use; later rows stay unwritten.
    """
    num_rows, width = l1.shape[0], l1.shape[1] // 2
    act = l1.new_empty(num_rows, width)
    if not num_rows:
        return act
    cols = min(2048, triton.next_power_of_2(width))
    rows = max(1, 2048 // cols)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(width, cols))
    _swiglu[grid](
        l1,
        act,
        starts[-1:],
        clamp or 0.0,
        width,
        num_rows,
        CLAMP=clamp is not None,
        ROWS=rows,
        COLS=cols,
    )
    return act


def swiglu_backward(
    grad_act: torch.Tensor,  # [P, I] dy @ W2, before the routing weight; overwritten
    l1: torch.Tensor,  # [P, 2I]
    row_weight: torch.Tensor,  # [P] fp32
    row_token: torch.Tensor,  # [P] int32, -1 in padding
    starts: torch.Tensor,  # [g + 1] int32
    clamp: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (grad of l1 [P, 2I], grad of row_weight [P] fp32).

    ``grad_act`` is left holding routing weight * act: what the gradient of the second weight needs.
    """
    num_rows, width = grad_act.shape
    grad_l1 = torch.empty_like(l1)
    grad_weight = torch.empty_like(row_weight)
    if not num_rows:
        return grad_l1, grad_weight
    cols = min(1024, triton.next_power_of_2(width))
    rows = max(1, 2048 // cols)
    _swiglu_backward[(triton.cdiv(num_rows, rows),)](
        grad_act, l1, row_weight, row_token, grad_l1, grad_weight, starts[-1:],
        clamp or 0.0, width, num_rows, CLAMP=clamp is not None, ROWS=rows, COLS=cols,
    )  # fmt: skip
    return grad_l1, grad_weight
