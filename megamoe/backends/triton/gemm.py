"""The two grouped products: expert rows times a weight, and rows times rows into a weight gradient.

Both kernels are persistent. Where a collective needs SMs, programs draw tiles from a counter in
memory instead of striding over them, because a static stride makes the whole product wait for the
one program whose SM the collective holds. As many programs stay as the collective leaves SMs;
others queue behind them and take a single draw, so that an SM works whenever the collective does
not hold it, and is soon free again. The result depends on none of this, since no tile is ever
split.

An operand that is already expert-major comes through a TMA descriptor; one that must be gathered by
token comes through pointers (Hopper's TMA cannot gather), with the row map read inside the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.backends.triton.peers import row_pointer
from megamoe.backends.triton.schedule import TILES_PER_DRAW, Grid
from megamoe.backends.triton.tables import ROW_ALIGN, RoutingTables
from megamoe.backends.triton.tuning import TileConfig

__all__ = ["rows_by_weight", "weight_grad"]


_TILES = tl.constexpr(TILES_PER_DRAW)


@triton.jit
def _tile_order(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Return (m, n) of a tile: columns innermost over groups of GROUP_M row tiles, for L2 reuse."""
    group = tile // (GROUP_M * n_tiles)
    first = group * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    within = tile - group * GROUP_M * n_tiles
    return first + within % height, within // height


@triton.jit
def _draw(index, tiles, grid):
    """Return (first, end, step) of the tiles of one draw: _TILES, or one in the last rounds.

    Between two draws the pipeline drains; the single tiles at the end keep the finish even. The
    tiles of a draw lie one grid apart, so that at any time the programs work side by side, as in a
    static schedule, and share what they load through the L2.
    """
    full = tl.maximum(tiles - _TILES * grid, 0) // (_TILES * grid) * grid  # draws of so many
    single = index >= full
    first = tl.where(
        single, (_TILES - 1) * full + index, index // grid * (_TILES * grid) + index % grid
    )
    return first, first + tl.where(single, 1, (_TILES - 1) * grid + 1), grid


@triton.jit
def _next_draw(next_draw_ptr, tiles, resident):
    """Draw again; programs past the resident ones take no second draw."""
    stays = tl.program_id(0) < resident
    return tl.where(stays, tl.atomic_add(next_draw_ptr, stays.to(tl.int32)), tiles)


@triton.jit
def _rows_tile(
    tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K, a_stride,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    m, n = _tile_order(tile, m_tiles, n_tiles, GROUP_M)
    row = m * BLOCK_M
    col = n * BLOCK_N
    expert = tl.load(tile_expert_ptr + row // ALIGN)
    if GATHER:
        token = tl.load(row_token_ptr + row + tl.arange(0, BLOCK_M))
        held = (token >= 0)[:, None]
        inner = tl.arange(0, BLOCK_K)
        a_ptrs = row_pointer(a, token, a_stride)[:, None] + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        if GATHER:
            if EVEN_K:
                a_tile = tl.load(a_ptrs, mask=held, other=0.0)
            else:
                a_tile = tl.load(a_ptrs, mask=held & (k + inner < K)[None, :], other=0.0)
            a_ptrs += BLOCK_K
        else:
            a_tile = a.load([row, k])
        if TRANSPOSED:
            b_tile = b_desc.load([expert, col, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b_tile = b_desc.load([expert, k, col]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(a_tile, b_tile, acc)
    # Two stores of half the width: the staging buffer beside the pipeline is half as large.
    left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    c_desc.store([row, col], left.to(c_desc.dtype))
    c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))


@triton.jit
def _rows_by_weight(
    a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, rows_used_ptr, next_draw_ptr, resident,
    N, K, a_stride,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """c[row] = a[row, or its token] @ b[expert of row]: [N, K] if TRANSPOSED, else [K, N]."""
    m_tiles = tl.load(rows_used_ptr) // BLOCK_M
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = m_tiles * n_tiles
    # Flattened: the loads of a tile start while the one before it is being stored.
    if DYNAMIC:
        draw = tl.atomic_add(next_draw_ptr, 1)
        first, end, step = _draw(draw, tiles, resident)
        while first < tiles:
            draw = _next_draw(next_draw_ptr, tiles, resident)
            for tile in tl.range(first, end, step, flatten=True):
                _rows_tile(
                    tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
                    a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, TRANSPOSED, EVEN_K,
                )  # fmt: skip
            first, end, step = _draw(draw, tiles, resident)
    else:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _rows_tile(
                tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
                a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, TRANSPOSED, EVEN_K,
            )  # fmt: skip


@triton.jit
def _weight_tile(
    tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, counts_ptr, starts_ptr, M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, EVEN_M: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    expert = tile // (m_tiles * n_tiles)
    m, n = _tile_order(tile - expert * (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
    m_index = m * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert)
    within = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATHER:
        # Past its last row an expert reads that row again, and b is zero there: no mask, and what
        # is not finite spreads to no expert that does not have it. An empty one takes no step.
        # Carried from step to step, so that the row loads do not wait for their own map.
        token = tl.load(row_token_ptr + tl.maximum(start + tl.minimum(within, count - 1), 0))
    for first in tl.range(0, count, BLOCK_K):
        if GATHER:
            a_ptrs = row_pointer(a, token, M)[:, None] + m_index[None, :]
            if EVEN_M:
                a_tile = tl.load(a_ptrs)
            else:
                a_tile = tl.load(a_ptrs, mask=(m_index < M)[None, :], other=0.0)
            later = tl.minimum(first + BLOCK_K + within, count - 1)
            token = tl.load(row_token_ptr + start + later)
        else:
            a_tile = a.load([start + first, m * BLOCK_M])
        acc = tl.dot(a_tile.T, b_desc.load([start + first, n * BLOCK_N]), acc)
    left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    left = left.to(c_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
    right = right.to(c_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
    row = m * BLOCK_M
    col = n * BLOCK_N
    if ACCUMULATE:
        # One addition per element and launch, done by the L2: the same bits in every run.
        c_desc.atomic_add([expert, row, col], left)
        c_desc.atomic_add([expert, row, col + BLOCK_N // 2], right)
    else:
        c_desc.store([expert, row, col], left)
        c_desc.store([expert, row, col + BLOCK_N // 2], right)


@triton.jit
def _weight_grad(
    a, b_desc, c_desc, row_token_ptr, counts_ptr, starts_ptr, next_draw_ptr, resident,
    EXPERTS, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, EVEN_M: tl.constexpr, ACCUMULATE: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """c[e] (+)= a[rows of e, or their tokens].T @ b[rows of e], [M, N].

    The rows of an expert are summed up to the tile that holds its last one. What follows is
    padding: masked where it is gathered, zero where it is read.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = EXPERTS * m_tiles * n_tiles
    # Flattened: the loads of a tile start while the one before it is being stored.
    if DYNAMIC:
        draw = tl.atomic_add(next_draw_ptr, 1)
        first, end, step = _draw(draw, tiles, resident)
        while first < tiles:
            draw = _next_draw(next_draw_ptr, tiles, resident)
            for tile in tl.range(first, end, step, flatten=True):
                _weight_tile(
                    tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, counts_ptr,
                    starts_ptr, M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, EVEN_M, ACCUMULATE,
                )  # fmt: skip
            first, end, step = _draw(draw, tiles, resident)
    else:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _weight_tile(
                tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, counts_ptr, starts_ptr,
                M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, EVEN_M, ACCUMULATE,
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
    _rows_by_weight[(grid.programs(tiles),)](
        a if gather else TensorDescriptor.from_tensor(a, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, b_block),
        TensorDescriptor.from_tensor(out, [block_m, block_n // 2]),
        tables.row_token, tables.tile_expert, tables.starts[-1:], _counter(grid, a),
        grid.resident, n, k, k,
        ALIGN=ROW_ALIGN, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER=gather, TRANSPOSED=transposed, EVEN_K=k % block_k == 0,
        DYNAMIC=grid.dynamic,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def weight_grad(
    a: torch.Tensor,  # [T, M] gathered by token, or [P, M]
    b: torch.Tensor,  # [P, N]
    tables: RoutingTables,
    *,
    gather: bool,
    config: TileConfig,
    grid: Grid,
    out: torch.Tensor | None = None,  # [g, M, N] fp32
    add: bool = False,
) -> torch.Tensor:
    """Return [g, M, N]: the sum over each expert's rows of a[row] outer b[row]; 0 without rows.

    Padding rows of ``b`` and of an expert-major ``a`` hold zeros. With ``out`` the fp32 sum is
    written there, or added to what is there, unrounded, and that tensor is returned.
    """
    experts, m, n = tables.counts.shape[0], a.shape[1], b.shape[1]
    stages = config.stages
    if out is None:
        out = a.new_empty(experts, m, n)
    else:
        stages = min(stages, 3)  # a half tile of fp32 takes twice the room beside the pipeline
    if not tables.row_token.shape[0]:
        return out if add else out.zero_()
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles = experts * triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    _weight_grad[(grid.programs(tiles),)](
        a if gather else TensorDescriptor.from_tensor(a, [block_k, block_m]),
        TensorDescriptor.from_tensor(b, [block_k, block_n]),
        TensorDescriptor.from_tensor(out, [1, block_m, block_n // 2]),
        tables.row_token, tables.counts, tables.starts, _counter(grid, a), grid.resident,
        experts, m, n,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER=gather, EVEN_M=m % block_m == 0, ACCUMULATE=add,
        DYNAMIC=grid.dynamic,
        num_warps=config.warps, num_stages=stages,
    )  # fmt: skip
    return out


def _counter(grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """Return the draw counter of one launch; a static grid does not read it."""
    make = torch.zeros if grid.dynamic else torch.empty
    return make(1, dtype=torch.int32, device=like.device)
