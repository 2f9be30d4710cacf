"""Between tokens and expert rows: the gather to rows, and the gather-and-sum back.

Where a product can gather its own operand it does; dW1 cannot at full speed (measured), so x is
gathered for it here, and dropped with the call. On the way back each token sums its own rows in the
order of its slots, in fp32: no atomics, so the same bits in every run, and every row is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.backends.triton.peers import row_pointer
from megamoe.backends.triton.tables import RoutingTables

__all__ = ["combine", "gather_rows", "slot_values"]

_PADDING = 16  # rows that one program looks at for padding


@triton.jit
def _gather_rows(
    tokens_ptr, slot_row_ptr, row_token_ptr, rows_used_ptr, out_ptr, num_tokens, WIDTH,
    token_stride,
    TOP_K: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Write each token to its rows; the programs after those of the tokens clear padding."""
    token_programs = tl.cdiv(num_tokens, TOKENS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    if tl.program_id(0) < token_programs:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        inside = (token < num_tokens)[:, None] & (col < WIDTH)
        value = tl.load(row_pointer(tokens_ptr, token, token_stride)[:, None] + col, mask=inside)
        for k in tl.static_range(TOP_K):
            slot = token.to(tl.int64) * TOP_K + k
            row = tl.load(slot_row_ptr + slot, mask=token < num_tokens, other=-1)
            out = row_pointer(out_ptr, row, WIDTH)[:, None] + col
            tl.store(out, value, mask=inside & (row >= 0)[:, None])
    else:
        first = (tl.program_id(0) - token_programs) * PADDING
        rows_used = tl.load(rows_used_ptr)
        if first < rows_used:
            row = first + tl.arange(0, PADDING)
            empty = tl.load(row_token_ptr + row, mask=row < rows_used, other=0) < 0
            if tl.max(empty.to(tl.int32), 0) > 0:
                zeros = tl.zeros([PADDING, COLS], out_ptr.dtype.element_ty)
                out = row_pointer(out_ptr, row, WIDTH)[:, None] + col
                tl.store(out, zeros, mask=empty[:, None] & (col < WIDTH))


@triton.jit
def _combine(
    rows_ptr, slot_row_ptr, slot_weight_ptr, out_ptr, num_tokens, WIDTH, row_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (token < num_tokens)[:, None] & (col < WIDTH)
    total = tl.zeros([TOKENS, COLS], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token.to(tl.int64) * TOP_K + k
        row = tl.load(slot_row_ptr + slot, mask=token < num_tokens, other=-1)
        held = row >= 0
        source = row_pointer(rows_ptr, row, row_stride)[:, None] + col
        value = tl.load(source, mask=inside & held[:, None], other=0.0).to(tl.float32)
        if WEIGHTED:
            # Masked too: a dropped slot may carry any weight, and 0 * NaN is NaN.
            value *= tl.load(slot_weight_ptr + slot, mask=held, other=0.0)[:, None]
        total += value
    out = row_pointer(out_ptr, token, WIDTH)[:, None] + col
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slot_values(values_ptr, slot_row_ptr, out_ptr, num_slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    row = tl.load(slot_row_ptr + slot, mask=inside, other=-1)
    tl.store(out_ptr + slot, tl.load(values_ptr + row, mask=row >= 0, other=0.0), mask=inside)


def gather_rows(
    tokens: torch.Tensor,  # [T, H]
    tables: RoutingTables,
) -> torch.Tensor:
    """Return [P, H]: the token of each row, zeros in padding; rows past the last run unwritten.

    Every token is read once and written to its rows: row by row it would be read again for each of
    its experts, by then mostly from memory.
    """
    num_rows, (num_tokens, width) = tables.row_token.shape[0], tokens.shape
    out = tokens.new_empty(num_rows, width)
    if not num_rows:
        return out
    cols = min(2048, triton.next_power_of_2(width))
    block = 2048 // cols
    programs = triton.cdiv(num_tokens, block) + triton.cdiv(num_rows, _PADDING)
    _gather_rows[(programs, triton.cdiv(width, cols))](
        tokens, tables.slot_row, tables.row_token, tables.starts[-1:], out, num_tokens, width,
        tokens.stride(0), TOP_K=tables.slot_row.shape[1], TOKENS=block, COLS=cols,
        PADDING=_PADDING,
    )  # fmt: skip
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
    block = 2048 // cols
    _combine[(triton.cdiv(tokens, block), triton.cdiv(width, cols))](
        rows, slot_row, rows if slot_weight is None else slot_weight, out, tokens, width,
        rows.stride(0), TOP_K=top_k, WEIGHTED=slot_weight is not None, TOKENS=block, COLS=cols,
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
