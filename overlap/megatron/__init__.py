"""Megatron-core's DDP, laid out and wired so that expert weights' collectives can hide.

    ddp = overlap.megatron.wrap(model_chunks, overlap.megatron.ddp_config())
    print(overlap.megatron.explain(ddp[0]))

Wrapping needs megatron-core (0.16 to 0.19); the layout rule and its diagnosis do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlap.megatron.checkpoint import padding_kept
from overlap.megatron.explain import Explanation, Finding, Reason, diagnose, explain
from overlap.megatron.layout import (
    Chunk,
    MegatronBucket,
    Parameter,
    default_bucket_size,
    plan_buckets,
)
from overlap.megatron.nccl import write_nccl_config

if TYPE_CHECKING:
    from overlap.megatron.wiring import ddp_config, finish_in_flight, take_waited_ms, wrap

__all__ = [
    "Chunk",
    "Explanation",
    "Finding",
    "MegatronBucket",
    "Parameter",
    "Reason",
    "ddp_config",
    "default_bucket_size",
    "diagnose",
    "explain",
    "finish_in_flight",
    "padding_kept",
    "plan_buckets",
    "take_waited_ms",
    "wrap",
    "write_nccl_config",
]

_NEED_MEGATRON = ("ddp_config", "finish_in_flight", "take_waited_ms", "wrap")


def __getattr__(name: str) -> Any:
    if name not in _NEED_MEGATRON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.wiring"), name)
