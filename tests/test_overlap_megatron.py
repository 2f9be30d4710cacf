"""The engine against Megatron-core's DDP and distributed optimizer, on the same model and data."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from tests import megatron_shim
from tests.overlap_models import Model, mean_over_ranks, own_batch
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

STEPS, LR, DECAY, MAX_NORM = 12, 2e-3, 0.1, 0.5


def theirs(ep: int, dtype: torch.dtype, microbatches: int) -> list[tuple[float, float]]:
    torch.manual_seed(7)
    group = megatron_shim.initialize(ep)
    ddp = megatron_shim.wrap(Model(group, dtype=dtype))
    precision = {"bf16": True} if dtype is torch.bfloat16 else {}
    optimizer = megatron_shim.adamw(
        ddp, lr=LR, min_lr=LR, weight_decay=DECAY, clip_grad=MAX_NORM, **precision
    )
    curve = []
    with megatron_shim.on_cpu():
        for step in range(STEPS):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            total = backward(ddp, step, microbatches)
            ddp.finish_grad_sync()
            _, norm, _ = optimizer.step()
            curve.append((total, float(norm)))
    return curve


def ours(ep: int, dtype: torch.dtype, microbatches: int) -> list[tuple[float, float]]:
    torch.manual_seed(7)
    groups = ProcessGroups.build(expert_parallel_size=ep)
    model = Model(groups.ep, dtype=dtype)
    ddp = DistributedDataParallel(model, OverlapConfig(), groups)
    optimizer = DistributedOptimizer(
        ddp, torch.optim.AdamW, decay_groups(model), lr=LR, weight_decay=DECAY
    )
    curve = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = backward(ddp, step, microbatches)
        norm = optimizer.clip_grad_norm(MAX_NORM).item()
        optimizer.step()
        curve.append((total, norm))
    return curve


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As Megatron does: no decay of biases and other vectors."""
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def backward(ddp: Any, step: int, microbatches: int) -> float:
    total = 0.0
    for microbatch in range(microbatches):
        with nullcontext() if microbatch == microbatches - 1 else ddp.no_sync():
            tokens, targets = own_batch(step, microbatch)
            loss = F.cross_entropy(ddp(tokens), targets) / microbatches
            loss.backward()
        total += mean_over_ranks(loss)
    return total


@pytest.mark.parametrize(
    ("ep", "dtype", "microbatches"),
    [
        (1, torch.float32, 1),
        (2, torch.float32, 1),
        (2, torch.float32, 3),
        (4, torch.float32, 1),
        (2, torch.bfloat16, 2),
    ],
    ids=str,
)
def test_same_losses_and_norms(
    ranks: Ranks, ep: int, dtype: torch.dtype, microbatches: int
) -> None:
    expected = ranks.run(4, theirs, ep, dtype, microbatches)[0]
    got = ranks.run(4, ours, ep, dtype, microbatches)[0]
    assert expected[-1][0] < expected[0][0]
    # Both round to bf16 at the same places; what is left is the order of sums.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=0)
