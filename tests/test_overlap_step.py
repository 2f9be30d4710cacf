"""The optimizer's step in parts: what is waited for, stepped and gathered, in which order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from overlap import (
    DistributedDataParallel,
    DistributedOptimizer,
    OverlapConfig,
    ProcessGroups,
    UnusedParameterError,
    WrapError,
)
from overlap.reduce import ReduceSchedule
from tests.overlap_models import Model, own_batch
from tests.overlap_spies import spying
from tests.ranks import Ranks

FC1, FC2 = "moe.experts.fc1_weight", "moe.experts.fc2_weight"
BUCKETS = ["dense.0", *(f"blocks.{block}.{weight}" for block in (0, 1) for weight in (FC1, FC2))]


class Elsewhere(torch.optim.SGD):
    """Not one of torch.optim's own."""


def wrap(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    params: Callable[[Model], Any] = lambda model: None,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    groups = ProcessGroups.build()
    torch.manual_seed(7)
    model = Model(groups.ep)
    ddp = DistributedDataParallel(model, OverlapConfig(**config), groups)
    options = {"lr": 1e-2, **(options or {})}
    return ddp, DistributedOptimizer(ddp, optimizer_class, params(model), **options)


def backward(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, step: int) -> None:
    optimizer.zero_grad()
    tokens, targets = own_batch(step)
    F.cross_entropy(ddp(tokens), targets).backward()


def log_steps(optimizer: DistributedOptimizer, log: list[str]) -> None:
    """Log "step BUCKET" for each bucket whose masters the inner optimizer is shown."""
    inner_step = optimizer.inner.step

    def step() -> Any:
        shards = optimizer.shards.items()
        log.extend(
            f"step {bucket.name}"
            for bucket, shard in shards
            if any(master.grad is not None for master in shard.masters)
        )
        return inner_step()

    optimizer.inner.step = step  # type: ignore[method-assign]


def step_log(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    clip: bool = False,
    **config: Any,
) -> list[str]:
    """What the second step does."""
    ddp, optimizer = wrap(optimizer_class, **config)
    with spying() as log:
        log_steps(optimizer, log)
        for step in range(2):
            backward(ddp, optimizer, step)
            log.clear()
            if clip:
                optimizer.clip_grad_norm(1.0)
            optimizer.step()
        assert all(parameter.isfinite().all() for parameter in ddp.parameters())
        return [e for e in log if e.startswith(("wait reduce", "step", "gather"))][: 3 * 5]


def test_the_last_reductions_travel_while_what_came_first_is_stepped(ranks: Ranks) -> None:
    def waits(*names: str) -> list[str]:
        return [f"wait reduce {name}" for name in names]

    def steps(*names: str) -> list[str]:
        return [f"step {name}" for name in names]

    dense, fc1_0, fc2_0, fc1_1, fc2_1 = BUCKETS
    for log in ranks.run(2, step_log):
        assert log[:11] == [
            *waits(fc2_1, fc1_1),  # in the order of their issue: half of the bytes
            *steps(fc1_1, fc2_1),
            *waits(dense),  # reduced last, gathered first
            *steps(dense),
            f"gather {dense}",
            *waits(fc1_0, fc2_0),
            *steps(fc1_0, fc2_0),
        ]


@pytest.mark.parametrize(
    "how",
    [
        {"clip": True},
        {"check_for_nan": True},
        {"overlap_grad_reduce": False},
        {"optimizer_class": Elsewhere},
    ],
    ids=str,
)
def test_twin_whoever_needs_all_gradients_waits_for_all(ranks: Ranks, how: dict[str, Any]) -> None:
    for log in ranks.run(2, step_log, **how):
        assert {entry.split()[0] for entry in log[:5]} == {"wait"}
        first = 5 if "optimizer_class" in how else 1
        assert [entry.split()[0] for entry in log[5 : 5 + first]] == ["step"] * first


def test_twin_serialised_has_nothing_left_to_wait_for(ranks: Ranks) -> None:
    for log in ranks.run(2, step_log, serialize=True):
        assert log[:2] == ["step dense.0", "gather dense.0"]


def test_nothing_is_split_where_nothing_travels(ranks: Ranks) -> None:
    [log] = ranks.run(1, step_log)
    assert log == ["step dense.0", *(f"step {name}" for name in BUCKETS[1:])]


def test_a_bucket_that_was_not_waited_for_cannot_be_stepped(ranks: Ranks) -> None:
    ranks.run(2, check_no_early_step)


def check_no_early_step() -> None:
    ddp, optimizer = wrap()
    for step in range(2):
        backward(ddp, optimizer, step)
        before = [shard.master.clone() for shard in optimizer.shards.values()]
        for bucket in ddp.buckets:
            with pytest.raises(AssertionError):
                optimizer._step_buckets([bucket])
        for shard, master in zip(optimizer.shards.values(), before, strict=True):
            assert torch.equal(shard.master, master)
        optimizer.step()


def test_an_unused_parameter_is_noticed_before_anything_is_stepped(ranks: Ranks) -> None:
    ranks.run(2, check_unused)


def check_unused() -> None:
    ddp, optimizer = wrap()
    backward(ddp, optimizer, 0)
    optimizer.step()
    optimizer.zero_grad()
    hidden = ddp.module.blocks[1](ddp.module.embed(own_batch(1)[0]))
    hidden.sum().backward()
    before = [shard.master.clone() for shard in optimizer.shards.values()]
    with pytest.raises(UnusedParameterError, match=r"head\.weight"):
        optimizer.step()
    for shard, master in zip(optimizer.shards.values(), before, strict=True):
        assert torch.equal(shard.master, master)


@pytest.mark.parametrize("accumulated", [True, False])
def test_a_step_that_was_refused_can_be_given_up(ranks: Ranks, accumulated: bool) -> None:
    ranks.run(2, check_refused, accumulated)


def check_refused(accumulated: bool) -> None:
    """The step issues the reductions, since no hook has, and then finds the model moved."""
    ddp, optimizer = wrap(unused_parameters="zero")
    for step in range(2):
        backward(ddp, optimizer, step)
        optimizer.step()
    optimizer.zero_grad()
    if accumulated:
        with ddp.no_sync():
            backward(ddp, optimizer, 2)
    weight = ddp.module.head.weight
    inside = weight.data
    weight.data = inside.clone()
    with pytest.raises(WrapError, match=r"head\.weight no longer lies in its bucket"):
        optimizer.step()
    weight.data = inside
    backward(ddp, optimizer, 2)
    optimizer.step()


def test_gradients_of_earlier_steps_take_no_memory(ranks: Ranks) -> None:
    ranks.run(2, check_memory)


def check_memory() -> None:
    """Gradients in bf16 are copied to fp32 for the masters."""
    ddp, optimizer = wrap(grad_dtype=torch.bfloat16)
    for step in range(3):
        backward(ddp, optimizer, step)
        masters = [master for shard in optimizer.shards.values() for master in shard.masters]
        earlier = [weakref.ref(master.grad) for master in masters if master.grad is not None]
        optimizer.step()
        assert len(earlier) == (len(masters) if step else 0)
        assert not any(grad() is not None for grad in earlier)


# Same bits


def in_groups(model: Model) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2], "lr": 3e-3}, {"params": params[1::2], "weight_decay": 0.3}]


def trained(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], **config: Any
) -> tuple[list[torch.Tensor], set[float], int]:
    """Weights after four steps, the optimizer's counts, and how often it was called."""
    ddp, optimizer = wrap(optimizer_class, in_groups, options, **config)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    calls: list[str] = []
    with spying():
        inner_step = optimizer.inner.step
        optimizer.inner.step = lambda: (calls.append(""), inner_step())[1]  # type: ignore[method-assign]
        for step in range(4):
            backward(ddp, optimizer, step)
            optimizer.step()
            scheduler.step()
        weights = [parameter.detach().clone() for parameter in ddp.parameters()]
    counts = {float(state["step"]) for state in optimizer.inner.state.values() if "step" in state}
    return weights, counts, len(calls)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_in_one_go(
    ranks: Ranks,
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
    grad_dtype: torch.dtype,
) -> None:
    parts = ranks.run(2, trained, optimizer_class, options, grad_dtype=grad_dtype)
    whole = ranks.run(
        2, trained, optimizer_class, options, grad_dtype=grad_dtype, check_for_nan=True
    )
    for (got, counts, calls), (expected, other_counts, fewer) in zip(parts, whole, strict=True):
        assert calls > fewer
        assert counts == other_counts
        assert counts in ({4.0}, set())
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


# How much comes first


class Sized:
    """As much of a bucket as `ReduceSchedule.issue` looks at, all of its gradients on the way."""

    def __init__(self, nbytes: int, reducing: bool) -> None:
        self.layout = SimpleNamespace(nbytes=nbytes)
        self.slots = ()
        self.reducing = reducing

    def issue_reduce(self) -> None:
        pass


@pytest.mark.parametrize(
    ("sizes", "travelling", "early"),
    [  # in the order of issue
        ([1, 1, 1, 1], 4, 2),
        ([1, 1, 1], 3, 1),
        ([2, 1, 2, 1, 2, 1], 6, 2),
        ([9, 1], 2, 0),  # waiting for the one leaves too little to hide
        ([1, 9], 2, 1),
        ([5], 1, 0),
        ([1, 1, 1, 1], 0, 0),  # nothing travels in groups of one
    ],
)
def test_half_of_the_bytes_come_first(sizes: list[int], travelling: int, early: int) -> None:
    buckets: Any = [Sized(nbytes, index < travelling) for index, nbytes in enumerate(sizes)]
    gather: Any = SimpleNamespace(issue_all=lambda: None)
    schedule = ReduceSchedule(
        buckets[::-1], gather, overlap=True, serialize=False, zero_unused=False
    )
    assert schedule.issue() == buckets[:early]
