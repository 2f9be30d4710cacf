"""What a user may choose about the overlap, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["OverlapConfig"]

_TRANSPORTS = ("auto", "collective", "nccl", "copy_engine")
_REDUCIBLE = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """How parameters are gathered and gradients reduced.

    None of these changes what is computed, except for `grad_dtype`, `reduce_dtype`,
    `grad_reduction`, `unused_parameters="zero"` and, by a rounding that it saves,
    `gradient_accumulation_fusion`.
    """

    overlap_param_gather: bool = True
    """Gather from the forward pre-hooks; otherwise the optimizer's step gathers everything."""

    overlap_grad_reduce: bool = True
    """Reduce from the gradient hooks; otherwise all is reduced when the gradients are needed."""

    serialize: bool = False
    """Wait for every collective where it is issued: the baseline of "effective" overlap."""

    param_gather_transport: Literal["auto", "collective", "nccl", "copy_engine"] = "auto"
    """Who gathers: "collective", the process group's own ("nccl" says the same); "copy_engine",
    which takes no SM and needs GPUs of one node that read each other's memory; "auto", the latter
    where it can run."""

    grad_reduce_transport: Literal["auto", "collective", "nccl", "copy_engine"] = "auto"
    """Who reduces. With "copy_engine" the copy engines bring the peers' gradients, and a kernel
    adds them in fp32, in the order of ranks, whatever `reduce_dtype` they travel in."""

    prefetch_depth: int = 1
    """How many buckets ahead of the one in use are gathered. 0 gathers each bucket in its own
    pre-hook, which hides nothing."""

    bucket_bytes: int = 64 * 2**20
    """Dense parameters are packed into buckets of about this many bytes of parameters."""

    share_expert_buckets: bool = False
    """Put the expert weights of one layer into one bucket, so that nothing can hide. It exists
    to show that a check notices."""

    grad_dtype: torch.dtype = torch.float32
    """Gradients accumulate in this dtype."""

    reduce_dtype: torch.dtype | None = None
    """Gradients travel in this dtype; None is `grad_dtype`."""

    gradient_accumulation_fusion: bool = True
    """Let the gradients of weight modules with a true `takes_main_grad` be written to the fp32
    buckets by whoever computes them (see `overlap.main_grad`), not rounded to the weight's dtype
    and added by a pass. Not with another `grad_dtype`."""

    grad_reduction: Literal["average", "sum"] = "average"
    """Average divides by the data-parallel size, for expert parameters too: an expert sees the
    tokens of all data-parallel ranks whatever the expert-parallel size."""

    unused_parameters: Literal["error", "zero"] = "error"
    """What a trainable parameter without a gradient means: an error that names it, or zero."""

    check_for_nan: bool = False
    """Look for NaN and infinity in the reduced gradients (one small all-reduce and one wait of
    the host per step) and name the parameters that hold them."""

    collective_sms: int | None = None
    """SMs that compute leaves free while a collective is under way, asked for at every launch by
    modules with a `set_sm_budget`. None takes what the groups' NCCL options say: 0 on gloo, and
    where NCCL chooses its CTAs (`overlap.nccl.ctas_in_profile` finds how many it took). A copy
    engine's gather takes none, its reduction those that add."""

    measure_waits: bool = False
    """Let `DistributedDataParallel.take_waited_ms` tell how long compute stood still."""

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be 0 or more, got {self.prefetch_depth}")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be 1 or more, got {self.bucket_bytes}")
        if self.collective_sms is not None and self.collective_sms < 0:
            raise ValueError(f"collective_sms must be 0 or more, got {self.collective_sms}")
        reduce_dtype = self.grad_dtype if self.reduce_dtype is None else self.reduce_dtype
        for name, dtype in (("grad_dtype", self.grad_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype not in _REDUCIBLE:
                raise ValueError(f"{name} must be torch.float32 or torch.bfloat16, got {dtype}")
        for name, value, choices in (
            ("param_gather_transport", self.param_gather_transport, _TRANSPORTS),
            ("grad_reduce_transport", self.grad_reduce_transport, _TRANSPORTS),
            ("grad_reduction", self.grad_reduction, ("average", "sum")),
            ("unused_parameters", self.unused_parameters, ("error", "zero")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")
