"""What the backend can run, and what it says about the rest."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megamoe.backends import Group
from megamoe.errors import BackendUnavailableError, InputError

__all__ = ["check_stage1", "unsupported"]

_HOPPER = 9  # major compute capability
_INTERPRETED = triton.knobs.runtime.interpret  # the kernels were decorated for the interpreter


def unsupported(device: torch.device, dtype: torch.dtype, group: Group) -> str | None:
    """Return why the backend cannot run there, as the rest of "backend triton ...", or None."""
    if group is not None:
        return "needs all experts on one rank: expert parallelism is not written; use 'reference'"
    if device.type != "cuda":
        if _INTERPRETED and device.type == "cpu":
            if dtype == torch.float32:
                return None
            return f"computes in torch.float32 under Triton's interpreter, the tokens are {dtype}"
        return f"needs a CUDA device, the tokens are on {device}; move them or use 'reference'"
    major, minor = torch.cuda.get_device_capability(device)
    if major != _HOPPER:
        name = torch.cuda.get_device_name(device)
        return (
            f"is written for compute capability {_HOPPER}.x, {name} has {major}.{minor}; "
            "use 'reference'"
        )
    if dtype != torch.bfloat16:
        return (
            f"computes in torch.bfloat16, the tokens are {dtype}; convert them or use 'reference'"
        )
    return None


def check_stage1(x: Tensor, topk_idx: Tensor, w1: Tensor, group: Group) -> None:
    """Raise BackendUnavailableError or InputError; reads no tensor, so an id is not checked here.

    An id past the last expert stops the device with an assertion that says so, and torch reports it
    at the next synchronisation.
    """
    reason = unsupported(x.device, x.dtype, group)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' {reason}")
    lanes = 16 // x.element_size()
    for name, size in (("hidden size", w1.shape[2]), ("expert width", w1.shape[1] // 2)):
        if size % lanes:
            raise InputError(
                f"the {name} is {size}; backend 'triton' needs a multiple of {lanes} in {x.dtype} "
                "(rows of a multiple of 16 bytes): pad it or use 'reference'"
            )
