"""What Primus-Turbo's ops can run, and what is said of the rest; none of it reads a tensor."""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backends import Group
from megamoe.errors import BackendUnavailableError

__all__ = ["CLAMP", "RANKS", "check_clamp", "check_layer", "check_stage1", "unsupported"]

RANKS = range(2, 9)  # expert-parallel ranks, all in one node
HIDDEN_MULTIPLE = 512
CLAMP = 10.0  # what the kernels cut gate and up to, on both sides, whoever asks
ARCHITECTURE = "gfx950"


def device_problem(device: torch.device) -> str | None:
    """Return why the kernels cannot run on this device, or None."""
    if torch.version.hip is None:
        return f"needs a ROCm build of torch; this is torch {torch.__version__}"
    if device.type != "cuda":
        return f"needs an AMD GPU, the tokens are on {device}"
    architecture = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    if architecture != ARCHITECTURE:
        return f"is written for {ARCHITECTURE}, {device} is {architecture}"
    return None


def shape_problem(hidden: int, ranks: int) -> str | None:
    """Return why a layer of this size and spread cannot run anywhere, or None."""
    if ranks not in RANKS:
        return (
            f"needs {RANKS[0]} to {RANKS[-1]} expert-parallel ranks in one node, the group has "
            f"{ranks}"
        )
    if hidden % HIDDEN_MULTIPLE:
        return f"needs a hidden size that is a multiple of {HIDDEN_MULTIPLE}, it is {hidden}"
    return None


def unsupported(x: Tensor, hidden: int, ffn: int, group: Group) -> str | None:
    """Return why these tokens cannot run here, as the rest of "backend primus_turbo ...", or
    None."""
    ranks = 1 if group is None else dist.get_world_size(group)
    problem = shape_problem(hidden, ranks) or device_problem(x.device)
    if problem is None and x.dtype != torch.bfloat16:
        problem = f"computes in torch.bfloat16, the tokens are {x.dtype}"
    return problem


def check_layer(hidden: int, ranks: int, clamp: float | None) -> None:
    """Raise BackendUnavailableError for a layer that can run nowhere."""
    problem = shape_problem(hidden, ranks)
    if problem is not None:
        raise BackendUnavailableError(f"backend 'primus_turbo' {problem}; use 'reference'")
    check_clamp(clamp)


def check_stage1(x: Tensor, topk_idx: Tensor, w1: Tensor, group: Group) -> None:
    """Raise BackendUnavailableError. An id past the last expert is not looked for: that would wait
    for the device."""
    reason = unsupported(x, w1.shape[2], w1.shape[1] // 2, group)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'primus_turbo' {reason}; use 'reference'")


def check_clamp(clamp: float | None) -> None:
    """Raise BackendUnavailableError for another clamp than the kernels'; say so where there is to
    be none, once."""
    if clamp is None:
        _warn_of_clamp()
    elif clamp != CLAMP:
        raise BackendUnavailableError(
            f"backend 'primus_turbo' clamps SwiGLU at {CLAMP:g} and nowhere else, but "
            f"activation_func_clamp_value is {clamp:g}; set it to {CLAMP:g}, or use 'reference'"
        )


@cache
def _warn_of_clamp() -> None:
    logging.getLogger("megamoe").warning(
        "backend 'primus_turbo' cuts SwiGLU's gate and up part to +-%g though no clamp is set; set "
        "activation_func_clamp_value to %g to confirm it",
        CLAMP,
        CLAMP,
    )
