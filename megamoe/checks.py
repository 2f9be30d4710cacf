"""What the stages refuse, and how they say so: each check raises InputError before a collective.

A message names the tensor and its value, the limit, and what to do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backends import Group
from megamoe.errors import InputError

__all__ = [
    "check_fused_w2",
    "check_group",
    "check_ids",
    "check_routing",
    "check_rows",
    "check_w1",
    "check_w2",
    "spread",
]

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def spread(group: Group) -> Group:
    """Return the group, or None where it has one rank: nothing is exchanged then."""
    return None if group is None or dist.get_world_size(group) == 1 else group


def check_group(weight: Tensor, group: Group, num_experts: int | None) -> None:
    """The caller's rank is in the group, and the weight holds this rank's share of the experts."""
    if group is not None and dist.get_rank(group) < 0:
        raise InputError("this rank is not in the expert-parallel group that it was given")
    _expect_shape("expert weight", weight, (None, None, None))
    ranks = 1 if group is None else dist.get_world_size(group)
    if num_experts is not None and weight.shape[0] * ranks != num_experts:
        raise InputError(
            f"the weight holds {weight.shape[0]} experts on each of the {ranks} ranks of the "
            f"expert-parallel group, but there are {num_experts} experts; pass the group that the "
            "weights were made for"
        )


def check_routing(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """x, topk_idx and topk_weights fit together."""
    _expect_shape("x", x, (None, None))
    _expect_dtype("x", x, DTYPES)
    _check_slots(topk_idx, topk_weights, x)
    _expect_shape("topk_idx", topk_idx, (x.shape[0], None))


def check_rows(
    l1_out: Tensor, dispatch_weights: Tensor, topk_idx: Tensor, topk_weights: Tensor
) -> None:
    """What stage 1 returned fits together and with the routing."""
    _expect_shape("l1_out", l1_out, (None, None))
    _expect_dtype("l1_out", l1_out, DTYPES)
    _expect_shape("dispatch_weights", dispatch_weights, (l1_out.shape[0],))
    _expect_dtype("dispatch_weights", dispatch_weights, (topk_weights.dtype,))
    _check_slots(topk_idx, topk_weights, l1_out)


def check_w1(x: Tensor, w1: Tensor) -> None:
    """w1 is [g, 2I, H] and alike x."""
    _expect_shape("w1", w1, (None, None, x.shape[1]))
    _expect_alike("w1", w1, "x", x)
    if w1.shape[1] % 2:
        raise InputError(
            f"w1 has {w1.shape[1]} rows per expert; it needs an even number, gate rows then up rows"
        )


def check_w2(l1_out: Tensor, w2: Tensor) -> None:
    """w2 is [g, H, I] and alike l1_out."""
    _expect_shape("w2", w2, (None, None, l1_out.shape[1] // 2))
    _expect_alike("w2", w2, "l1_out", l1_out)


def check_fused_w2(w1: Tensor, w2: Tensor) -> None:
    """w2 is [g, H, I] for w1's [g, 2I, H]."""
    _expect_shape("w2", w2, (w1.shape[0], w1.shape[2], w1.shape[1] // 2))
    _expect_alike("w2", w2, "w1", w1)


def check_ids(topk_idx: Tensor, w1: Tensor, group: Group) -> None:
    """No id is past the last expert. Reads the ids on the host."""
    ranks = 1 if group is None else dist.get_world_size(group)
    limit = w1.shape[0] * ranks
    if topk_idx.numel() and int(topk_idx.max()) >= limit:
        token, k = (topk_idx >= limit).nonzero()[0].tolist()
        raise InputError(
            f"topk_idx[{token}, {k}] is {int(topk_idx[token, k])}, but the weights hold "
            f"{limit} experts ({w1.shape[0]} on each of {ranks} ranks); ids go from 0 to "
            f"{limit - 1}, and a negative id drops its slot"
        )


def _check_slots(topk_idx: Tensor, topk_weights: Tensor, rows: Tensor) -> None:
    _expect_shape("topk_idx", topk_idx, (None, None))
    _expect_dtype("topk_idx", topk_idx, (torch.int64,))
    if topk_idx.shape[1] == 0:
        raise InputError("topk_idx has no column; every token needs at least one slot")
    _expect_shape("topk_weights", topk_weights, tuple(topk_idx.shape))
    wanted = (torch.float32, torch.float64) if rows.dtype == torch.float64 else (torch.float32,)
    _expect_dtype("topk_weights", topk_weights, wanted)
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if tensor.device != rows.device:
            raise InputError(f"{name} is on {tensor.device}, the tokens are on {rows.device}")


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """None in ``shape`` stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}]")


def _expect_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise InputError(f"{name} is {tensor.dtype}; expected {wanted}: convert it first")


def _expect_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise InputError(
            f"{name} is {tensor.dtype} on {tensor.device}, but {other_name} is {other.dtype} on "
            f"{other.device}; they must agree"
        )
