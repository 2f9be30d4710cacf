"""A stand-in for symmetric memory between CPU ranks: files that all of them map."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import symmetric

__all__ = ["SharedRegion", "shared_memory"]


class SharedRegion:
    """See `overlap.symmetric.Region`. Its barrier waits for the ranks instead of their streams."""

    def __init__(self, numel: int, dtype: torch.dtype, group: Any) -> None:
        self.group = group
        name: list[Any] = [None]
        if dist.get_rank(group) == 0:
            handle, name[0] = tempfile.mkstemp(prefix="shared-region-")
            os.close(handle)
        dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group=group)
        size = dist.get_world_size(group)
        path = Path(name[0])
        everything = torch.from_file(str(path), shared=True, size=size * numel, dtype=dtype)
        self._parts = everything.view(size, numel).unbind()
        self.local: Tensor = self._parts[dist.get_rank(group)]
        dist.barrier(group)
        if dist.get_rank(group) == 0:
            path.unlink()

    def of(self, rank: int) -> Tensor:
        return self._parts[rank]

    def barrier(self) -> None:
        dist.barrier(self.group)


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, group: Any) -> SharedRegion:
    assert device.type == "cpu"
    return SharedRegion(numel, dtype, group)


@contextmanager
def shared_memory() -> Iterator[None]:
    """Let the copy-engine transports run on CPU ranks meanwhile."""
    with (
        mock.patch.object(symmetric, "allocate", _allocate),
        mock.patch("overlap.building.obstacle", return_value=None),
    ):
        yield
