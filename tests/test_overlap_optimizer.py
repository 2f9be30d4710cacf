"""The distributed optimizer: any torch optimizer, schedulers, groups, checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR

from overlap import (
    CheckpointMismatchError,
    DistributedDataParallel,
    DistributedOptimizer,
    OverlapConfig,
    ProcessGroups,
)
from tests.overlap_models import Model, batch, mean_over_ranks, own_batch
from tests.overlap_spies import spying
from tests.ranks import Ranks

STEPS = 6

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-3, "foreach": False}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adamax, {"lr": 1e-3}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.RAdam, {"lr": 1e-3}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
    (torch.optim.ASGD, {"lr": 1e-2}),
]


def wrap(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    *,
    ep: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
    **config: Any,
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    groups = ProcessGroups.build(expert_parallel_size=ep)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(Model(groups.ep, dtype=dtype), OverlapConfig(**config), groups)
    return ddp, DistributedOptimizer(ddp, optimizer_class, **(options or {"lr": 1e-2}))


def train_step(ddp: Any, optimizer: Any, step: int) -> float:
    optimizer.zero_grad()
    tokens, targets = own_batch(step)
    loss = F.cross_entropy(ddp(tokens), targets)
    loss.backward()
    optimizer.step()
    return mean_over_ranks(loss)


def alone(make: Any, schedule: Any = None) -> list[float]:
    torch.manual_seed(7)
    model = Model()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = batch(step, 4)
        loss = F.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def train_each() -> list[list[float]]:
    curves = []
    for optimizer_class, options in OPTIMIZERS:
        ddp, optimizer = wrap(optimizer_class, options)
        with spying():
            curves.append([train_step(ddp, optimizer, step) for step in range(STEPS)])
    return curves


def test_any_elementwise_torch_optimizer(ranks: Ranks) -> None:
    for curves in ranks.run(4, train_each):
        for (optimizer_class, options), losses in zip(OPTIMIZERS, curves, strict=True):
            expected = alone(lambda m, c=optimizer_class, o=options: c(m.parameters(), **o))
            assert losses == pytest.approx(expected, rel=2e-5), optimizer_class


def test_an_optimizer_from_elsewhere_is_stepped_once_per_step(ranks: Ranks) -> None:
    assert ranks.run(2, count_steps) == [[1, 2, 3]] * 2


class Counting(torch.optim.SGD):
    """Keeps its count in the group, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


def count_steps() -> list[int]:
    ddp, optimizer = wrap(Counting, {"lr": 0.1}, ep=1)
    counts = []
    with spying() as log:
        for step in range(3):
            log.clear()
            train_step(ddp, optimizer, step)
            counts.append(optimizer.param_groups[0]["count"])
            assert [e for e in log if e.startswith("gather")][-1] == "gather dense.0"
    return counts


# Groups and schedulers


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    bias = [p for n, p in params.items() if p.ndim == 1]
    experts = [p for n, p in params.items() if "experts" in n]
    rest = [p for n, p in params.items() if p.ndim > 1 and "experts" not in n]
    return [
        {"params": rest, "weight_decay": 0.3},
        {"params": bias, "weight_decay": 0.0},
        {"params": experts, "lr": 3e-3},
    ]


def warm_up_then_cycle(optimizer: torch.optim.Optimizer) -> Any:
    warm = LambdaLR(optimizer, lambda step: (step + 1) / 3)
    cycle = OneCycleLR(optimizer, max_lr=[1e-2, 2e-2, 3e-2], total_steps=STEPS)
    return SequentialLR(optimizer, [warm, cycle], milestones=[3])


def train_groups() -> list[float]:
    groups = ProcessGroups.build(expert_parallel_size=2)
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Model(groups.ep), OverlapConfig(bucket_bytes=500), groups)
    optimizer = DistributedOptimizer(
        ddp, torch.optim.AdamW, decay_groups(ddp.module), lr=1e-2, weight_decay=0.1
    )
    scheduler = warm_up_then_cycle(optimizer)
    losses = []
    with spying():
        for step in range(STEPS):
            losses.append(train_step(ddp, optimizer, step))
            scheduler.step()
    return losses


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_groups_and_schedulers(ranks: Ranks) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decay_groups(model), lr=1e-2, weight_decay=0.1)

    expected = alone(make, warm_up_then_cycle)
    for losses in ranks.run(4, train_groups):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_step_returns_what_the_closure_does(ranks: Ranks) -> None:
    ranks.run(2, check_closure)


def check_closure() -> None:
    ddp, optimizer = wrap(ep=1)
    tokens, targets = own_batch(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(tokens), targets)
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure) > 0


def test_refusals(ranks: Ranks) -> None:
    ranks.run(1, check_refusals)


def check_refusals() -> None:
    ddp, optimizer = wrap(ep=1)
    params = list(ddp.module.parameters())
    for name in ("Adafactor", "LBFGS", "SparseAdam"):
        with pytest.raises(TypeError, match=f"{name} looks at whole parameters"):
            DistributedOptimizer(ddp, getattr(torch.optim, name))
    with pytest.raises(ValueError, match=r"misses trainable parameters: \['embed.weight'\]"):
        DistributedOptimizer(ddp, torch.optim.SGD, params[1:])
    with pytest.raises(ValueError, match=r"of shape \(3,\) that is not"):
        DistributedOptimizer(ddp, torch.optim.SGD, [*params, nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="is there twice"):
        DistributedOptimizer(ddp, torch.optim.SGD, [*params, params[0]])
    with pytest.raises(ValueError, match="a tuple that is not a trainable"):
        DistributedOptimizer(ddp, torch.optim.SGD, list(ddp.module.named_parameters()))
    with pytest.raises(ValueError, match=r"no 'params', only \['lr'\]"):
        DistributedOptimizer(ddp, torch.optim.SGD, [{"lr": 1.0}])
    with pytest.raises(ValueError, match="all groups to the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="learning rate"):
        DistributedOptimizer(ddp, torch.optim.SGD, lr=-1.0)


# Checkpoints


def resume(dtype: torch.dtype, train_before_loading: bool) -> tuple[list[float], list[float]]:
    """Losses of an uninterrupted run's last steps, and of one resumed from a file."""
    ddp, optimizer = wrap(dtype=dtype)
    for step in range(3):
        train_step(ddp, optimizer, step)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    expected = [train_step(ddp, optimizer, step) for step in range(3, STEPS)]
    expected.append(sum(p.double().sum().item() for p in ddp.parameters()))

    file.seek(0)
    ddp, optimizer = wrap(dtype=dtype, seed=8)
    with spying():
        if train_before_loading:
            train_step(ddp, optimizer, 0)
        optimizer.load_state_dict(torch.load(file))
        got = [train_step(ddp, optimizer, step) for step in range(3, STEPS)]
        got.append(sum(p.double().sum().item() for p in ddp.parameters()))
    return got, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("train_before_loading", [False, True])
def test_a_run_resumes_bit_for_bit(
    ranks: Ranks, dtype: torch.dtype, train_before_loading: bool
) -> None:
    for got, expected in ranks.run(4, resume, dtype, train_before_loading):
        assert got == expected


def test_a_rank_saves_its_shard_only(ranks: Ranks) -> None:
    sizes = ranks.run(4, saved_size)
    whole = 12 * sum(p.numel() for p in Model().parameters())  # master and two moments
    assert max(sizes) < 0.5 * whole  # a quarter, and what a file needs around each tensor
    assert sum(sizes) > whole


def saved_size() -> int:
    ddp, optimizer = wrap()
    train_step(ddp, optimizer, 0)
    state = optimizer.state_dict()
    return sum(
        tensor.untyped_storage().nbytes()
        for piece in state["pieces"].values()
        for tensor in (piece["master"], *piece["state"].values())
    )


def test_checkpoints_that_do_not_fit(ranks: Ranks) -> None:
    [state] = ranks.run(1, state_of, ep=1)
    two = ranks.run(2, state_of, ep=1)
    ranks.run(2, check_misfits, state, two)


def state_of(ep: int) -> dict[str, Any]:
    ddp, optimizer = wrap(ep=ep)
    train_step(ddp, optimizer, 0)
    return copy.deepcopy(optimizer.state_dict())


def check_misfits(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    rank = dist.get_rank()
    _, optimizer = wrap(ep=1)
    _, packed = wrap(ep=1, bucket_bytes=200)
    _, expert_parallel = wrap(ep=2)
    for target, state, match in (
        (optimizer, one, "'data_parallel': 1 in the checkpoint, 2 here"),
        (optimizer, two[1 - rank], f"'rank': {1 - rank} in the checkpoint, {rank} here"),
        (expert_parallel, two[rank], "'expert_data_parallel': 2 in the checkpoint, 1 here"),
        (packed, two[rank], "parts of parameters .* bucket_bytes"),
        (optimizer, {"state": {}, "param_groups": []}, "format None, expected 1"),
    ):
        with pytest.raises(CheckpointMismatchError, match=match):
            target.load_state_dict(state)
    optimizer.load_state_dict(two[rank])


def test_weights_loaded_into_the_model_become_the_masters(ranks: Ranks) -> None:
    ranks.run(2, check_load_model)


def check_load_model() -> None:
    ddp, optimizer = wrap(torch.optim.SGD, {"lr": 0.0}, ep=1, dtype=torch.bfloat16)
    train_step(ddp, optimizer, 0)
    torch.manual_seed(1)
    other = Model(dtype=torch.bfloat16)
    ddp.module.blocks[0].load_state_dict(other.blocks[0].state_dict())
    with torch.no_grad():
        ddp.module.head.weight.fill_(0.5)
    train_step(ddp, optimizer, 1)
    assert (ddp.module.head.weight == 0.5).all()
    for name, value in other.blocks[0].state_dict().items():
        assert torch.equal(ddp.module.blocks[0].state_dict()[name], value), name
