"""What one collective moves, in one form for all of them, and the same in plain torch.

The output of every collective among peers that hold the same data is made of rows of the input:

    all-gather        source [1, L]   every chunk c of n: target[c] = source[0]
    all-to-all        source [1, L]   the same, the row being what this rank sends to itself
    reduce-scatter    source [n, L]   chunk `kept` of n:  target[0] = source[kept] * n
    all-reduce        source [1, L]   one chunk:          target[0] = source[0] * n
    broadcast         source [1, L]   no chunk: everybody has the data already

Chunks that are not kept travel all the same (a real rank sends them): a wire reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ALL", "NONE", "Transfer"]

ALL, NONE = -1, -2  # values of Transfer.kept


@dataclass(frozen=True)
class Transfer:
    """Rows on their way.

    Attributes:
        source: [chunks, L], or [1, L] where all chunks are the same row. Contiguous.
        target: [chunks, L] with kept ALL, else [1, L]. Contiguous; may share memory with ``source``
            where both mean the same element.
        chunks: Rows that travel.
        kept: The chunk that arrives here, `ALL` or `NONE`.
        factor: What arrives is multiplied by it.
    """

    source: Tensor
    target: Tensor
    chunks: int
    kept: int = ALL
    factor: int = 1

    @property
    def length(self) -> int:
        return self.source.shape[1]

    @property
    def source_step(self) -> int:
        return 0 if self.source.shape[0] == 1 else self.length

    @property
    def target_step(self) -> int:
        return self.length if self.kept == ALL else 0

    def copy(self) -> None:
        """Write what arrives, without the factor."""
        if self.kept == NONE:
            return
        rows = self.source.expand(self.chunks, -1) if self.source_step == 0 else self.source
        for row, target in zip(
            rows if self.kept == ALL else rows[self.kept : self.kept + 1], self.target, strict=True
        ):
            if row.data_ptr() != target.data_ptr():
                target.copy_(row)

    def scale(self) -> None:
        """Multiply what has arrived."""
        if self.kept != NONE and self.factor != 1:
            self.target.mul_(self.factor)

    def deliver(self) -> None:
        """Do all of it, in torch."""
        with torch.no_grad():
            self.copy()
            self.scale()
