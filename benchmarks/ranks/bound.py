"""The least exposed communication that a schedule allows; see docs/overlap.md."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["exposed_backward", "exposed_forward"]


def exposed_forward(
    gathers: Sequence[float], computes: Sequence[float], ahead: float = 0.0
) -> float:
    """Exposed time of gathers that are issued one ahead, each in turn.

    Args:
        gathers: Time of each bucket's gather alone, in order of use.
        computes: Time of the compute from each bucket's first use to that of the next.
        ahead: Compute that the first gather can run beside (the rest of the optimizer's step).
    """
    hides = [ahead, *computes]
    return sum(max(0.0, g - c) for g, c in zip(gathers, hides, strict=False))


def exposed_backward(reduces: Sequence[float], computes: Sequence[float]) -> float:
    """Exposed time of reduce-scatters that run one after the other, each when it is ready.

    Args:
        reduces: Time of each alone, in order of readiness.
        computes: Time of the compute from each one's readiness to the next one's (after the last:
            to the end of backward).
    """
    now = busy_until = 0.0
    for reduce, compute in zip(reduces, computes, strict=True):
        busy_until = max(busy_until, now) + reduce
        now += compute
    return max(0.0, busy_until - now)
