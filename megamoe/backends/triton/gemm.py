"""The two grouped products: expert rows times a weight, and rows times rows into a weight gradient.

Both kernels are persistent. Programs draw tiles from a counter in memory instead of striding over
them, because a static stride makes the whole product wait for the one program whose SM a collective
holds. The grid is the SMs that the caller leaves to the product; the result does not depend on it,
since no tile is ever split.

An operand that is already expert-major comes through a TMA descriptor; one that must be gathered by
token comes through pointers (Hopper's TMA cannot gather), with the row map read inside the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .peers import row_pointer
from .tables import ROW_ALIGN, RoutingTables

__all__ = ["GemmConfig", "rows_by_weight", "weight_grad"]


@dataclass(frozen=True)
class GemmConfig:
    """How one product is cut; the default is what a large Hopper product wants."""

    block_m: int = 128  # divides ROW_ALIGN where rows are the M dimension
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8  # row tiles that share a pass over the columns
    warps: int = 8
    stages: int = 4
    schedule: int = 1  # 0: static stride, 1: atomic counter, 2: static, flattened loop


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
    SCHEDULE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c[row] = a[row, or its token] @ b[expert of row]: [N, K] if TRANSPOSED, else [K, N]."""
    m_tiles = tl.load(rows_used_ptr) // BLOCK_M
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = m_tiles * n_tiles
    if SCHEDULE == 2:
        for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
            _rows_tile(
                tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
                a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, TRANSPOSED, EVEN_K,
            )  # fmt: skip
    else:
        tile = tl.program_id(0)
        if SCHEDULE == 1:
            tile = tl.atomic_add(next_tile_ptr, 1)
        while tile < tiles:
            if SCHEDULE == 1:
                following = tl.atomic_add(next_tile_ptr, 1)
            else:
                following = tile + PROGRAMS
            _rows_tile(
                tile, m_tiles, n_tiles, a, b_desc, c_desc, row_token_ptr, tile_expert_ptr, K,
                a_stride, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER, TRANSPOSED, EVEN_K,
            )  # fmt: skip
            tile = following


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
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
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
    if GATHER_A or GATHER_B:
        # Carried from step to step, so that the row loads do not wait for their own map.
        token = tl.load(row_token_ptr + start + within, mask=within < count, other=-1)
    for first in tl.range(0, count, BLOCK_K):
        if GATHER_A:
            a_tile = _gathered(a, token, gather_stride, m_index, M, EVEN_M)
        else:
            a_tile = a.load([start + first, m * BLOCK_M])
        if GATHER_B:
            b_tile = _gathered(b, token, gather_stride, n_index, N, EVEN_N)
        else:
            b_tile = b.load([start + first, n * BLOCK_N])
        if GATHER_A or GATHER_B:
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
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    ACCUMULATE: tl.constexpr, SCHEDULE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """c[e] (+)= a[rows of e].T @ b[rows of e], [M, N]; a or b may be gathered by token.

    The rows of an expert are summed up to the tile that holds its last one: what follows is padding,
    which the row map masks in a gathered operand and which is zero in the other.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tiles = EXPERTS * m_tiles * n_tiles
    if SCHEDULE == 2:
        for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
            _weight_tile(
                tile, m_tiles, n_tiles, a, b, c, row_token_ptr, counts_ptr, starts_ptr, M, N,
                gather_stride, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER_A, GATHER_B, EVEN_M,
                EVEN_N, ACCUMULATE,
            )  # fmt: skip
    else:
        tile = tl.program_id(0)
        if SCHEDULE == 1:
            tile = tl.atomic_add(next_tile_ptr, 1)
        while tile < tiles:
            if SCHEDULE == 1:
                following = tl.atomic_add(next_tile_ptr, 1)
            else:
                following = tile + PROGRAMS
            _weight_tile(
                tile, m_tiles, n_tiles, a, b, c, row_token_ptr, counts_ptr, starts_ptr, M, N,
                gather_stride, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, GATHER_A, GATHER_B, EVEN_M,
                EVEN_N, ACCUMULATE,
            )  # fmt: skip
            tile = following


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
    config: GemmConfig,
    programs: int,
) -> torch.Tensor:
    """Return [P, N]: every row times its expert's weight. Padding rows of a gathered ``a`` give 0."""
    rows = tables.row_token.shape[0]
    experts = weight.shape[0]
    n, k = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    out = a.new_empty(rows, n)
    if not rows:
        return out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    b_block = [1, block_n, block_k] if transposed else [1, block_k, block_n]
    _rows_by_weight[(programs,)](
        a if gather else TensorDescriptor(a, [rows, k], [k, 1], [block_m, block_k]),
        TensorDescriptor(
            weight, list(weight.shape), [weight.shape[1] * weight.shape[2], weight.shape[2], 1], b_block
        ),
        TensorDescriptor(out, [rows, n], [n, 1], [block_m, block_n // 2]),
        tables.row_token, tables.tile_expert, tables.starts[-1:],
        torch.zeros(1, dtype=torch.int32, device=a.device), n, k, k,
        ALIGN=ROW_ALIGN, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER=gather, TRANSPOSED=transposed, EVEN_K=k % block_k == 0, SCHEDULE=config.schedule,
        PROGRAMS=programs, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def weight_grad(
    a: torch.Tensor,  # [T, M] gathered by token, or [P, M]
    b: torch.Tensor,  # [T, N] gathered by token, or [P, N]
    tables: RoutingTables,
    *,
    gather_a: bool,
    gather_b: bool,
    config: GemmConfig,
    programs: int,
    out: torch.Tensor | None = None,  # [g, M, N]: added to, in its own dtype
) -> torch.Tensor:
    """Return [g, M, N]: the sum over each expert's rows of a[row] outer b[row]; 0 without rows."""
    experts, m, n = tables.counts.shape[0], a.shape[1], b.shape[1]
    rows = tables.row_token.shape[0]
    accumulate = out is not None
    if out is None:
        if not rows:
            return a.new_zeros(experts, m, n)
        out = a.new_empty(experts, m, n)
    if not rows:
        return out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    _weight_grad[(programs,)](
        a if gather_a else TensorDescriptor(a, [rows, m], [m, 1], [block_k, block_m]),
        b if gather_b else TensorDescriptor(b, [rows, n], [n, 1], [block_k, block_n]),
        out if accumulate else TensorDescriptor(out, [experts, m, n], [m * n, n, 1], [1, block_m, block_n // 2]),
        tables.row_token, tables.counts, tables.starts,
        torch.zeros(1, dtype=torch.int32, device=a.device), experts, m, n, m if gather_a else n,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        GATHER_A=gather_a, GATHER_B=gather_b, EVEN_M=m % block_m == 0, EVEN_N=n % block_n == 0,
        ACCUMULATE=accumulate, SCHEDULE=config.schedule, PROGRAMS=programs,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
