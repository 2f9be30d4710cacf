"""Sums of the ranks' parts of a gradient, in fp32 and in the order of ranks.

On a GPU one Triton kernel reads every term once and writes the result once; its blocks are small
enough to find room beside a product that fills the chip. Without Triton, and on a CPU, torch adds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

__all__ = ["add_in_order"]


def add_in_order(own: Tensor, others: Tensor, rank: int, out: Tensor, scale: float) -> None:
    """Write scale * (((g0 + g1) + g2) + ...), in fp32 and then rounded to its dtype, to ``out``.

    Args:
        own: [n], the term of ``rank``; ``out`` may be the same memory.
        others: [ranks - 1, >= n], the other terms in rank order, in the dtype of ``own``.
        out: [n], of any dtype.
    """
    launch = _kernel() if own.is_cuda else None
    if launch is not None:
        launch(own, others, rank, out, scale)
        return
    terms = list(others[:, : own.numel()])
    terms.insert(rank, own)
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    out.copy_(total * scale)


@cache
def _kernel() -> Callable[[Tensor, Tensor, int, Tensor, float], None] | None:
    try:
        from overlap.adding_kernel import launch
    except ImportError:
        return None
    return launch
