"""Expert layers in training, with the collectives or, between steps, without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks.here import Here
from benchmarks.stages import Shape
from megamoe import MegaMoEConfig, MegaMoELayer
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from overlap.bucket import GradState, ParamState
from overlap.collectives import InFlight

__all__ = ["BY_NCCL", "Tower", "Training", "Variant"]


@dataclass(frozen=True)
class Variant:
    """A schedule: how the groups are made, what the engine is told, whether layers are fused."""

    nccl: str = "balanced"
    fused: bool = False
    config: dict[str, Any] = field(default_factory=dict)


BY_NCCL = {"param_gather_transport": "collective", "grad_reduce_transport": "collective"}


class Tower(nn.Module):
    """Expert layers around residuals, uniform routing, [T, H] -> [T, H]."""

    def __init__(self, here: Here, shape: Shape, backend: str, layers: int) -> None:
        super().__init__()
        config = MegaMoEConfig(
            hidden_size=shape.hidden,
            moe_ffn_hidden_size=shape.ffn,
            num_moe_experts=shape.experts,
            moe_router_topk=shape.top_k,
            moe_router_force_load_balancing=True,
            mega_moe_backend=backend,
        )
        dtype = torch.bfloat16 if here.cuda else torch.float32
        self.layers = nn.ModuleList(
            MegaMoELayer(config, dtype=dtype, device="meta") for _ in range(layers)
        )
        self.to_empty(device=here.device)
        for param in self.parameters():  # drawn on the device: the layers' own way takes minutes
            nn.init.normal_(param, std=param.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


class _Nothing:
    """A transport that moves nothing: what is left of a step is compute.

    Whoever scales or casts besides the transport that this stands in for still does.
    """

    name = "nothing"
    sms = 0

    def __init__(self, scales: bool = True) -> None:
        self.scales = scales

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> InFlight:
        return InFlight(self, (output, shard), what)

    def reduce_scatter(
        self, shard: Tensor, source: Tensor, what: str, scale: float = 1.0
    ) -> InFlight:
        return InFlight(self, (shard, source), what)

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Training:
    """One variant, wrapped and ready to step."""

    def __init__(self, here: Here, model: Tower, shape: Shape, variant: Variant) -> None:
        self.groups = ProcessGroups.build(nccl=variant.nccl)
        for layer in model.layers:
            layer.experts.fused = variant.fused
        with here.peer_memory():
            config = OverlapConfig(**variant.config)
            self.ddp = DistributedDataParallel(model, config, self.groups)
        self.optimizer = DistributedOptimizer(
            self.ddp, torch.optim.AdamW, lr=1e-5, fused=here.cuda or None
        )
        dtype = next(model.parameters()).dtype
        x = torch.randn(shape.tokens, shape.hidden, device=here.device)
        self.x = x.to(dtype).requires_grad_()
        self.dy = torch.randn_like(self.x)

    @contextmanager
    def moving_nothing(self) -> Iterator[None]:
        """Run whole steps without collectives meanwhile. The replicas drift apart until the next
        step with them, which makes no difference to its time."""
        self._rest()
        transports = [(bucket.gather_by, bucket.reduce_by) for bucket in self.ddp.buckets]
        for bucket, (_, reduce_by) in zip(self.ddp.buckets, transports, strict=True):
            bucket.gather_by = bucket.reduce_by = _Nothing(reduce_by.scales)
        yield
        self._rest()
        for bucket, both in zip(self.ddp.buckets, transports, strict=True):
            bucket.gather_by, bucket.reduce_by = both

    def _rest(self) -> None:
        """Wait for what the last step left under way: whoever issued a collective waits for it."""
        self.ddp.finish_param_sync()
        for bucket in self.ddp.buckets:
            assert bucket.param_state is ParamState.READY, bucket.name
            assert bucket.grad_state is not GradState.REDUCING, bucket.name

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.x.grad = None
        self.ddp(self.x).backward(self.dy)
        self.optimizer.step()

    def close(self) -> None:
        self.ddp.remove()
        for group in (self.groups.dp, self.groups.ep, self.groups.edp):
            dist.destroy_process_group(group)
