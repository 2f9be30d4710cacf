"""How much of a step's communication no schedule can hide: what measured exposure is compared with.

One in-order link. All times in one unit. Buckets are in the order of their collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["exposed_backward", "exposed_forward"]


def exposed_forward(gathers: Sequence[float], compute: Sequence[float], depth: int) -> float:
    """Return how long a forward stands still for its gathers.

    The first gather is issued when the forward begins; each use of a bucket issues those up to
    ``depth`` buckets further, and waits for its own first.

    Args:
        gathers: Duration of each bucket's gather.
        compute: From the first use of each bucket to that of the next (of the last: whatever).
        depth: How many buckets ahead of the one in use are gathered; 0 hides nothing.
    """
    if len(gathers) != len(compute):
        raise ValueError(f"{len(gathers)} gathers and {len(compute)} spans of compute")
    clock = 0.0
    arrived: list[float] = []
    exposed = 0.0
    for index, work in enumerate(compute):
        _issue(gathers, arrived, index, clock)
        begin = max(clock, arrived[index])
        exposed += begin - clock
        _issue(gathers, arrived, index + depth, begin)
        clock = begin + work
    return exposed


def _issue(gathers: Sequence[float], arrived: list[float], last: int, now: float) -> None:
    """Let ``arrived`` hold when the gathers up to ``last`` arrive, those missing issued ``now``."""
    while len(arrived) <= min(last, len(gathers) - 1):
        free = arrived[-1] if arrived else 0.0
        arrived.append(max(now, free) + gathers[len(arrived)])


def exposed_backward(ready: Sequence[float], reduces: Sequence[float], backward: float) -> float:
    """Return how long the step waits for reductions after a backward of duration ``backward``.

    Args:
        ready: When each bucket's gradient is there, counted from the beginning of the backward.
        reduces: Duration of each bucket's reduction.
    """
    if len(ready) != len(reduces):
        raise ValueError(f"{len(ready)} buckets and {len(reduces)} reductions")
    free = 0.0
    for at, duration in zip(ready, reduces, strict=True):
        free = max(free, at) + duration
    return max(0.0, free - backward)
