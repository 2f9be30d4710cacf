"""Where the installed Primus-Turbo is found, and what is said of one that cannot be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from megamoe.errors import BackendUnavailableError

__all__ = ["BUILD", "MINIMUM_COMMIT", "Operations", "installed_commit", "operations"]

MINIMUM_COMMIT = "9b5d3092efcbc087657b233d8e9ae662cee6ec6b"
BUILD = "REBUILD_PRIMUS_TURBO=1 scripts/rebuild_primus_turbo.sh"

_MODULE = "primus_turbo.pytorch.ops.moe.fused_mega_moe"


class Operations(NamedTuple):
    """Primus-Turbo's functions, with its own order of arguments."""

    stage1: Callable[..., Any]  # (x, topk_idx, topk_weights, w1, group)
    stage2: Callable[..., Any]  # (l1_out, dispatch_weights, handle, topk_idx, weights, w2, group)
    fused: Callable[..., Any]  # (group, x, topk_idx, topk_weights, w1, w2)
    route: Callable[..., Any]  # (logits, topk, groups, selected_groups, score_function, scaling)


@cache
def operations() -> Operations:
    """Return the installed functions.

    Raises BackendUnavailableError: not installed, not importable, or without the two stages.
    """
    found = _import("primus_turbo.pytorch.ops")
    try:
        moe = import_module(_MODULE)
    except ImportError as error:
        raise _too_old(f"has no {_MODULE} ({error})") from error
    for name in ("fused_mega_moe_stage1", "fused_mega_moe_stage2", "fused_mega_moe"):
        if not hasattr(moe, name):
            raise _too_old(f"has no {name}")
    first = next(iter(inspect.signature(moe.fused_mega_moe).parameters), "nothing")
    if first != "group":
        raise _too_old(f"has a fused_mega_moe that takes {first} first, not the group")
    route = "fused_group_topk_routing_with_aux_score"
    if not hasattr(found, route):
        raise _too_old(f"has no {route}")
    return Operations(
        moe.fused_mega_moe_stage1,
        moe.fused_mega_moe_stage2,
        moe.fused_mega_moe,
        getattr(found, route),
    )


def installed_commit() -> str | None:
    """Return the commit that the installed package says it was built from, if it says one."""
    try:
        info = import_module("primus_turbo._build_info")
    except ImportError:
        return None
    commit = getattr(info, "__git_commit__", None)
    return None if commit in (None, "unknown") else str(commit)


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "primus_turbo"
        what = "is not installed" if missing else f"is installed but cannot be imported ({error})"
        raise BackendUnavailableError(
            f"backend 'primus_turbo' needs the package primus_turbo, which {what}; build commit "
            f"{MINIMUM_COMMIT} or later with {BUILD}"
        ) from error


def _too_old(what: str) -> BackendUnavailableError:
    commit = installed_commit()
    at = "" if commit is None else f" (commit {commit})"
    return BackendUnavailableError(
        f"backend 'primus_turbo': the installed primus_turbo{at} {what}; build commit "
        f"{MINIMUM_COMMIT} or later with {BUILD}"
    )
