"""The process groups of a run: data-parallel, expert-parallel and expert-data-parallel."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["ProcessGroups"]


@dataclass(frozen=True)
class ProcessGroups:
    """Who works with whom. All ranks are data-parallel; experts are spread inside that.

    With 4 ranks and ``expert_parallel_size=2``:

        dp    0 1 2 3      dense parameters are replicated over these, and sharded by ZeRO-1
        ep    0 1 | 2 3    consecutive ranks, which hold different experts
        edp   0 2 | 1 3    ranks that hold the same experts

    Attributes:
        mesh: Two dimensions, ("edp", "ep").
        dp: All ranks; a group of its own, so that a user's collectives never mix with ours.
    """

    mesh: DeviceMesh
    dp: dist.ProcessGroup
    ep: dist.ProcessGroup
    edp: dist.ProcessGroup

    @classmethod
    def build(
        cls, expert_parallel_size: int = 1, *, device_type: str | None = None
    ) -> ProcessGroups:
        """Make the groups over the default process group. A collective: every rank calls it.

        Args:
            expert_parallel_size: Ranks that share one set of experts; divides the world size.
            device_type: Where the collectives' tensors live; by default "cpu" on gloo, else "cuda".

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: The size does not divide the world size.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() first, also on a single rank"
            )
        world_size = dist.get_world_size()
        if expert_parallel_size < 1 or world_size % expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size {expert_parallel_size} does not divide the world size "
                f"{world_size}"
            )
        mesh = init_device_mesh(
            device_type or ("cpu" if dist.get_backend() == "gloo" else "cuda"),
            (world_size // expert_parallel_size, expert_parallel_size),
            mesh_dim_names=("edp", "ep"),
        )
        return cls(
            mesh=mesh,
            dp=dist.new_group(group_desc="dp"),
            ep=mesh.get_group("ep"),
            edp=mesh.get_group("edp"),
        )
