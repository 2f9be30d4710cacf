"""Sums of the ranks' parts of a gradient, in fp32 and in the order of ranks.

On a GPU one Triton kernel reads every term once and writes the result once; its blocks are small
enough to find room beside a product that fills the chip. Without Triton, and on a CPU, torch adds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

__all__ = ["add_in_order"]


def add_in_order(own: Tensor, others: Tensor, rank: int, out: Tensor) -> None:
    """Write ((g0 + g1) + g2) + ..., added in fp32, to ``out``, rounded once to its dtype.

    Args:
        own: [n], the term of ``rank``; ``out`` may be the same memory.
        others: [ranks - 1, >= n], the other terms in rank order, in the dtype of ``own``.
        out: [n], of any dtype.
    """
    launch = _kernel() if own.is_cuda else None
    if launch is not None:
        launch(own, others, rank, out)
        return
    terms = list(others[:, : own.numel()])
    terms.insert(rank, own)
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    out.copy_(total)


@cache
def _kernel() -> Callable[[Tensor, Tensor, int, Tensor], None] | None:
    try:
        from overlap.adding_kernel import launch
    except ImportError:
        return None
    return launch
