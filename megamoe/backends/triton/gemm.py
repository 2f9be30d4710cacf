"""The grouped product of expert rows and their weights, a persistent kernel.

An operand that is already expert-major comes through a TMA descriptor; one that must be gathered by
token comes through pointers (Hopper's TMA cannot gather), with the row map read inside the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.backends.triton.draws import draw_counter, draw_tiles, next_draw, tile_order
from megamoe.backends.triton.peers import row_pointer
from megamoe.backends.triton.schedule import Grid, tiles_per_draw
from megamoe.backends.triton.tables import ROW_ALIGN, RoutingTables
from megamoe.backends.triton.tuning import TileConfig

__all__ = ["rows_by_weight"]


@triton.jit
def _rows_tiles(
    first, end, stride, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
    a_stride,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The tiles first, first + stride, ... below ``end``, in one loop over the steps of all.

    So that the loads of a tile start while the one before it is being stored. Triton would flatten
    two loops here, but take twice the instructions to clear the sum.
    """
    inner = tl.arange(0, BLOCK_K)
    tile = first - stride
    row, col, expert, k = 0, 0, 0, 0
    if GATHER:
        held = tl.full([BLOCK_M], 0, tl.int1)
        a_ptrs = row_pointer(a, tl.zeros([BLOCK_M], tl.int32), a_stride)[:, None] + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.range(0, tl.cdiv(end - first, stride) * tl.cdiv(K, BLOCK_K)):
        if k == 0:
            tile += stride
            m, n = tile_order(tile, m_tiles, n_tiles, GROUP_M)
            row = m * BLOCK_M
            col = n * BLOCK_N
            expert = tl.load(tile_expert_ptr + row // ALIGN)
            if GATHER:
                token = tl.load(row_token_ptr + row + tl.arange(0, BLOCK_M))
                held = token >= 0
                a_ptrs = row_pointer(a, token, a_stride)[:, None] + inner[None, :]
        if GATHER:
            if EVEN_K:
                a_tile = tl.load(a_ptrs, mask=held[:, None], other=0.0)
            else:
                a_tile = tl.load(a_ptrs, mask=held[:, None] & (k + inner < K)[None, :], other=0.0)
            a_ptrs += BLOCK_K
        else:
            a_tile = a.load([row, k])
        if TRANSPOSED:
            b_tile = b_desc.load([expert, col, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b_tile = b_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a_tile, b_tile, acc)
        k += BLOCK_K
        if k >= K:
            # Two stores of half the width: the staging buffer beside the pipeline is half as large.
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
            acc = tl.where(k < 0, acc, 0.0)  # zeros, as in `weight_gemm`
            k = 0


@triton.jit(do_not_specialize=["most"])
def _rows_by_weight(
    a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, rows_used_ptr, next_draw_ptr, resident,
    most, N, K, a_stride,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """c[row] = a[row, or its token] @ b[expert of row]: [N, K] if TRANSPOSED, else [K, N]."""
    m_tiles = tl.load(rows_used_ptr) // BLOCK_M
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = m_tiles * n_tiles
    if DYNAMIC:
        draw = tl.atomic_add(next_draw_ptr, 1)
        first, end, step = draw_tiles(draw, tiles, resident, most)
        while first < tiles:
            draw = next_draw(next_draw_ptr, tiles, resident)
            _rows_tiles(
                first, end, step, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr,
                tile_expert_ptr, K, a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER,
                TRANSPOSED, EVEN_K,
            )  # fmt: skip
            first, end, step = draw_tiles(draw, tiles, resident, most)
    else:
        first = tl.program_id(0)
        _rows_tiles(
            first, tl.maximum(tiles, first), tl.num_programs(0), m_tiles, n_tiles, a, b_desc,
            c_desc, row_token_ptr, tile_expert_ptr, K, a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K,
            GROUP_M, GATHER, TRANSPOSED, EVEN_K,
        )  # fmt: skip


def rows_by_weight(
    a: torch.Tensor,  # [T, K] gathered by token, or [P, K] expert-major rows
    weight: torch.Tensor,  # [g, N, K] if transposed, else [g, K, N]
    tables: RoutingTables,
    *,
    gather: bool,
    transposed: bool,
    config: TileConfig,
    grid: Grid,
) -> torch.Tensor:
    """Return [P, N]: every row times its expert's weight. Padding rows of a gathered ``a`` give 0.

    All operands are dense with 16-byte rows; products accumulate in fp32 and round once.
    """
    rows = tables.row_token.shape[0]
    n, k = weight.shape[1:]
    if not transposed:
        n, k = k, n
    out = a.new_empty(rows, n)
    if not rows:
        return out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    b_block = [1, block_n, block_k] if transposed else [1, block_k, block_n]
    tiles = rows // block_m * triton.cdiv(n, block_n)
    most = tiles_per_draw(triton.cdiv(k, block_k))
    _rows_by_weight[(grid.programs(tiles, most),)](
        a if gather else TensorDescriptor.from_tensor(a, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, b_block),
        TensorDescriptor.from_tensor(out, [block_m, block_n // 2]),
        tables.row_token, tables.tile_expert, tables.starts[-1:], draw_counter(grid, a),
        grid.resident, most, n, k, k,
        ALIGN=ROW_ALIGN, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER=gather, TRANSPOSED=transposed, EVEN_K=k % block_k == 0,
        DYNAMIC=grid.dynamic,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
