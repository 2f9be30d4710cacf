"""The table of backends: what computes the stages, and where.

A backend is a module that offers the four functions of `Backend`. They hold no autograd, no
nn.Module and no validation; `megamoe.functions` differentiates them, `megamoe.stages` checks
their inputs. A module is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

from megamoe.errors import UnknownBackendError

__all__ = ["BACKENDS", "Backend", "Group", "get_backend"]

Group = dist.ProcessGroup | None

BACKENDS = {
    "reference": "megamoe.backends.reference",
    "triton": "megamoe.backends.triton",
}


class Backend(Protocol):
    """What a backend module offers; shapes as in `megamoe.stages`.

    ``group`` is None where the experts live on one rank. The ``needs`` flags are those of
    autograd: what is not needed is returned as None, and ranks of a group agree on them.
    """

    def check_stage1(self, x: Tensor, topk_idx: Tensor, w1: Tensor, group: Group) -> None:
        """Raise a MegaMoEError for what this backend cannot take, an id out of range included."""

    def stage1_forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        group: Group,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return (l1_out, dispatch_weights, handle)."""

    def stage2_forward(
        self,
        l1_out: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor,
        w2: Tensor,
        clamp: float | None,
        group: Group,
    ) -> Tensor:
        """Return y."""

    def stage2_backward(
        self,
        dy: Tensor,
        l1_out: Tensor,
        dispatch_weights: Tensor,
        handle: tuple[Tensor, ...],
        w2: Tensor,
        clamp: float | None,
        group: Group,
        needs_rows: bool,
        needs_w2: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (grad l1_out, grad dispatch_weights, dW2); needs_rows asks for the first two."""

    def stage1_backward(
        self,
        d_l1: Tensor,
        d_dispatch_weights: Tensor,
        x: Tensor,
        handle: tuple[Tensor, ...],
        w1: Tensor,
        group: Group,
        needs_x: bool,
        needs_weights: bool,
        needs_w1: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (dx, grad topk_weights, dW1)."""


_loaded: dict[str, Backend] = {}


def get_backend(name: str) -> Backend:
    """Return the backend of that name, or raise UnknownBackendError with the valid names."""
    if name not in _loaded:  # a compiled region finds it here, where building the layer put it
        if name not in BACKENDS:
            raise UnknownBackendError(
                f"backend {name!r} is unknown; the backends are {sorted(BACKENDS)}"
            )
        _loaded[name] = cast(Backend, import_module(BACKENDS[name]))
    return _loaded[name]
