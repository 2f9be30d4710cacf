"""The table of backends: what computes the stages, and where.

A backend is a module that offers the four functions of `Backend`. They hold no autograd, no
nn.Module and no validation; `megamoe.functions` differentiates them, `megamoe.stages` checks
their inputs. One that stands on foreign autograd nodes offers those of `OwnNodes` instead. A module
is imported when it is first asked for, and its ``load`` called where it has one: it raises
BackendUnavailableError if what the backend stands on is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.errors import BackendUnavailableError, UnknownBackendError

__all__ = [
    "AUTO",
    "BACKENDS",
    "Backend",
    "Group",
    "OwnNodes",
    "check_backend",
    "check_layer",
    "get_backend",
    "get_fused_router",
    "own_nodes",
    "select_backend",
    "sm_budget_adder",
]

Group = dist.ProcessGroup | None

AUTO = "auto"

BACKENDS = {
    "reference": "megamoe.backends.reference",
    "triton": "megamoe.backends.triton",
    "primus_turbo": "megamoe.backends.primus_turbo",
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


class OwnNodes(Protocol):
    """A backend whose stages are autograd nodes already, with profiler ranges of their own."""

    def check_stage1(self, x: Tensor, topk_idx: Tensor, w1: Tensor, group: Group) -> None:
        """Raise a MegaMoEError for what this backend cannot take."""

    def stage1(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor, group: Group
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return (l1_out, dispatch_weights, handle)."""

    def stage2(
        self,
        l1_out: Tensor,
        dispatch_weights: Tensor,
        handle: tuple[Tensor, ...],
        topk_idx: Tensor,
        topk_weights: Tensor,
        w2: Tensor,
        clamp: float | None,
        group: Group,
    ) -> Tensor:
        """Return y."""

    def fused(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        clamp: float | None,
        group: Group,
    ) -> Tensor:
        """Return the y of a single node."""


_loaded: dict[str, Backend] = {}
_announced: set[str] = set()
_log = logging.getLogger("megamoe")


def check_backend(name: str) -> None:
    """Raise UnknownBackendError unless ``name`` is a backend or "auto"; import what it names.

    A region that torch.compile traces cannot import, so whoever builds a layer calls this.
    """
    if name == AUTO:
        get_backend("reference")
        _triton_or_reason()
    else:
        get_backend(name)


def check_layer(name: str, hidden: int, ranks: int, clamp: float | None) -> None:
    """Raise BackendUnavailableError if no input would make the named backend run such a layer.

    Args:
        ranks: Of the expert-parallel group.
        clamp: SwiGLU's, see `megamoe.stages.mega_moe_stage2`.
    """
    if name != AUTO and (check := getattr(get_backend(name), "check_layer", None)):
        check(hidden, ranks, clamp)


def own_nodes(backend: Backend) -> OwnNodes | None:
    """Return the backend if its stages are autograd nodes already."""
    return cast(OwnNodes, backend) if hasattr(backend, "stage1") else None


def get_backend(name: str) -> Backend:
    """Return the backend of that name.

    Raises UnknownBackendError with the valid names, BackendUnavailableError where what it is built
    on is not installed.
    """
    if name not in _loaded:
        if name not in BACKENDS:
            raise UnknownBackendError(
                f"backend {name!r} is unknown; the backends are {sorted((*BACKENDS, AUTO))}"
            )
        try:
            module = import_module(BACKENDS[name])
        except ImportError as error:
            raise BackendUnavailableError(
                f"backend {name!r} cannot be imported ({error}); 'triton' needs Triton 3.4 or later"
            ) from error
        getattr(module, "load", _nothing)()
        _loaded[name] = cast(Backend, module)
    return _loaded[name]


def select_backend(name: str, x: Tensor, hidden: int, ffn: int, group: Group) -> Backend:
    """Return the named backend. "auto" is triton where it can run, else the reference; which one,
    and why not triton, goes to the log ("megamoe", level INFO) once.

    Raises UnknownBackendError.
    """
    if name != AUTO:
        return get_backend(name)
    found = _triton_or_reason()
    reason = found if isinstance(found, str) else found.unsupported(x, hidden, ffn, group)
    if reason is None:
        _say("backend 'auto': triton")
        return get_backend("triton")
    _say(f"backend 'auto': reference, because triton {reason}")
    return get_backend("reference")


def get_fused_router(
    name: str,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor] | None] | None:
    """Return what computes a router from its logits on in one kernel, or None.

    It takes (logits, config, balance) and returns None for logits that it cannot take; otherwise
    (ids [T, K], weights [T, K], score sums [E], tokens [E]), the last two over all tokens.
    """
    found = _triton_or_reason() if name == AUTO else get_backend(name)
    return getattr(found, "fused_router", None)


def sm_budget_adder(name: str) -> Callable[[Callable[[], int]], Callable[[], None]]:
    """Return what registers an SM budget with the backend and returns how to take it back."""
    found = _triton_or_reason() if name in (AUTO, "triton") else ""
    return (lambda budget: lambda: None) if isinstance(found, str) else found.add_sm_budget


def _nothing() -> None:
    pass


def _triton_or_reason() -> Any:
    try:
        return get_backend("triton")
    except BackendUnavailableError as error:
        return f"is missing: {error}"


def _say(text: str) -> None:
    if text not in _announced and not torch.compiler.is_compiling():
        _announced.add(text)
        _log.info(text)
