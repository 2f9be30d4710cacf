"""Products of expert-major rows with stacked weights: one matrix product per expert.

On CUDA in bf16, torch's grouped product does all experts in one kernel where its layout rules
allow; otherwise each expert is one `torch.mm` into its part of one preallocated result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["rows_by_weight", "rows_by_weight_t", "weight_grad"]

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))


def rows_by_weight_t(rows: Tensor, weight: Tensor, expert_rows: Tensor) -> Tensor:
    """Return [P, N]: each row times its expert's transposed matrix; rows [P, K], weight [g, N, K].

    ``expert_rows`` ([g] int64, CPU) counts the rows of each expert; its sum is P.
    """
    return rows_by_weight(rows, weight.transpose(1, 2), expert_rows)


def rows_by_weight(rows: Tensor, weight: Tensor, expert_rows: Tensor) -> Tensor:
    """Return [P, N]: each row times its expert's matrix; rows [P, K], weight [g, K, N]."""
    if _takes_grouped(rows, *weight.shape[1:]):
        return _grouped_mm(rows, weight, offs=_ends(expert_rows, rows.device))
    result = rows.new_empty((rows.shape[0], weight.shape[2]))
    start = 0
    for expert, count in enumerate(expert_rows.tolist()):
        part = slice(start, start + count)
        if count:
            torch.mm(rows[part], weight[expert], out=result[part])
        start += count
    return result


def weight_grad(left: Tensor, right: Tensor, expert_rows: Tensor) -> Tensor:
    """Return [g, M, N]: left^T @ right over each expert's rows; left [P, M], right [P, N].

    The result of an expert without rows is exactly zero.
    """
    if _takes_grouped(left, left.shape[1], right.shape[1]):
        result = _grouped_mm(left.t(), right, offs=_ends(expert_rows, left.device))
        result[(expert_rows == 0).to(left.device)] = 0  # a product over no rows may write nothing
        return result
    result = left.new_empty((len(expert_rows), left.shape[1], right.shape[1]))
    start = 0
    for expert, count in enumerate(expert_rows.tolist()):
        part = slice(start, start + count)
        if count:
            torch.mm(left[part].t(), right[part], out=result[expert])
        else:
            result[expert].zero_()
        start += count
    return result


def _takes_grouped(rows: Tensor, *widths: int) -> bool:
    """Whether the grouped product takes these rows; its strides must be multiples of 16 bytes."""
    return (
        _grouped_mm is not None
        and rows.is_cuda
        and rows.dtype == torch.bfloat16
        and rows.shape[0] > 0
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
        and all(width % 8 == 0 for width in widths)
    )


def _ends(expert_rows: Tensor, device: torch.device) -> Tensor:
    return expert_rows.cumsum(0).to(device=device, dtype=torch.int32)
