"""Memory that every rank of a group inside one node can read: torch's symmetric memory.

Needs GPUs that reach each other (NVLink, or PCIe peer to peer) and torch's
``torch.distributed._symmetric_memory``, whose calls used here exist since torch 2.6. NVLink
multicast is never used; where a machine must not even set it up, set
TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import collectives
from overlap.errors import TransportError
from overlap.layout import digest

__all__ = ["Region", "allocate", "obstacle"]

# How long a rank's device waits for a peer before it gives up (and takes its process along).
_TIMEOUT_MS = 10 * 60 * 1000


class Region(Protocol):
    """The same allocation on every rank of a group.

    Attributes:
        local: [numel], this rank's memory.
    """

    local: Tensor

    def of(self, rank: int) -> Tensor:
        """[numel], the memory of that rank of the group, seen from here."""
        ...

    def barrier(self) -> None:
        """Let the current stream wait until every rank's stream has come to its barrier. What each
        wrote to its memory before is then seen by the others. One stream at a time."""
        ...


class _TorchRegion:
    def __init__(self, local: Tensor, handle: Any) -> None:
        self.local = local
        self._handle = handle
        self._views: dict[int, Tensor] = {}

    def of(self, rank: int) -> Tensor:
        if rank not in self._views:
            view = self._handle.get_buffer(rank, self.local.shape, self.local.dtype)
            self._views[rank] = view
        return self._views[rank]

    def barrier(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=_TIMEOUT_MS)


def allocate(
    numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> Region:
    """Allocate the same on every rank of ``group``. A collective.

    Raises:
        TransportError: The ranks cannot see each other's memory.
    """
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(numel, dtype=dtype, device=device)
        return _TorchRegion(local, symmetric_memory.rendezvous(local, group))
    except (ImportError, AttributeError, RuntimeError) as error:
        raise TransportError(
            f"symmetric memory could not be set up over ranks "
            f'{dist.get_process_group_ranks(group)}: {error}. Use the transport "collective"'
        ) from error


def obstacle(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Say why the ranks of ``group`` cannot read each other's memory, or return None where they
    can. A collective, with the same answer on all ranks."""
    if device.type != "cuda":
        return f"the model is on {device.type}, not on GPUs"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    index = torch.cuda.current_device() if device.index is None else device.index
    identity = digest([str(getattr(torch.cuda.get_device_properties(index), "uuid", index))])
    table = collectives.exchange(
        [_node(), identity, index], group, device, "the exchange of the ranks' places"
    )
    ranks = dist.get_process_group_ranks(group)
    elsewhere = [rank for rank, row in zip(ranks, table, strict=True) if row[0] != table[0][0]]
    if elsewhere:
        return f"ranks {elsewhere} are on another node than rank {ranks[0]}"
    if len({row[1] for row in table}) < len(table):
        return "ranks share a GPU"
    strangers = _strangers([row[2] for row in table])
    if strangers:
        return f"cuda:{strangers[0]} cannot read the memory of cuda:{strangers[1]}"
    return None


def _strangers(devices: Sequence[int]) -> tuple[int, int] | None:
    """The first two that are no peers; what CUDA_VISIBLE_DEVICES hides cannot be told."""
    count = torch.cuda.device_count()
    for one in devices:
        for other in devices:
            visible = one < count and other < count
            if one != other and visible and not torch.cuda.can_device_access_peer(one, other):
                return one, other
    return None


def _node() -> int:
    """A number for this boot of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return digest([socket.gethostname(), boot.read_text() if boot.exists() else ""])
