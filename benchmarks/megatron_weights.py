"""The same weights for Megatron-core's MoELayer and for ours: where one's are in the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


@torch.no_grad()
def share_weights(chunk: Any, file: Path) -> str:
    """Keep or take the weights; return the class that holds the experts."""
    params = dict(chunk.named_parameters())
    if not file.exists():
        torch.save(under_our_names(params), file)
    else:
        weights = torch.load(file, mmap=True)
        places = {name: our_place(name) for name in params}
        missing = {ours for ours, _ in places.values()} ^ weights.keys()
        assert not missing, missing
        for name, (ours, index) in places.items():
            params[name].copy_(weights[ours] if index is None else weights[ours][index])
    holders = {
        type(module.experts).__name__
        for module in chunk.modules()
        if isinstance(getattr(module, "experts", None), torch.nn.Module)
    }
    return ", ".join(sorted(holders))


def our_place(name: str) -> tuple[str, int | None]:
    """Where our layer has a parameter of MoELayer: its name, and the index of an expert."""
    if found := re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.linear_(fc[12])\.weight", name):
        experts, index, which = found.groups()  # SequentialMLP
    elif found := re.fullmatch(r"(.*\.experts)\.linear_(fc[12])\.weight(\d+)", name):
        experts, which, index = found.groups()  # TEGroupedMLP
    else:
        return name, None
    return f"{experts}.{which}_weight.weight", int(index)


def under_our_names(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the host of MoELayer's parameters, the experts' stacked as ours are."""
    found: dict[str, list[tuple[int | None, torch.Tensor]]] = {}
    for name, param in params.items():
        ours, index = our_place(name)
        found.setdefault(ours, []).append((index, param.detach().cpu().clone()))
    return {
        name: parts[0][1]
        if parts[0][0] is None
        else torch.stack([part for _, part in sorted(parts, key=lambda pair: pair[0] or 0)])
        for name, parts in found.items()
    }
