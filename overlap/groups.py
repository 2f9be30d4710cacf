"""The process groups of a run: data-parallel, expert-parallel and expert-data-parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overlap.emulation.group import link_of
from overlap.nccl import NcclOptions, resolve

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
        collective_sms: SMs that compute should leave free beside a collective of dp or edp; None
            where NCCL chooses, 0 where no collective takes SMs (gloo). Emulated: the link's CTAs.
    """

    mesh: DeviceMesh
    dp: dist.ProcessGroup
    ep: dist.ProcessGroup
    edp: dist.ProcessGroup
    collective_sms: int | None = 0

    @classmethod
    def build(
        cls,
        expert_parallel_size: int = 1,
        *,
        device_type: str | None = None,
        nccl: NcclOptions | str = "balanced",
    ) -> ProcessGroups:
        """Make the groups over the default process group. A collective: every rank calls it.

        Args:
            expert_parallel_size: Ranks that share one set of experts; divides the world size.
            device_type: Where the collectives' tensors live; by default "cpu" on gloo, else "cuda".
            nccl: How NCCL runs the collectives of dp and edp, which compute hides: options, or the
                name of a preset (see `overlap.nccl.PRESETS`). The exchange of tokens in ep is not
                hidden and keeps NCCL's own choice. Other backends ignore it.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: The size does not divide the world size, or no preset has that name.
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
        options = resolve(nccl)
        with_nccl = "nccl" in dist.get_backend_config()
        tuned = options if with_nccl else None
        rows = [
            list(range(first, first + expert_parallel_size))
            for first in range(0, world_size, expert_parallel_size)
        ]
        columns = [list(column) for column in zip(*rows, strict=True)]
        dp = _own_group([list(range(world_size))], "dp", tuned)
        ep = _own_group(rows, "ep", None)
        edp = _own_group(columns, "edp", tuned)
        mesh = DeviceMesh.from_group(
            [edp, ep],
            device_type or ("cpu" if dist.get_backend() == "gloo" else "cuda"),
            mesh=rows,
            mesh_dim_names=("edp", "ep"),
        )
        link = link_of(dp)
        sms = options.sms if with_nccl else link.ctas if link else 0
        return cls(mesh, dp, ep, edp, collective_sms=sms)


def _own_group(
    partition: Sequence[Sequence[int]], name: str, nccl: NcclOptions | None
) -> dist.ProcessGroup:
    """Make a group of each part of the ranks, and return the one that this rank is in."""
    mine = None
    for ranks in partition:
        options = nccl.backend_options() if nccl else None
        group = dist.new_group(list(ranks), pg_options=options, group_desc=name)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return mine
