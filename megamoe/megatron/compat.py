"""What differs between the Megatron-core releases (0.16 to 0.19), found out in this one place.

Features are looked for, versions are not compared: a release in between then works by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter

__all__ = ["graph_scopes", "mtp_flag"]

_LAYER_TAKES_FLAG = "is_mtp_layer" in inspect.signature(BaseMoELayer.__init__).parameters
_ROUTER_TAKES_FLAG = "is_mtp_layer" in inspect.signature(TopKRouter.__init__).parameters


def mtp_flag(is_mtp_layer: bool, *, router: bool = False) -> dict[str, bool]:
    """Return the keywords that tell Megatron's layer base class, or a router, whether it belongs to
    multi-token prediction; none where the release does not ask."""
    takes_it = _ROUTER_TAKES_FLAG if router else _LAYER_TAKES_FLAG
    return {"is_mtp_layer": is_mtp_layer} if takes_it else {}


def graph_scopes(config: Any) -> list[str]:
    """Return the parts of a layer that its CUDA graphs are to hold; empty for the whole layer."""
    scopes = getattr(config, "cuda_graph_modules", None)  # its name until 0.18: cuda_graph_scope
    if scopes is None:
        scopes = getattr(config, "cuda_graph_scope", None)
    if scopes is None:
        return []
    if isinstance(scopes, str) or not isinstance(scopes, Iterable):
        scopes = str(getattr(scopes, "name", scopes)).split(",")
    return [str(getattr(scope, "name", scope)) for scope in scopes]
