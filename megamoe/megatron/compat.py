"""What differs between the Megatron-core releases (0.16 to 0.19), found out in this one place.

Features are looked for, versions are not compared: a release in between then works by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter

__all__ = ["TAKES_MTP_FLAG", "graph_scopes", "mtp_flag", "names_of"]

TAKES_MTP_FLAG = "is_mtp_layer" in inspect.signature(BaseMoELayer.__init__).parameters
"""Layers and routers are told whether they belong to a multi-token-prediction layer."""

_ROUTER_TAKES_IT = "is_mtp_layer" in inspect.signature(TopKRouter.__init__).parameters


def mtp_flag(is_mtp_layer: bool, *, router: bool = False) -> dict[str, bool]:
    """Return the flag as keywords for Megatron's layer base class, or for a router."""
    takes_it = _ROUTER_TAKES_IT if router else TAKES_MTP_FLAG
    return {"is_mtp_layer": is_mtp_layer} if takes_it else {}


def graph_scopes(config: Any) -> list[str]:
    """Return the parts of a layer that its CUDA graphs are to hold; empty for the whole layer."""
    scopes = getattr(config, "cuda_graph_modules", None)  # its name until 0.18: cuda_graph_scope
    if scopes is None:
        scopes = getattr(config, "cuda_graph_scope", None)
    return names_of(scopes)


def names_of(values: Any) -> list[str]:
    """Return strings for what may be None, one string (with commas), or a list of enum members."""
    if values is None:
        return []
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = str(getattr(values, "name", values)).split(",")
    return [str(getattr(value, "name", value)) for value in values]
