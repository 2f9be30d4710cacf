"""Parameters that are unused, frozen, tied, added, moved or read in unusual places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import (
    CollectiveError,
    DistributedDataParallel,
    DistributedOptimizer,
    ModelMismatchError,
    OverlapConfig,
    StaleParameterError,
    UnusedParameterError,
    WrapError,
)
from tests.overlap_spies import spying
from tests.ranks import Ranks

WIDTH, ROWS, STEPS = 8, 6, 6


class Net(nn.Module):
    """Two layers; what is done with them depends on ``use``."""

    def __init__(self, use: str = "plain") -> None:
        super().__init__()
        self.use = use
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("offset", torch.randn(WIDTH))
        if use == "tied":
            self.second.weight = self.first.weight
        self.held = [self.second.weight, self.second.bias]  # not through the module
        if use == "frozen":
            self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale + self.offset
        if self.use == "skip":
            return x
        if self.use == "outside":
            return F.linear(x, self.second.weight, self.second.bias)
        if self.use == "held" or (self.use == "held later" and step > 2):
            return F.linear(x, *self.held)
        return self.second(x)


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(
        2, ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)
    )
    return x, target


def alone(use: str, size: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = Net(use)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        pairs = [data(step, rank) for rank in range(size)]
        loss = sum(F.mse_loss(model(x, step), target) for x, target in pairs) / size
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrap(use: str, **config: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    # Rank 0's weights, frozen ones and buffers included, must win.
    torch.manual_seed(0 if dist.get_rank() == 0 else 99)
    ddp = DistributedDataParallel(Net(use), OverlapConfig(bucket_bytes=1, **config))
    return ddp, DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)


def train_step(ddp: Any, optimizer: Any, step: int) -> float:
    optimizer.zero_grad()
    x, target = data(step, dist.get_rank())
    loss = F.mse_loss(ddp(x, step), target)
    loss.backward()
    optimizer.step()
    total = loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    return total.item()


def train(use: str, **config: Any) -> list[float]:
    ddp, optimizer = wrap(use, **config)
    with spying():
        return [train_step(ddp, optimizer, step) for step in range(STEPS)]


@pytest.mark.parametrize("use", ["plain", "tied", "frozen", "outside", "held"])
def test_values(ranks: Ranks, use: str) -> None:
    for losses in ranks.run(2, train, use):
        assert losses == pytest.approx(alone(use), rel=1e-5)


def test_tied_weights_stay_tied_and_have_one_entry(ranks: Ranks) -> None:
    ranks.run(2, check_tied)


def check_tied() -> None:
    ddp, optimizer = wrap("tied")
    train_step(ddp, optimizer, 0)
    assert ddp.module.first.weight is ddp.module.second.weight
    names = [name for bucket in ddp.plan().buckets for name in bucket.parameters]
    assert sorted(names) == ["first.bias", "first.weight", "scale", "second.bias"]


def test_frozen_parameters_do_not_move(ranks: Ranks) -> None:
    ranks.run(2, check_frozen)


def check_frozen() -> None:
    ddp, optimizer = wrap("frozen")
    before = ddp.module.second.weight.detach().clone()
    train_step(ddp, optimizer, 0)
    assert torch.equal(ddp.module.second.weight, before)
    assert "second.weight" not in str(ddp.plan())


# Unused


def test_unused_parameters_are_an_error_that_names_them(ranks: Ranks) -> None:
    ranks.run(2, check_unused_error)


def check_unused_error() -> None:
    ddp, optimizer = wrap("skip")
    with pytest.raises(UnusedParameterError, match=r"2 .*: second\.bias, second\.weight\."):
        train_step(ddp, optimizer, 0)
    # Having said so, it can go on.
    ddp.module.use = "plain"
    for step in range(2):
        train_step(ddp, optimizer, step)


def test_unused_parameters_are_zero_if_asked_for(ranks: Ranks) -> None:
    for losses in ranks.run(2, train, "skip", unused_parameters="zero"):
        assert losses == pytest.approx(alone("skip"), rel=1e-5)


def test_a_parameter_of_an_earlier_microbatch_is_not_unused(ranks: Ranks) -> None:
    ranks.run(2, check_earlier_microbatch)


def check_earlier_microbatch() -> None:
    ddp, optimizer = wrap("plain")
    x, target = data(0, 0)
    with ddp.no_sync():
        F.mse_loss(ddp(x), target).backward()
    expected = ddp.module.second.bias.main_grad.clone()
    ddp.module.use = "skip"
    F.mse_loss(ddp(x), target).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert expected.abs().sum() > 0


def test_no_backward_at_all_is_an_error(ranks: Ranks) -> None:
    ranks.run(1, check_no_backward)


def check_no_backward() -> None:
    _, optimizer = wrap("plain")
    with pytest.raises(UnusedParameterError, match="5 trainable"):
        optimizer.step()


# Read outside the forward of their module


def test_a_first_use_not_through_the_module_in_a_later_iteration_is_an_error(ranks: Ranks) -> None:
    ranks.run(2, check_held_later)


def check_held_later() -> None:
    ddp, optimizer = wrap("held later")
    for step in range(3):
        train_step(ddp, optimizer, step)
    with pytest.raises(StaleParameterError, match=r"second\.\w+ was used, but not through"):
        train_step(ddp, optimizer, 3)


def test_it_is_fine_after_a_sync(ranks: Ranks) -> None:
    expected = alone("held later")
    for losses in ranks.run(2, train_synced, "held later"):
        assert losses == pytest.approx(expected, rel=1e-5)


def train_synced(use: str) -> list[float]:
    ddp, optimizer = wrap(use)
    losses = []
    with spying():
        for step in range(STEPS):
            ddp.finish_param_sync()
            losses.append(train_step(ddp, optimizer, step))
    return losses


def test_a_weight_held_and_read_before_the_forward_fails_in_backward(ranks: Ranks) -> None:
    ranks.run(2, check_read_before)


def check_read_before() -> None:
    ddp, optimizer = wrap("plain")
    x, target = data(0, 0)
    held = ddp.module.first.weight

    def loss() -> Tensor:
        penalty = held.square().sum()
        return F.mse_loss(ddp(x), target) + penalty

    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss().backward()


def test_weights_read_through_the_model_are_those_of_the_last_step(ranks: Ranks) -> None:
    first, second = ranks.run(2, check_reads)
    for way in first:
        assert torch.equal(first[way], second[way]), way


def check_reads() -> dict[str, Tensor]:
    ddp, optimizer = wrap("plain")
    module = ddp.module
    ways: dict[str, Callable[[], Tensor]] = {
        "attribute": lambda: module.second.weight,
        "parameters": lambda: list(module.parameters())[3],
        "wrapper": lambda: dict(ddp.named_parameters())["module.second.weight"],
        "state_dict": lambda: module.state_dict()["second.weight"],
        "state_dict of a part": lambda: module.second.state_dict()["weight"],
        "deep copy": lambda: copy.deepcopy(module.second).weight,
        "get_parameter": lambda: module.get_parameter("second.weight"),
    }
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    found = {}
    with spying():
        for way, read in ways.items():
            for step in range(2):
                train_step(ddp, optimizer, step)
            found[way] = read().detach().clone()
            ddp.finish_param_sync()
            torch.testing.assert_close(found[way], module.second.weight.detach(), msg=way)
    return found


def test_a_write_during_the_gather_is_an_error(ranks: Ranks) -> None:
    ranks.run(2, check_write_during)


def check_write_during() -> None:
    ddp, optimizer = wrap("plain")
    held = ddp.module.second.weight
    train_step(ddp, optimizer, 0)
    with torch.no_grad():
        held.zero_()
    with pytest.raises(StaleParameterError, match="written to while its all-gather"):
        ddp(data(0, 0)[0])


# Wrapping


class Unwrappable(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)


def check_refused(make: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(WrapError, match=match):
        DistributedDataParallel(make())


def half() -> nn.Module:
    return nn.Linear(2, 2).half()


def meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def no_parameters() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def wrapped_before() -> nn.Module:
    return DistributedDataParallel(nn.Linear(2, 2)).module


def wrapped_in_part() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)).module, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (half, r"weight is torch\.float16"),
        (meta, "weight is on meta"),
        (no_parameters, "no trainable parameter"),
        (wrapped_before, "weight belongs to a wrapped model already"),
        (wrapped_in_part, r"0\.weight belongs to a wrapped model already"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(ranks: Ranks, make: Callable[[], nn.Module], match: str) -> None:
    ranks.run(1, check_refused, make, match)


BUFFERS: dict[str, Callable[[int], Tensor]] = {
    "int16": lambda rank: torch.full((3,), rank, dtype=torch.int16),
    "fp8": lambda rank: torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
    "complex": lambda rank: torch.full((2,), rank, dtype=torch.complex64),
    "bool": lambda rank: torch.tensor(rank == 1),
    "transposed": lambda rank: torch.arange(6.0).view(2, 3).t() + rank,
    "expanded": lambda rank: torch.full((2, 1), rank).expand(2, 1000),
    "empty": lambda rank: torch.empty(0, 2),
}


def test_buffers_of_any_dtype_and_strides_become_rank_0s(ranks: Ranks) -> None:
    ranks.run(2, check_buffers)


def check_buffers() -> None:
    model = nn.Linear(2, 2)
    for name, make in BUFFERS.items():
        model.register_buffer(name, make(dist.get_rank()))
    DistributedDataParallel(model)
    for name, make in BUFFERS.items():
        found, expected = model.get_buffer(name), make(0)
        assert (found.stride(), found.tolist()) == (expected.stride(), expected.tolist()), name


def test_a_wrap_that_fails_gives_the_model_back(ranks: Ranks) -> None:
    ranks.run(1, check_failed_wrap)


def check_failed_wrap() -> None:
    model = Net("frozen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", Mock(side_effect=RuntimeError("a peer died")))
        with pytest.raises(CollectiveError):
            DistributedDataParallel(model)
    DistributedDataParallel(model)


def test_an_unfrozen_parameter_is_an_error(ranks: Ranks) -> None:
    ranks.run(1, check_unfrozen)


def check_unfrozen() -> None:
    ddp, optimizer = wrap("frozen")
    train_step(ddp, optimizer, 0)
    ddp.module.second.weight.requires_grad_(True)
    with pytest.raises(WrapError, match=r"second\.weight was frozen when the model was wrapped"):
        train_step(ddp, optimizer, 1)


def test_ranks_with_different_models(ranks: Ranks) -> None:
    ranks.run(4, check_mismatch)


def check_mismatch() -> None:
    with pytest.raises(ModelMismatchError, match=r"on ranks \[2\] differ"):
        DistributedDataParallel(nn.Linear(2, 3 if dist.get_rank() == 2 else 2))


def test_changes_after_wrapping(ranks: Ranks) -> None:
    ranks.run(1, check_changes)


def check_changes() -> None:
    ddp, optimizer = wrap("plain")
    module = ddp.module
    with pytest.raises(WrapError, match="extra was added to"):
        module.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(WrapError, match=r"weight was added to .* Linear"):
        module.first.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(WrapError, match="block was added to"):
        module.block = nn.Linear(2, 2)
    module.free = nn.Dropout()  # no parameters: allowed
    module.stranger = nn.Parameter(torch.zeros(2), requires_grad=False)
    nn.Sequential(nn.Linear(2, 2)).append(nn.Linear(2, 2))  # another model is free to grow
    module.bfloat16()
    ddp(data(0, 0)[0].bfloat16()).sum().backward()
    with pytest.raises(WrapError, match="no longer lies in its bucket"):
        optimizer.step()


def test_a_deep_copy_is_a_plain_model(ranks: Ranks) -> None:
    ranks.run(2, check_copy)


def check_copy() -> None:
    ddp, optimizer = wrap("plain")
    train_step(ddp, optimizer, 0)
    twin = copy.deepcopy(ddp.module)
    before = twin.first.weight.detach().clone()
    train_step(ddp, optimizer, 1)
    x, target = data(0, 0)
    F.mse_loss(twin(x), target).backward()
    assert twin.first.weight.grad is not None
    assert torch.equal(twin.first.weight, before)
    assert not torch.equal(ddp.module.first.weight, before)
