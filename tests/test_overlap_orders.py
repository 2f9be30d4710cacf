"""Forwards that do not follow the order of registration: right values, each time.

Every run is spied on, so that a stale weight is NaN (see overlap_spies).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig
from tests.overlap_spies import spying
from tests.ranks import Ranks

WIDTH, ROWS, STEPS = 8, 6, 12
LAYERS = ("a", "b", "c", "d", "e")
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class Routed(nn.Module):
    """Layers that run in the order that the caller asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in LAYERS})

    def forward(self, x: Tensor, path: str) -> Tensor:
        for name in path:
            x = x + torch.tanh(self.layers[name](x))
        return x


def reversed_order(step: int, rank: int) -> str:
    return "edcba"


def changing(step: int, rank: int) -> str:
    return "".join(random.Random(step).sample(LAYERS, 5))


def skipping(step: int, rank: int) -> str:
    return ("abcde", "acde", "e", "abcd", "bd", "ca")[step % 6]


def late_layer(step: int, rank: int) -> str:
    """A layer that the first iterations did not use."""
    return "abde" if step < 3 else "cabde"


def repeating(step: int, rank: int) -> str:
    return "abacdebe"


def by_rank(step: int, rank: int) -> str:
    """Every rank its own order and, from the fourth step on, its own set of layers."""
    layers = random.Random(100 * step + rank).sample(LAYERS, 5)
    return "".join(layers[: 5 if step < 4 else 3])


ROUTES = [reversed_order, changing, skipping, late_layer, repeating, by_rank]


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, target = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, target


def alone(route: Any, size: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        total = torch.zeros(())
        for rank in range(size):
            x, target = data(step, rank)
            total = total + F.mse_loss(model(x, route(step, rank)), target) / size
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, [p.detach() for p in model.parameters()]


def together(route: Any, **config: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    model = Routed()
    config = {"unused_parameters": "zero", "bucket_bytes": 1, **config}
    ddp = DistributedDataParallel(model, OverlapConfig(**config))
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, **ADAMW)
    losses = []
    rank = dist.get_rank()
    with spying():
        for step in range(STEPS):
            optimizer.zero_grad()
            x, target = data(step, rank)
            loss = F.mse_loss(ddp(x, route(step, rank)), target)
            loss.backward()
            optimizer.step()
            total = loss.detach() / dist.get_world_size()
            dist.all_reduce(total)
            losses.append(total.item())
        ddp.finish_param_sync()
        return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_any_order_equals_one_process(ranks: Ranks, route: Any, depth: int) -> None:
    losses, weights = alone(route, 2)
    for got_losses, got_weights in ranks.run(2, together, route, prefetch_depth=depth):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        for got, expected in zip(got_weights, weights, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("route", [changing, by_rank], ids=lambda route: route.__name__)
def test_dense_buckets_of_several_layers(ranks: Ranks, route: Any) -> None:
    losses, _ = alone(route, 4)
    for got, _ in ranks.run(4, together, route, bucket_bytes=500):
        assert got == pytest.approx(losses, rel=1e-5)


def orders(route: Any) -> tuple[list[str], tuple[str, ...], bool, bool]:
    """The plan's orders after two iterations, and whether it says that they are learned."""
    model = Routed()
    config = OverlapConfig(bucket_bytes=1, unused_parameters="zero")
    ddp = DistributedDataParallel(model, config)
    optimizer = DistributedOptimizer(ddp, torch.optim.SGD, lr=1e-2)
    before = ddp.plan().learned
    for step in range(2):
        optimizer.zero_grad()
        x, target = data(step, dist.get_rank())
        F.mse_loss(ddp(x, route(step, dist.get_rank())), target).backward()
        optimizer.step()
    plan = ddp.plan()
    weights = [b.parameters[0] for b in plan.buckets if b.parameters[0].endswith("weight")]
    return [w.split(".")[1] for w in weights], plan.reduce_order, before, plan.learned


def test_the_order_of_first_use_is_learned(ranks: Ranks) -> None:
    for gathered, reduced, before, after in ranks.run(2, orders, reversed_order):
        assert (before, after) == (False, True)
        assert gathered == list("edcba")
        # Backward meets the layer that ran last first.
        assert [name for name in reduced if name in ("dense.1", "dense.9")] == [
            "dense.9",
            "dense.1",
        ]


def test_ranks_agree_on_one_order_whatever_each_has_seen(ranks: Ranks) -> None:
    first, second = ranks.run(2, orders, by_rank)
    assert first == second
    assert first[0] == list(by_rank(0, 0))
