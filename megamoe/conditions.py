"""The five conditions under which a model's MoE layer is replaced: one table for every caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CONDITIONS", "check", "explain"]

CONDITIONS: dict[str, Callable[[Any, Any], bool]] = {
    "enable_primus_turbo is set": lambda s, _: bool(getattr(s, "enable_primus_turbo", False)),
    "use_turbo_mega_moe is set": lambda s, _: bool(getattr(s, "use_turbo_mega_moe", False)),
    "tensor_model_parallel_size is 1": lambda s, _: s.tensor_model_parallel_size == 1,
    "bf16 is set": lambda s, _: bool(s.bf16),
    "there is an expert-parallel group": lambda _, ep_group: ep_group is not None,
}
"""What a condition says -> whether it holds, of (settings, expert-parallel group)."""


def check(settings: Any, ep_group: Any) -> dict[str, bool]:
    """Return every condition and whether it holds.

    Args:
        settings: A configuration or training arguments, with attributes named like the flags.
        ep_group: The expert-parallel process group, or None.
    """
    return {text: holds(settings, ep_group) for text, holds in CONDITIONS.items()}


def explain(settings: Any, ep_group: Any) -> str:
    """Say in a few lines whether the layer is replaced, and which condition does not hold."""
    conditions = check(settings, ep_group)
    failing = [text for text, holds in conditions.items() if not holds]
    verdict = (
        f"kept: {len(failing)} of {len(conditions)} conditions do not hold"
        if failing
        else "replaced: all conditions hold"
    )
    lines = [f"  {'yes' if holds else 'NO ':3}  {text}" for text, holds in conditions.items()]
    return "\n".join([f"MoE layer {verdict}", *lines])
