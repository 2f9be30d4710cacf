"""Between tokens and expert rows: the gather to rows, and the gather-and-sum back.

Where a product can gather its own operand it does; dW1 cannot at full speed (measured), so x is
gathered for it here, and dropped with the call. On the way back each token sums its own rows in the order of its slots, in fp32: no atomics, so the same bits in
every run, and every row is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.backends.triton.peers import row_pointer

__all__ = ["combine", "gather_rows", "slot_values"]


@triton.jit
def _gather_rows(
    tokens_ptr, row_token_ptr, rows_used_ptr, out_ptr, WIDTH, token_stride, COLS: tl.constexpr
):
    row = tl.program_id(0)
    if row < tl.load(rows_used_ptr):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        token = tl.load(row_token_ptr + row)
        source = row_pointer(tokens_ptr, token, token_stride) + col
        value = tl.load(source, mask=(token >= 0) & (col < WIDTH), other=0.0)
        tl.store(out_ptr + row.to(tl.int64) * WIDTH + col, value, mask=col < WIDTH)


@triton.jit
def _combine(
    rows_ptr, slot_row_ptr, slot_weight_ptr, out_ptr, WIDTH, row_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < WIDTH
    total = tl.zeros([COLS], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token.to(tl.int64) * TOP_K + k
        row = tl.load(slot_row_ptr + slot)
        held = row >= 0
        value = tl.load(
            row_pointer(rows_ptr, row, row_stride) + col, mask=inside & held, other=0.0
        ).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(slot_weight_ptr + slot)
        total += value
    out = out_ptr + token.to(tl.int64) * WIDTH + col
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slot_values(values_ptr, slot_row_ptr, out_ptr, num_slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    row = tl.load(slot_row_ptr + slot, mask=inside, other=-1)
    tl.store(out_ptr + slot, tl.load(values_ptr + row, mask=row >= 0, other=0.0), mask=inside)


def gather_rows(
    tokens: torch.Tensor,  # [T, H]
    row_token: torch.Tensor,  # [P] int32, -1 in padding
    starts: torch.Tensor,  # [g + 1] int32
) -> torch.Tensor:
    """Return [P, H]: the token of each row, zeros in padding; rows past the last run unwritten."""
    num_rows, width = row_token.shape[0], tokens.shape[1]
    out = tokens.new_empty(num_rows, width)
    if not num_rows:
        return out
    cols = min(2048, triton.next_power_of_2(width))
    _gather_rows[(num_rows, triton.cdiv(width, cols))](
        tokens, row_token, starts[-1:], out, width, tokens.stride(0), COLS=cols
    )
    return out


def combine(
    rows: torch.Tensor,  # [P, H]
    slot_row: torch.Tensor,  # [T, K] int32, -1 where dropped
    slot_weight: torch.Tensor | None,  # [T, K] fp32; None sums the rows as they are
) -> torch.Tensor:
    """Return [T, H]: the sum over k of (weight *) the slot's row, in fp32, rounded once."""
    tokens, top_k = slot_row.shape
    width = rows.shape[1]
    out = rows.new_empty(tokens, width)
    if not tokens:
        return out
    cols = min(2048, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, cols))](
        rows, slot_row, rows if slot_weight is None else slot_weight, out, width, rows.stride(0),
        TOP_K=top_k, WEIGHTED=slot_weight is not None, COLS=cols,
    )  # fmt: skip
    return out


def slot_values(values: torch.Tensor, slot_row: torch.Tensor) -> torch.Tensor:
    """Return [T, K] fp32: each slot's entry of ``values`` [P], 0 where the slot is dropped."""
    out = torch.empty(slot_row.shape, dtype=torch.float32, device=values.device)
    if not slot_row.numel():
        return out
    _slot_values[(triton.cdiv(slot_row.numel(), 1024),)](
        values, slot_row, out, slot_row.numel(), BLOCK=1024
    )
    return out
