"""Where a row lives: the one place that turns a token into an address.

Today every row is on this rank. Expert parallelism replaces the bodies here by a look-up in a table
of the peers' base pointers (rank = token // tokens_per_rank); no kernel computes such an address
itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_pointer"]


@triton.jit
def row_pointer(base_ptr, row, stride):
    """Return the address of element 0 of ``row`` (int32 or int64, any shape); int64 arithmetic."""
    return base_ptr + row.to(tl.int64) * stride
