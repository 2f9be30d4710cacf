"""The grouped product of rows and rows into a weight gradient, a persistent kernel.

Operands come as in `gemm`; the one that is gathered has other rows in every step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.backends.triton.draws import draw_counter, draw_tiles, next_draw, tile_order
from megamoe.backends.triton.peers import row_pointer
from megamoe.backends.triton.schedule import Grid, tiles_per_draw
from megamoe.backends.triton.tables import RoutingTables
from megamoe.backends.triton.tuning import TileConfig

__all__ = ["weight_grad"]

_OUTSIDE = tl.constexpr(1 << 30)  # past the rows of any operand


@triton.jit
def _steps(count, BLOCK_K: tl.constexpr):
    """Return the steps of an expert's tile. It has one if there are no rows: zeros are stored."""
    return tl.maximum(tl.cdiv(count, BLOCK_K), 1)


@triton.jit
def _steps_of_draw(first, end, step, per_expert, counts_ptr, BLOCK_K: tl.constexpr):
    """Return the steps of the tiles of a draw, at most 32: a warp's reduction, see `draw_tiles`."""
    tile = first + step * tl.arange(0, 32)
    inside = tile < end
    count = tl.load(counts_ptr + tl.where(inside, tile, first) // per_expert)
    return tl.sum(tl.where(inside, _steps(count, BLOCK_K), 0))


@triton.jit
def _steps_of_stride(
    first, step, per_expert, experts, counts_ptr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """Return the steps of the tiles first, first + step, ... of all experts."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts_ptr + expert, mask=expert < experts, other=0)
    before = tl.cdiv(tl.maximum(expert * per_expert - first, 0), step)
    through = tl.cdiv(tl.maximum((expert + 1) * per_expert - first, 0), step)
    steps = (through - before) * _steps(count, BLOCK_K)
    return tl.sum(tl.where(expert < experts, steps, 0))


@triton.jit
def _weight_tile(
    tile, m_tiles, n_tiles, counts_ptr, starts_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Return a tile's expert, the start and count of its rows, and where in [M, N] it begins.

    An expert without rows starts outside of the operands, where a descriptor reads zeros: a store
    that chose between the sum and zeros would be twice as long.
    """
    expert = tile // (m_tiles * n_tiles)
    m, n = tile_order(tile - expert * (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
    start = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert)
    start = tl.where(count > 0, start, _OUTSIDE)
    return expert, start, count, m * BLOCK_M, n * BLOCK_N


@triton.jit
def _rows_of_tile(tile, per_expert, tiles, counts_ptr, starts_ptr):
    """Return where the rows of a tile's expert start, and their count; past the end, the last's."""
    expert = tl.minimum(tile, tiles - 1) // per_expert
    start = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert)
    return tl.where(count > 0, start, tl.maximum(start, 1)), count  # `_tokens` looks one row back


@triton.jit
def _next_rows(
    tile, start, count, k, stride, per_expert, tiles, counts_ptr, starts_ptr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return (tile, start, count, k) of the step after this one."""
    k += BLOCK_K
    if k >= count:
        k = 0
        tile += stride
        start, count = _rows_of_tile(tile, per_expert, tiles, counts_ptr, starts_ptr)
    return tile, start, count, k


@triton.jit
def _tokens(row_token_ptr, start, count, k, BLOCK_K: tl.constexpr):
    """Return the tokens of an expert's rows k, k + 1, ...; past its last row, that one's again.

    There b is zero: no mask is needed, and what is not finite in a token spreads to no expert that
    does not have it. An expert without rows gets whatever is there, and must not use it.
    """
    return tl.load(row_token_ptr + start + tl.minimum(k + tl.arange(0, BLOCK_K), count - 1))


@triton.jit
def _weight_tiles(
    steps, first, stride, tiles, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, counts_ptr,
    starts_ptr, M,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, EVEN_M: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The tiles first, first + stride, ... in one loop of ``steps``, the steps of all of them.

    So that the loads of a tile start while the one before it is being stored: Triton flattens two
    loops by itself only where the inner one always has the same length.
    """
    per_expert = m_tiles * n_tiles
    tile = first - stride
    expert, start, count, row, col, k = 0, 0, 0, 0, 0, 0
    if GATHER:
        # The map is read two steps ahead of the rows, which then do not wait for it.
        map_start, map_count = _rows_of_tile(first, per_expert, tiles, counts_ptr, starts_ptr)
        token = _tokens(row_token_ptr, map_start, map_count, 0, BLOCK_K)
        map_tile, map_start, map_count, map_k = _next_rows(
            first, map_start, map_count, 0, stride, per_expert, tiles, counts_ptr, starts_ptr,
            BLOCK_K,
        )  # fmt: skip
        next_token = _tokens(row_token_ptr, map_start, map_count, map_k, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.range(0, steps):
        if k == 0:
            tile += stride
            expert, start, count, row, col = _weight_tile(
                tile, m_tiles, n_tiles, counts_ptr, starts_ptr, BLOCK_M, BLOCK_N, GROUP_M
            )
        if GATHER:
            m_index = row + tl.arange(0, BLOCK_M)
            a_ptrs = row_pointer(a, token, M)[:, None] + m_index[None, :]
            if EVEN_M:
                a_tile = tl.load(a_ptrs, mask=count > 0, other=0.0)
            else:
                a_tile = tl.load(a_ptrs, mask=(count > 0) & (m_index < M)[None, :], other=0.0)
        else:
            a_tile = a.load([start + k, row])
        acc = tl.dot(a_tile.T, b_desc.load([start + k, col]), acc)
        k += BLOCK_K
        if k >= count:
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            left = left.to(c_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
            right = right.to(c_desc.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
            if ACCUMULATE:
                # One addition per element and launch, done by the L2: the same bits in every run.
                c_desc.atomic_add([expert, row, col], left)
                c_desc.atomic_add([expert, row, col + BLOCK_N // 2], right)
            else:
                c_desc.store([expert, row, col], left)
                c_desc.store([expert, row, col + BLOCK_N // 2], right)
            # Zeros, since k is never negative. Where it sees that, the compiler takes twice the
            # instructions.
            acc = tl.where(k < 0, acc, 0.0)
            k = 0
        if GATHER:
            # An operation, if without effect: Triton does not pipeline a loop that only passes a
            # value on from one step to the one after the next.
            token = tl.maximum(next_token, 0)
            map_tile, map_start, map_count, map_k = _next_rows(
                map_tile, map_start, map_count, map_k, stride, per_expert, tiles, counts_ptr,
                starts_ptr, BLOCK_K,
            )  # fmt: skip
            next_token = _tokens(row_token_ptr, map_start, map_count, map_k, BLOCK_K)


@triton.jit(do_not_specialize=["most"])
def _weight_grad(
    a, b_desc, c_desc, row_token_ptr, counts_ptr, starts_ptr, next_draw_ptr, resident,
    most, experts, M, N,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER: tl.constexpr, EVEN_M: tl.constexpr, ACCUMULATE: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """c[e] (+)= a[rows of e, or their tokens].T @ b[rows of e], [M, N].

    The rows of an expert are summed up to the tile that holds its last one. What follows is
    padding: a repeated row where it is gathered, zero where it is read.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    per_expert = m_tiles * n_tiles
    tiles = experts * per_expert
    if DYNAMIC:
        draw = tl.atomic_add(next_draw_ptr, 1)
        first, end, step = draw_tiles(draw, tiles, resident, most)
        while first < tiles:
            draw = next_draw(next_draw_ptr, tiles, resident)
            steps = _steps_of_draw(first, end, step, per_expert, counts_ptr, BLOCK_K)
            _weight_tiles(
                steps, first, step, tiles, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr,
                counts_ptr, starts_ptr, M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, EVEN_M,
                ACCUMULATE,
            )  # fmt: skip
            first, end, step = draw_tiles(draw, tiles, resident, most)
    else:
        first = tl.program_id(0)
        step = tl.num_programs(0)
        steps = _steps_of_stride(first, step, per_expert, experts, counts_ptr, BLOCK_K, EXPERTS)
        _weight_tiles(
            steps, first, step, tiles, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr,
            counts_ptr, starts_ptr, M, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, EVEN_M,
            ACCUMULATE,
        )  # fmt: skip


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
    most = tiles_per_draw(triton.cdiv(tables.slot_row.numel(), experts * block_k))  # if even
    _weight_grad[(grid.programs(tiles, most),)](
        a if gather else TensorDescriptor.from_tensor(a, [block_k, block_m]),
        TensorDescriptor.from_tensor(b, [block_k, block_n]),
        TensorDescriptor.from_tensor(out, [1, block_m, block_n // 2]),
        tables.row_token, tables.counts, tables.starts, draw_counter(grid, a), grid.resident,
        most, experts, m, n, EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER=gather, EVEN_M=m % block_m == 0, ACCUMULATE=add,
        DYNAMIC=grid.dynamic,
        num_warps=config.warps, num_stages=stages,
    )  # fmt: skip
    return out
