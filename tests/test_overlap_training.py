"""The engine against one process with the full model, the full batch and plain torch AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from tests.overlap_models import Model, batch, global_loss, own_part
from tests.ranks import Ranks

STEPS = 30
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


def alone(ranks: int, microbatches: int = 1, max_norm: float = 1.0) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step in one process."""
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    curve = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(microbatches):
            tokens, targets = batch(step, ranks, microbatch)
            loss = F.cross_entropy(model(tokens), targets) / microbatches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        curve.append((total, norm.item()))
    return curve


def together(
    ep: int, microbatches: int = 1, max_norm: float = 1.0, **config: Any
) -> list[tuple[float, float]]:
    torch.manual_seed(7)
    groups = ProcessGroups.build(expert_parallel_size=ep)
    model = Model(groups.ep)
    ddp = DistributedDataParallel(model, OverlapConfig(**config), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, **ADAMW)
    curve = []
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(microbatches):
            tokens, targets = (own_part(t, rank) for t in batch(step, ranks, microbatch))

            def backward(tokens: Any = tokens, targets: Any = targets) -> float:
                loss = F.cross_entropy(ddp(tokens), targets) / microbatches
                loss.backward()
                return global_loss(loss)

            if microbatch < microbatches - 1:
                with ddp.no_sync():
                    total += backward()
            else:
                total += backward()
        norm = optimizer.clip_grad_norm(max_norm)
        optimizer.step()
        curve.append((total, norm.item()))
    return curve


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_fp32_curves_equal_one_process(ranks: Ranks, ep: int) -> None:
    expected = torch.tensor(alone(4))
    for got in ranks.run(4, together, ep):
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-5, atol=0)
