"""Routing tables, built on the device: the row of the expert-major layout that each slot owns.

Every expert owns a run of rows that starts at a multiple of ``ROW_ALIGN``; inside the run the rows
follow slot order (slot = token * K + k), so the layout - and with it every sum over rows - is the
same in every run. Rows between an expert's last slot and its run's end are padding: ``row_token``
is -1 and the routing weight 0 there. Rows past the last run are never touched.

Three launches build the tables without the host seeing a single count: a histogram per block of
slots, a prefix sum over the blocks for a few experts per program, and a scatter. Buffers have their
worst-case size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["ROW_ALIGN", "RoutingTables", "build_tables", "max_rows"]

ROW_ALIGN = 128  # rows; every tile height divides it, so no tile spans two experts

_OWN = 8  # experts of one prefix program
_ONE_HOT = 4096  # elements of the [slots, experts] one-hot that one program ranks


class RoutingTables(NamedTuple):
    """The routing of one forward, as the kernels read it; all int32. It is the stages' handle.

    ``P`` is `max_rows`: static, so that no launch depends on a count.
    """

    slot_row: torch.Tensor  # [T, K] row of each slot; -1 where the slot is dropped
    row_token: torch.Tensor  # [P] token of each row; -1 in padding
    counts: torch.Tensor  # [g] rows of each expert that hold a token
    starts: (
        torch.Tensor
    )  # [g + 1] first row of each expert's run; the last entry is the rows in use
    tile_expert: torch.Tensor  # [P / ROW_ALIGN] expert that owns each aligned run of rows


def max_rows(slots: int, experts: int) -> int:
    """Return the rows that any routing of ``slots`` slots to ``experts`` experts fits in.

    Each expert with a token wastes at most ``ROW_ALIGN - 1`` rows, and at most ``slots`` have one.
    """
    worst = slots + torch.sym_min(slots, experts) * (ROW_ALIGN - 1)  # sizes may be symbolic
    return worst // ROW_ALIGN * ROW_ALIGN


@triton.jit
def _local_expert(ids_ptr, slots, mask, first_expert, all_experts, EXPERTS):
    """Load global ids and return local ones, EXPERTS for a slot that this rank does not hold."""
    ids = tl.load(ids_ptr + slots, mask=mask, other=-1)
    tl.device_assert(ids < all_experts, "megamoe: topk_idx holds an id >= the number of experts")
    local = ids - first_expert
    return tl.where((ids >= 0) & (local >= 0) & (local < EXPERTS), local, EXPERTS).to(tl.int32)


# debug=True keeps the id assertion in the compiled kernel (it fires on the device: no sync).
@triton.jit(debug=True)
def _histogram(
    ids_ptr, block_counts_ptr, counts_ptr, num_slots, first_expert, all_experts,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS_POW2)
    local = _local_expert(ids_ptr, slots, slots < num_slots, first_expert, all_experts, EXPERTS)
    hits = (local[:, None] == experts[None, :]).to(tl.int32)
    counts = tl.sum(hits, 0)
    tl.store(block_counts_ptr + block * EXPERTS + experts, counts, experts < EXPERTS)
    tl.atomic_add(counts_ptr + experts, counts, experts < EXPERTS)  # integers: any order will do


@triton.jit
def _take(values, experts, own):
    """Return values[own], where values[i] belongs to experts[i]."""
    return tl.sum(tl.where(experts[None, :] == own[:, None], values[None, :], 0), 1)


@triton.jit
def _prefix(
    block_counts_ptr, counts_ptr, starts_ptr, tile_expert_ptr, row_token_ptr, row_weight_ptr,
    num_blocks, num_tiles,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, OWN: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """For OWN experts: block_counts becomes each block's first row; their tiles and pad rows are
    marked. Every program works out where all runs start; the first one writes it down."""
    experts = tl.arange(0, EXPERTS_POW2)
    counts = tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0)
    runs = (counts + ALIGN - 1) // ALIGN * ALIGN
    ends = tl.cumsum(runs, 0)
    rows_used = tl.sum(runs, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + experts, ends - runs, experts < EXPERTS)
        tl.store(starts_ptr + EXPERTS, rows_used)
        # Rows past the last run belong to nobody; expert 0 keeps the entry a valid index.
        for first in range(rows_used // ALIGN, num_tiles, TILES):
            tiles = first + tl.arange(0, TILES)
            tl.store(tile_expert_ptr + tiles, tl.zeros([TILES], tl.int32), tiles < num_tiles)

    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    valid = (own < EXPERTS)[None, :]
    count = _take(counts, experts, own)
    end = _take(ends, experts, own)
    start = end - (count + ALIGN - 1) // ALIGN * ALIGN

    base = start
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        at = blocks[:, None] * EXPERTS + own[None, :]
        mask = (blocks[:, None] < num_blocks) & valid
        here = tl.load(block_counts_ptr + at, mask=mask, other=0)
        tl.store(block_counts_ptr + at, base[None, :] + tl.cumsum(here, 0) - here, mask)
        base += tl.sum(here, 0)

    for first in range(0, tl.max(end - start, 0) // ALIGN, TILES):
        tiles = start[None, :] // ALIGN + first + tl.arange(0, TILES)[:, None]
        owner = tl.zeros([TILES, OWN], tl.int32) + own[None, :]
        tl.store(tile_expert_ptr + tiles, owner, valid & (tiles * ALIGN < end[None, :]))

    rows = (start + count)[None, :] + tl.arange(0, ALIGN)[:, None]
    pad = valid & (rows < end[None, :])
    tl.store(row_token_ptr + rows, tl.full([ALIGN, OWN], -1, tl.int32), pad)
    tl.store(row_weight_ptr + rows, tl.zeros([ALIGN, OWN], tl.float32), pad)


@triton.jit(debug=True)
def _scatter(
    ids_ptr, weights_ptr, block_rows_ptr, slot_row_ptr, row_token_ptr, row_weight_ptr,
    num_slots, first_expert, all_experts, top_k,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    mask = slots < num_slots
    experts = tl.arange(0, EXPERTS_POW2)
    local = _local_expert(ids_ptr, slots, mask, first_expert, all_experts, EXPERTS)
    hits = (local[:, None] == experts[None, :]).to(tl.int32)
    base = tl.load(block_rows_ptr + block * EXPERTS + experts, mask=experts < EXPERTS, other=0)
    rank = tl.cumsum(hits, 0) - 1 + base[None, :]
    row = tl.sum(tl.where(hits > 0, rank, 0), 1)
    held = mask & (local < EXPERTS)
    tl.store(slot_row_ptr + slots, tl.where(held, row, -1), mask)
    tl.store(row_token_ptr + row, slots // top_k, held)
    tl.store(row_weight_ptr + row, tl.load(weights_ptr + slots, mask=held, other=0.0), held)


def build_tables(
    topk_idx: torch.Tensor,  # [T, K] int64, contiguous
    topk_weights: torch.Tensor,  # [T, K] fp32, contiguous
    experts: int,
    first_expert: int = 0,
    all_experts: int | None = None,
) -> tuple[RoutingTables, torch.Tensor]:
    """Return the tables of the slots held here, and the routing weight of each row, [P] fp32.

    Held are the ids from ``first_expert`` to ``first_expert + experts - 1``.

    A negative id drops its slot, so does an id that another rank holds. An id of ``all_experts``
    or more stops the device with an assertion (reported at the next synchronisation).
    """
    tokens, top_k = topk_idx.shape
    slots = tokens * top_k
    rows = max_rows(slots, experts)
    device = topk_idx.device
    experts_pow2 = triton.next_power_of_2(max(experts, 2))
    block = max(64, min(1024, _ONE_HOT // experts_pow2))
    blocks = triton.cdiv(slots, block)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tables = RoutingTables(
        slot_row=ints(tokens, top_k),
        row_token=ints(rows),
        counts=torch.zeros(experts, dtype=torch.int32, device=device),
        starts=ints(experts + 1),
        tile_expert=ints(rows // ROW_ALIGN),
    )
    row_weight = torch.empty(rows, dtype=torch.float32, device=device)
    block_counts = ints(blocks, experts)
    if all_experts is None:
        all_experts = experts
    sizes = {"EXPERTS": experts, "EXPERTS_POW2": experts_pow2}
    if blocks:
        _histogram[(blocks,)](
            topk_idx, block_counts, tables.counts, slots, first_expert, all_experts,
            **sizes, BLOCK=block,
        )  # fmt: skip
    _prefix[(triton.cdiv(experts, _OWN),)](
        block_counts, tables.counts, tables.starts, tables.tile_expert, tables.row_token,
        row_weight, blocks, rows // ROW_ALIGN,
        **sizes, OWN=_OWN, BLOCKS=512, TILES=128, ALIGN=ROW_ALIGN, num_warps=8,
    )  # fmt: skip
    if blocks:
        _scatter[(blocks,)](
            topk_idx, topk_weights, block_counts, tables.slot_row, tables.row_token,
            row_weight, slots, first_expert, all_experts, top_k, **sizes, BLOCK=block,
        )  # fmt: skip
    return tables, row_weight
