"""The order of a product's tiles, and the draws by which persistent programs share them.

Where a collective needs SMs, programs draw tiles from a counter in memory instead of striding over
them, because a static stride makes the whole product wait for the one program whose SM the
collective holds. As many programs stay as the collective leaves SMs; others queue behind them and
take a single draw, so that an SM works whenever the collective does not hold it, and is soon free
again. The result depends on none of this, since no tile is ever split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.backends.triton.schedule import LARGEST_DRAW, Grid

__all__ = ["draw_counter", "draw_tiles", "next_draw", "tile_order"]

_LARGEST = tl.constexpr(LARGEST_DRAW)
_LEVELS = tl.constexpr(LARGEST_DRAW.bit_length() - 1)  # sizes of draws but for 1


@triton.jit
def tile_order(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Return (m, n) of a tile: columns innermost over groups of GROUP_M row tiles, for L2 reuse."""
    group = tile // (GROUP_M * n_tiles)
    first = group * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    within = tile - group * GROUP_M * n_tiles
    return first + within % height, within // height


@triton.jit
def draw_tiles(index, tiles, grid, most):
    """Return (first, end, step) of the tiles of a draw: ``most``, a power of two, then ever fewer.

    Between two draws the pipeline drains, so they are large at first; the last ones are of single
    tiles, so that all programs finish together. Of each size there are so many that a round of that
    size would still fit after them. The tiles of a draw lie one grid apart, so that at any time the
    programs work side by side, as in a static schedule, and share what they load through the L2.
    """
    # The same in every thread, and after a warp's reduction known to be: what is counted with it
    # stays in uniform registers, as in a static schedule. A gathered product is 10 % faster for it.
    at = tl.max(tl.zeros([32], tl.int32) + index, 0)
    before = 0  # tiles of all larger draws; `at` counts the draws after those
    size = _LARGEST
    for level in tl.static_range(_LEVELS):
        SIZE = _LARGEST >> level
        rounds = tl.where(most >= SIZE, tl.maximum((tiles - before) // (SIZE * grid) - 1, 0), 0)
        smaller = (size == SIZE) & (at >= rounds * grid)
        before = tl.where(smaller, before + rounds * grid * SIZE, before)
        at = tl.where(smaller, at - rounds * grid, at)
        size = tl.where(smaller, SIZE // 2, size)
    first = before + at // grid * (size * grid) + at % grid
    return first, first + (size - 1) * grid + 1, grid


@triton.jit
def next_draw(next_draw_ptr, tiles, resident):
    """Draw again; programs past the resident ones take no second draw."""
    stays = tl.program_id(0) < resident
    return tl.where(stays, tl.atomic_add(next_draw_ptr, stays.to(tl.int32)), tiles)


def draw_counter(grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """Return the draw counter of one launch; a static grid does not read it."""
    make = torch.zeros if grid.dynamic else torch.empty
    return make(1, dtype=torch.int32, device=like.device)
