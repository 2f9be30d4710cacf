"""The two grouped products: expert rows times a weight, and rows times rows into a weight gradient.

Both kernels are persistent. Programs draw tiles from a counter in memory instead of striding over
them, because a static stride makes the whole product wait for the one program whose SM a collective
holds. The grid is the SMs that the caller leaves to the product; the result does not depend on it,
since no tile is ever split.

An operand that is already expert-major comes through a TMA descriptor; one that must be gathered by
token comes through pointers (Hopper's TMA cannot gather), with the row map read inside the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.backends.triton.peers import row_pointer
from megamoe.backends.triton.schedule import Grid
from megamoe.backends.triton.tables import ROW_ALIGN, RoutingTables
from megamoe.backends.triton.tuning import TileConfig

__all__ = ["rows_by_weight", "weight_grad"]


@triton.jit
def _tile_order(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Return (m, n) of a tile: columns innermost over groups of GROUP_M row tiles, for L2 reuse."""
    group = tile // (GROUP_M * n_tiles)
    first = group * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    within = tile - group * GROUP_M * n_tiles
    return first + within % height, within // height


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
    a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, rows_used_ptr, next_tile_ptr,
    N, K, a_stride,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    DYNAMIC: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c[row] = a[row, or its token] @ b[expert of row]: [N, K] if TRANSPOSED, else [K, N]."""
    m_tiles = tl.load(rows_used_ptr) // BLOCK_M
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = m_tiles * n_tiles
    if DYNAMIC:
        tile = tl.atomic_add(next_tile_ptr, 1)
        while tile < tiles:
            following = tl.atomic_add(next_tile_ptr, 1)
            _rows_tile(
                tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
                a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, TRANSPOSED, EVEN_K,
            )  # fmt: skip
            tile = following
    else:
        # Flattened: the loads of a tile start while the one before it is being stored.
        for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
            _rows_tile(
                tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
                a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, TRANSPOSED, EVEN_K,
            )  # fmt: skip


@triton.jit
def _gathered(base, token, stride, index, limit, EVEN: tl.constexpr):
    mask = (token >= 0)[:, None]
    if not EVEN:
        mask = mask & (index < limit)[None, :]
    return tl.load(row_pointer(base, token, stride)[:, None] + index[None, :], mask=mask, other=0.0)


@triton.jit
def _weight_tile(
    tile, m_tiles, n_tiles, a, b, c, row_token_ptr, counts_ptr, starts_ptr, M, N, gather_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER_A: tl.constexpr, EVEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    expert = tile // (m_tiles * n_tiles)
    m, n = _tile_order(tile - expert * (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
    m_index = m * BLOCK_M + tl.arange(0, BLOCK_M)
    n_index = n * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(starts_ptr + expert)
    count = tl.load(counts_ptr + expert)
    within = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Carried from step to step, so that the row loads do not wait for their own map.
    token = tl.load(row_token_ptr + start + within, mask=within < count, other=-1)
    for first in tl.range(0, count, BLOCK_K):
        if GATHER_A:
            a_tile = _gathered(a, token, gather_stride, m_index, M, EVEN)
            b_tile = b.load([start + first, n * BLOCK_N])
        else:
            a_tile = a.load([start + first, m * BLOCK_M])
            b_tile = _gathered(b, token, gather_stride, n_index, N, EVEN)
        later = first + BLOCK_K + within
        token = tl.load(row_token_ptr + start + later, mask=later < count, other=-1)
        acc = tl.dot(a_tile.T, b_tile, acc)
    left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
    if ACCUMULATE:
        out = c + expert.to(tl.int64) * M * N + m_index.to(tl.int64)[:, None] * N
        col = n * BLOCK_N + tl.arange(0, BLOCK_N // 2)[None, :]
        _add(out + col, left, (m_index < M)[:, None] & (col < N))
        col += BLOCK_N // 2
        _add(out + col, right, (m_index < M)[:, None] & (col < N))
    else:
        col = n * BLOCK_N
        left = left.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
        right = right.to(c.dtype).reshape(1, BLOCK_M, BLOCK_N // 2)
        c.store([expert, m * BLOCK_M, col], left)
        c.store([expert, m * BLOCK_M, col + BLOCK_N // 2], right)


@triton.jit
def _weight_grad(
    a, b, c, row_token_ptr, counts_ptr, starts_ptr, next_tile_ptr,
    EXPERTS, M, N, gather_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GATHER_A: tl.constexpr, EVEN: tl.constexpr,
    ACCUMULATE: tl.constexpr, DYNAMIC: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c[e] (+)= a[rows of e].T @ b[rows of e], [M, N]; a or b may be gathered by token.

    The rows of an expert are summed up to the tile that holds its last one: what follows is padding,
    which the row map masks in a gathered operand and which is zero in the other.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = EXPERTS * m_tiles * n_tiles
    if DYNAMIC:
        tile = tl.atomic_add(next_tile_ptr, 1)
        while tile < tiles:
            following = tl.atomic_add(next_tile_ptr, 1)
            _weight_tile(
                tile, m_tiles, n_tiles, a, b, c, row_token_ptr, counts_ptr, starts_ptr, M, N,
                gather_stride, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER_A, EVEN, ACCUMULATE,
            )  # fmt: skip
            tile = following
    else:
        # Flattened: the loads of a tile start while the one before it is being stored.
        for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
            _weight_tile(
                tile, m_tiles, n_tiles, a, b, c, row_token_ptr, counts_ptr, starts_ptr, M, N,
                gather_stride, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER_A, EVEN, ACCUMULATE,
            )  # fmt: skip


@triton.jit
def _add(ptrs, value, mask):
    value += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)


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
    experts, n, k = weight.shape
    if not transposed:
        n, k = k, n
    out = a.new_empty(rows, n)
    if not rows:
        return out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    b_block = [1, block_n, block_k] if transposed else [1, block_k, block_n]
    _rows_by_weight[(grid.programs,)](
        a if gather else TensorDescriptor.from_tensor(a, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, b_block),
        TensorDescriptor.from_tensor(out, [block_m, block_n // 2]),
        tables.row_token, tables.tile_expert, tables.starts[-1:], _counter(grid, a), n, k, k,
        ALIGN=ROW_ALIGN, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER=gather, TRANSPOSED=transposed, EVEN_K=k % block_k == 0,
        DYNAMIC=grid.dynamic, PROGRAMS=0 if grid.dynamic else grid.programs,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def weight_grad(
    a: torch.Tensor,  # [T, M] if gather_a, else [P, M]
    b: torch.Tensor,  # [P, N] if gather_a, else [T, N]
    tables: RoutingTables,
    *,
    gather_a: bool,
    config: TileConfig,
    grid: Grid,
    add_to: torch.Tensor | None = None,  # [g, M, N]
) -> torch.Tensor:
    """Return [g, M, N]: the sum over each expert's rows of a[row] outer b[row]; 0 without rows.

    One operand is gathered by token, the other is expert-major with zeros in its padding rows. With
    ``add_to`` the fp32 sum is added there, in that tensor's dtype, and no other result is written.
    """
    experts, m, n = tables.counts.shape[0], a.shape[1], b.shape[1]
    if not tables.row_token.shape[0]:
        return a.new_zeros(experts, m, n) if add_to is None else add_to
    out = a.new_empty(experts, m, n) if add_to is None else add_to
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    if add_to is None:
        target = TensorDescriptor.from_tensor(out, [1, block_m, block_n // 2])
    else:
        target = out
    _weight_grad[(grid.programs,)](
        a if gather_a else TensorDescriptor.from_tensor(a, [block_k, block_m]),
        TensorDescriptor.from_tensor(b, [block_k, block_n]) if gather_a else b,
        target, tables.row_token, tables.counts, tables.starts, _counter(grid, a),
        experts, m, n, m if gather_a else n,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER_A=gather_a, EVEN=(m % block_m if gather_a else n % block_n) == 0,
        ACCUMULATE=add_to is not None,
        DYNAMIC=grid.dynamic, PROGRAMS=0 if grid.dynamic else grid.programs,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def _counter(grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """Return the tile counter of one launch; a static grid does not read it."""
    make = torch.zeros if grid.dynamic else torch.empty
    return make(1, dtype=torch.int32, device=like.device)
