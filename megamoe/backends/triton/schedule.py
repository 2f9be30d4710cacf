"""How many programs a persistent kernel gets, and how they share the tiles.

A product that fills the chip and a collective that needs a few SMs run one after the other,
whatever the timeline shows. So whoever runs collectives may register a budget: a callable that
says, at every launch, how many SMs they need right now. While that is 0 a kernel takes every SM and
strides over its tiles; otherwise it leaves that many SMs free and its programs draw tiles from a
counter, because a collective may still hold up any one of them. The results are the same bits
either way.

What is left free is not idle while no collective wants it: behind the programs that stay queue
others that take one draw of tiles each. The hardware places a waiting collective, whose stream has
the higher priority, before them: it waits for one draw at most, and after it they use the SMs
again.

The budget is read when a kernel is launched. In a CUDA graph it is therefore fixed at capture: with
overlap, capture while the budget reports what the replay will need.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["LARGEST_DRAW", "Grid", "add_sm_budget", "grid_for", "multiprocessors", "tiles_per_draw"]

Budget = Callable[[], int]

_budgets: Counter[Budget] = Counter()  # how many layers were handed each
_thread = threading.local()


LARGEST_DRAW = 16  # tiles; a power of two
_SMALLEST_DRAW = 4  # but for the last ones
_STEPS_PER_DRAW = 256  # of a tile's loop, about 0.15 ms


class Grid(NamedTuple):
    """The launch of one persistent kernel."""

    resident: int  # programs that stay until no tile is left
    reserved: int = 0  # SMs left to collectives

    @property
    def dynamic(self) -> bool:
        """Whether tiles are drawn from a counter instead of strided over."""
        return self.reserved > 0

    def programs(self, tiles: int, most: int) -> int:
        """Return the programs to launch for at most ``tiles`` tiles, drawn ``most`` at a time at
        first: the resident ones, and as many of one draw as would keep the reserved SMs busy for
        the whole product."""
        if not self.dynamic:
            return self.resident
        share = self.reserved / (self.resident + self.reserved)
        return self.resident + math.ceil(share * self._draws(tiles, most))

    def _draws(self, tiles: int, most: int) -> int:
        """Return the draws of ``tiles`` tiles, as `draws.draw_tiles` makes them."""
        draws = 0
        while most > 1:
            of_this_size = max(tiles // (most * self.resident) - 1, 0) * self.resident
            draws, tiles, most = draws + of_this_size, tiles - of_this_size * most, most // 2
        return draws + tiles


def tiles_per_draw(steps: int) -> int:
    """Return how many tiles a draw takes at first, where a tile takes ``steps`` steps.

    A drained pipeline costs the time of a few steps; a collective waits for a draw at most.
    """
    fitting = max(_STEPS_PER_DRAW // max(steps, 1), 1)
    power = 1 << (fitting.bit_length() - 1)
    return min(max(power, _SMALLEST_DRAW), LARGEST_DRAW)


def add_sm_budget(budget: Budget) -> Callable[[], None]:
    """Ask ``budget()`` for the SMs to leave free at every launch; return what takes it back.

    Different budgets add up, since all collectives of this process share the one device. The same
    one, handed to every layer, counts once, until each has taken it back.
    """
    _budgets[budget] += 1

    def remove() -> None:
        if not removed:
            removed.append(True)
            _budgets[budget] -= 1
            if not _budgets[budget]:
                del _budgets[budget]

    removed: list[bool] = []
    return remove


def grid_for(device: torch.device) -> Grid:
    """Return the grid of a kernel that is launched now.

    Raises ValueError for a budget that is negative or leaves no SM.
    """
    if device.type == "cuda" and not getattr(_thread, "has_context", False):
        # autograd's thread may come here before it made any CUDA call, and a TMA descriptor is
        # encoded by the driver, which does not make the context current by itself as a launch does.
        torch.zeros((), device=device)
        _thread.has_context = True
    total = multiprocessors(device)
    reserved = sum(budget() for budget in _budgets)
    if not 0 <= reserved < total:
        raise ValueError(
            f"the SM budget asks for {reserved} SMs of {total}; it must be at least 0 and leave one"
        )
    return Grid(total - reserved, reserved)


def multiprocessors(device: torch.device) -> int:
    """Return the device's SM count; 4 where Triton interprets its kernels on the CPU."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
