"""What the backend can run, and what it says about the rest."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from megamoe.backends import Group
from megamoe.errors import BackendUnavailableError

__all__ = ["check_stage1", "runs_on", "unsupported"]

_HOPPER = 9  # major compute capability
_INTERPRETED = triton.knobs.runtime.interpret  # the kernels were decorated for the interpreter


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on this device: a Hopper GPU, or the CPU if they are interpreted."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] == _HOPPER
    return _INTERPRETED and device.type == "cpu"


def unsupported(x: Tensor, hidden: int, ffn: int, group: Group) -> str | None:
    """Return why these tokens cannot run here, as the rest of "backend triton ...", or None.

    Reads no tensor.
    """
    if group is not None and dist.get_world_size(group) > 1:
        return "needs all experts on one rank: expert parallelism is not written"
    if x.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(x.device)
        if major != _HOPPER:
            return f"is written for compute capability {_HOPPER}.x, {x.device} has {major}.{minor}"
        wanted = torch.bfloat16
    elif _INTERPRETED and x.device.type == "cpu":
        wanted = torch.float32
    else:
        return f"needs a CUDA device, the tokens are on {x.device}"
    if x.dtype != wanted:
        return f"computes in {wanted} there, the tokens are {x.dtype}"
    lanes = 16 // x.element_size()
    for name, size in (("hidden size", hidden), ("expert width", ffn)):
        if size % lanes:
            return f"needs rows of a multiple of 16 bytes, {lanes} elements; the {name} is {size}"
    return None


def check_stage1(x: Tensor, topk_idx: Tensor, w1: Tensor, group: Group) -> None:
    """Raise BackendUnavailableError; reads no tensor, so an id is not checked here.

    An id past the last expert stops the device with an assertion that says so, and torch reports
    it at the next synchronisation.
    """
    reason = unsupported(x, w1.shape[2], w1.shape[1] // 2, group)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' {reason}; use 'reference'")
