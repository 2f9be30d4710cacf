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

from megamoe.backends.triton.schedule import TILES_PER_DRAW, Grid

__all__ = ["draw_counter", "draw_tiles", "next_draw", "tile_order"]

_TILES = tl.constexpr(TILES_PER_DRAW)


@triton.jit
def tile_order(tile, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Return (m, n) of a tile: columns innermost over groups of GROUP_M row tiles, for L2 reuse."""
    group = tile // (GROUP_M * n_tiles)
    first = group * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    within = tile - group * GROUP_M * n_tiles
    return first + within % height, within // height


@triton.jit
def draw_tiles(index, tiles, grid):
    """Return (first, end, step) of the tiles of one draw: _TILES, or one in the last rounds.

    Between two draws the pipeline drains; the single tiles at the end keep the finish even. The
    tiles of a draw lie one grid apart, so that at any time the programs work side by side, as in a
    static schedule, and share what they load through the L2.
    """
    # The same in every thread, and after a warp's reduction known to be: what is counted with it
    # stays in uniform registers, as in a static schedule. A gathered product is 10 % faster for it.
    index = tl.max(tl.zeros([32], tl.int32) + index, 0)
    full = tl.maximum(tiles - _TILES * grid, 0) // (_TILES * grid) * grid  # draws of so many
    single = index >= full
    first = tl.where(
        single, (_TILES - 1) * full + index, index // grid * (_TILES * grid) + index % grid
    )
    return first, first + tl.where(single, 1, (_TILES - 1) * grid + 1), grid


@triton.jit
def next_draw(next_draw_ptr, tiles, resident):
    """Draw again; programs past the resident ones take no second draw."""
    stays = tl.program_id(0) < resident
    return tl.where(stays, tl.atomic_add(next_draw_ptr, stays.to(tl.int32)), tiles)


def draw_counter(grid: Grid, like: torch.Tensor) -> torch.Tensor:
    """Return the draw counter of one launch; a static grid does not read it."""
    make = torch.zeros if grid.dynamic else torch.empty
    return make(1, dtype=torch.int32, device=like.device)
