"""How NCCL runs the engine's collectives: the CTAs they take, and where these may land.

Nothing here touches other backends: gloo has no CTAs.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PRESETS", "NcclOptions", "ctas_in_profile", "ctas_of_group", "resolve"]


@dataclass(frozen=True, kw_only=True)
class NcclOptions:
    """Options of one NCCL communicator; None leaves the choice to NCCL.

    Attributes:
        high_priority: Its stream goes before compute, so that a collective gets the first SMs that
            come free instead of the last.
        min_ctas, max_ctas: How many CTAs a collective uses; each fills one SM.
        cluster_size: CTAs per cluster (Hopper and later); 0 launches none. A cluster starts only
            where all its CTAs find room in one GPC, and the SMs that compute leaves free lie
            scattered.
    """

    high_priority: bool = True
    min_ctas: int | None = None
    max_ctas: int | None = None
    cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("min_ctas", self.min_ctas), ("max_ctas", self.max_ctas)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None for NCCL's choice: {value}")
        if self.min_ctas and self.max_ctas and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas {self.min_ctas} is more than max_ctas {self.max_ctas}")
        if self.cluster_size is not None and not 0 <= self.cluster_size <= 8:
            raise ValueError(f"cluster_size must be 0 to 8, got {self.cluster_size}")

    @property
    def sms(self) -> int | None:
        """SMs that compute should leave free beside a collective; None where NCCL chooses.

        One for each CTA: more were slower in every pair that was measured, with clusters too.
        """
        return self.max_ctas

    def backend_options(self) -> Any:
        """Return a new ``ProcessGroupNCCL.Options``; one for each group, since torch writes to it.

        Raises:
            RuntimeError: This torch was built without NCCL.
        """
        backend = getattr(dist, "ProcessGroupNCCL", None)
        if backend is None:
            raise RuntimeError("this torch was built without NCCL, so there are no options for it")
        options = backend.Options(is_high_priority_stream=self.high_priority)
        for field, value in (
            ("min_ctas", self.min_ctas),
            ("max_ctas", self.max_ctas),
            ("cga_cluster_size", self.cluster_size),
        ):
            if value is not None:
                setattr(options.config, field, value)
        return options


PRESETS = {
    # The fastest steps of NCCL's on two H200: on 8 CTAs a gather outlasts the stage beside it.
    "balanced": NcclOptions(min_ctas=16, max_ctas=16, cluster_size=0),
    # The fastest pair where compute is several times longer than the collective on 8 CTAs.
    "narrow": NcclOptions(min_ctas=8, max_ctas=8, cluster_size=0),
    # NCCL's own choice (32 CTAs in clusters of 4 between H200s): fastest with nothing beside it,
    # and no faster than one after the other beside a product that fills the chip.
    "nccl": NcclOptions(),
}


def resolve(options: NcclOptions | str) -> NcclOptions:
    """Return the preset of that name, or the options themselves.

    Raises:
        ValueError: There is no such preset.
    """
    if isinstance(options, NcclOptions):
        return options
    if options not in PRESETS:
        raise ValueError(f"no NCCL preset is called {options!r}; there are {sorted(PRESETS)}")
    return PRESETS[options]


def ctas_of_group(group: dist.ProcessGroup) -> int | None:
    """Return how many CTAs a collective of ``group`` takes at most, by the options that the group
    was made with and by NCCL_MAX_CTAS, which NCCL puts above them.

    None where NCCL chooses; 0 where nothing takes a CTA: a group of one, or another backend.
    """
    if "nccl" not in dist.get_backend_config(group) or group.size() == 1:
        return 0
    given = os.environ.get("NCCL_MAX_CTAS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    config = getattr(options, "config", None)  # torch's debugging wrapper has none
    ctas = int(getattr(config, "max_ctas", 0))
    return ctas if ctas > 0 else None  # NCCL's mark for "not set" is negative


def ctas_in_profile(path: str | Path) -> int | None:
    """Return how many CTAs NCCL gave a gather or a reduce-scatter, by a trace of torch's profiler.

    It is the largest grid of their kernels: small messages get fewer. None where the trace shows no
    such kernel (or RCCL, whose kernels have one name for everything).
    """
    content = Path(path).read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    events = json.loads(content)["traceEvents"]
    grids = [
        event["args"]["grid"][0]
        for event in events
        if event.get("cat") == "kernel"
        and event["name"].startswith("nccl")
        and ("AllGather" in event["name"] or "ReduceScatter" in event["name"])
        and "grid" in event.get("args", {})
    ]
    return max(grids, default=None)
