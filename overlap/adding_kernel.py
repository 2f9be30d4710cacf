"""The Triton kernel of `overlap.additions`; importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch"]

_BLOCK = 2048  # elements of one block, 16 for each thread


@triton.jit
def _add(
    own,
    others,
    out,
    numel,
    stride,
    scale,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = scale * the sum over ranks, in their order, of own[i] or of others[index][i]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            term = tl.load(own + at, mask=inside).to(tl.float32)
        elif rank < RANK:
            term = tl.load(others + rank * stride + at, mask=inside).to(tl.float32)
        else:
            term = tl.load(others + (rank - 1) * stride + at, mask=inside).to(tl.float32)
        if rank == 0:
            total = term
        else:
            total += term
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)


def launch(own: Tensor, others: Tensor, rank: int, out: Tensor, scale: float) -> None:
    """As `overlap.additions.add_in_order`."""
    blocks = triton.cdiv(own.numel(), _BLOCK)
    _add[(blocks,)](
        own,
        others,
        out,
        own.numel(),
        others.stride(0),
        scale,
        RANK=rank,
        RANKS=len(others) + 1,
        BLOCK=_BLOCK,
    )
