"""What happens around a training step: evaluation, checkpointing, errors, removal, a dead peer."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from overlap import (
    CollectiveError,
    DistributedDataParallel,
    DistributedOptimizer,
    GradientOrderError,
    NonFiniteGradientError,
    OverlapConfig,
    ProcessGroups,
    WrapError,
)
from tests.overlap_models import Model, own_batch
from tests.overlap_spies import spying
from tests.ranks import Ranks

STEPS = 5


def wrap(
    model: nn.Module | None = None, ep: int = 2, **config: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    groups = ProcessGroups.build(expert_parallel_size=ep)
    torch.manual_seed(7)
    model = model or Model(groups.ep)
    ddp = DistributedDataParallel(model, OverlapConfig(**config), groups)
    return ddp, DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)


def backward(ddp: Any, step: int = 0) -> Tensor:
    tokens, targets = own_batch(step)
    loss = F.cross_entropy(ddp(tokens), targets)
    loss.backward()
    return loss.detach()


def train_step(ddp: Any, optimizer: DistributedOptimizer, step: int = 0) -> float:
    optimizer.zero_grad()
    loss = backward(ddp, step)
    optimizer.step()
    return loss.item()


def weights(ddp: DistributedDataParallel) -> list[Tensor]:
    return [p.detach().clone() for p in ddp.module.parameters()]


# Evaluation and saving in the middle of training


def disturbed(disturbance: str) -> list[float]:
    ddp, optimizer = wrap()
    losses = []
    with spying():
        for step in range(STEPS):
            losses.append(train_step(ddp, optimizer, step))
            if disturbance in ("no_grad", "inference"):
                mode = torch.no_grad if disturbance == "no_grad" else torch.inference_mode
                ddp.eval()
                with mode():
                    assert ddp(own_batch(99)[0]).isfinite().all()
                ddp.train()
            elif disturbance == "save":
                check_weights_are_the_masters(ddp, optimizer)
            elif disturbance == "part":
                with torch.no_grad():
                    ddp.module.blocks[1].moe(torch.randn(5, 16))
            elif disturbance == "reload":
                ddp.load_state_dict({k: v.clone() for k, v in ddp.state_dict().items()})
            elif disturbance == "reset":
                optimizer.zero_grad()
                optimizer.zero_grad()
            elif disturbance == "skip":  # a backward that is thrown away
                optimizer.zero_grad()
                backward(ddp, 50 + step)
                optimizer.zero_grad()
    return losses


def check_weights_are_the_masters(
    ddp: DistributedDataParallel, optimizer: DistributedOptimizer
) -> None:
    state = ddp.state_dict()
    assert sorted(state) == sorted(name for name, _ in Model().named_parameters())
    saved = optimizer.state_dict()["pieces"]
    assert saved
    for name, piece in saved.items():
        part = state[name].flatten()[piece["start"] : piece["stop"]]
        assert torch.equal(part, piece["master"]), name


@pytest.mark.parametrize(
    "disturbance", ["no_grad", "inference", "save", "part", "reload", "reset", "skip"]
)
def test_training_goes_on_unchanged(ranks: Ranks, disturbance: str) -> None:
    assert ranks.run(4, disturbed, disturbance) == ranks.run(4, disturbed, "none")


# Activation checkpointing


class Checkpointed(Model):
    """Runs its blocks again in backward."""

    def __init__(self, ep_group: Any, mode: str) -> None:
        super().__init__(ep_group)
        self.mode = mode

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.mode == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def checkpointed(mode: str) -> tuple[list[float], list[str]]:
    groups = ProcessGroups.build(expert_parallel_size=2)
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Checkpointed(groups.ep, mode), OverlapConfig(), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    with spying() as log:
        return [train_step(ddp, optimizer, step) for step in range(STEPS)], list(log)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_gathers_once(ranks: Ranks, mode: str) -> None:
    assert ranks.run(4, checkpointed, mode) == ranks.run(4, checkpointed, "plain")


# Gradients at the wrong time


def test_a_second_backward_without_zero_grad_is_an_error(ranks: Ranks) -> None:
    ranks.run(2, check_second_backward)


def check_second_backward() -> None:
    ddp, optimizer = wrap(ep=1)
    backward(ddp)
    with pytest.raises(GradientOrderError, match=r"head\.weight arrived after its bucket"):
        backward(ddp)
    optimizer.zero_grad()
    train_step(ddp, optimizer)
    with pytest.raises(GradientOrderError, match="zero_grad"):
        backward(ddp)


def test_training_goes_on_unchanged_after_a_refused_gradient(ranks: Ranks) -> None:
    for clean, refused in zip(
        ranks.run(2, weights_after, False), ranks.run(2, weights_after, True), strict=True
    ):
        assert clean == refused


def weights_after(refused: bool) -> list[Any]:
    ddp, optimizer = wrap(ep=1)
    train_step(ddp, optimizer)
    if refused:
        with pytest.raises(GradientOrderError):
            backward(ddp, 5)
    train_step(ddp, optimizer, 1)
    return [weight.tolist() for weight in weights(ddp)]


def test_no_sync_ends_with_its_block_even_after_an_error(ranks: Ranks) -> None:
    ranks.run(2, check_no_sync)


def check_no_sync() -> None:
    ddp, optimizer = wrap(ep=1)

    def fail() -> None:
        with ddp.no_sync():
            backward(ddp)
            raise ZeroDivisionError

    with spying() as log:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert log == []
        backward(ddp)
        assert [entry for entry in log if entry.startswith("reduce")]
        optimizer.step()


def test_sparse_gradients_are_refused(ranks: Ranks) -> None:
    ranks.run(1, check_sparse)


def check_sparse() -> None:
    ddp, _ = wrap(nn.Embedding(4, 4, sparse=True), ep=1)
    with pytest.raises(TypeError, match="weight is sparse"):
        ddp(torch.tensor([1])).sum().backward()


def test_gradients_of_gradients(ranks: Ranks) -> None:
    ranks.run(1, check_create_graph)


def check_create_graph() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.randn(4, 3)
    model(x).square().sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    ddp, optimizer = wrap(model, ep=1)
    ddp(x).square().sum().backward(create_graph=True)
    assert not ddp.module.weight.main_grad.requires_grad
    torch.testing.assert_close(ddp.module.weight.main_grad, expected)
    optimizer.step()


# NaN


def test_the_nan_check_names_the_parameter_on_every_rank(ranks: Ranks) -> None:
    ranks.run(4, check_nan)


def check_nan() -> None:
    ddp, optimizer = wrap(check_for_nan=True)
    train_step(ddp, optimizer)
    optimizer.zero_grad()
    hurt = ddp.module.blocks[1].moe.experts.fc2_weight.weight
    backward_hook = hurt.register_hook(lambda g: g * float("nan") if dist.get_rank() == 2 else g)
    backward(ddp)
    with pytest.raises(NonFiniteGradientError, match=r"of blocks\.1\.moe\.experts\.fc2_weight"):
        optimizer.step()
    with pytest.raises(NonFiniteGradientError):  # who catches it cannot step on
        optimizer.step()
    backward_hook.remove()


def test_a_step_dropped_for_its_nan_leaves_no_trace(ranks: Ranks) -> None:
    clean, dropped = ranks.run(4, drop_nan, False), ranks.run(4, drop_nan, True)
    assert clean == dropped


def drop_nan(nan: bool) -> list[float]:
    ddp, optimizer = wrap()
    losses = []
    for step in range(STEPS):
        losses.append(train_step(ddp, optimizer, step))
        if nan:
            optimizer.zero_grad()
            (F.cross_entropy(ddp(own_batch(0)[0]), own_batch(0)[1]) * float("nan")).backward()
            assert not optimizer.clip_grad_norm(1.0).isfinite()
            optimizer.zero_grad()
        optimizer.zero_grad()
        backward(ddp, step)
        losses.append(optimizer.clip_grad_norm(1.0).item())
    return losses


# Removal


def test_removal_gives_the_model_back(ranks: Ranks) -> None:
    ranks.run(2, check_removal)


def check_removal() -> None:
    ddp, optimizer = wrap(ep=1)
    train_step(ddp, optimizer)
    model = ddp.module
    params = list(model.parameters())
    expected = weights(ddp)
    train_step(ddp, optimizer)
    optimizer.zero_grad()
    with spying():
        ddp.remove()
        ddp.remove()
    after = [p.detach().clone() for p in params]
    assert not any(map(torch.equal, after, expected))  # it is the last step's
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert not any(hasattr(p, "main_grad") for p in params)
    assert len({p.untyped_storage().data_ptr() for p in params}) == len(params)
    for module in model.modules():
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks
    model.extra = nn.Parameter(torch.zeros(1))
    del model.extra
    tokens, targets = own_batch(0)
    F.cross_entropy(model(tokens), targets).backward()
    assert all(p.grad is not None for p in params)  # plain torch again
    with pytest.raises(WrapError, match="unwrapped with remove"):
        optimizer.step()
    again = DistributedDataParallel(model, OverlapConfig(), ddp.groups)
    assert all(p.grad is None for p in params)
    train_step(again, DistributedOptimizer(again, torch.optim.SGD, lr=0.1))


def test_a_dropped_model_takes_its_buckets_along(ranks: Ranks) -> None:
    """Without remove(), too; the buckets hold the memory, and their groups' threads."""
    ranks.run(2, check_dropped)


def check_dropped() -> None:
    def wrapped() -> list[weakref.ref[Any]]:
        ddp = DistributedDataParallel(
            nn.Linear(4, 4), OverlapConfig(), ProcessGroups.build(expert_parallel_size=1)
        )
        ddp(torch.ones(2, 4)).sum().backward()
        ddp.finish_in_flight()
        return [weakref.ref(slot) for bucket in ddp.buckets for slot in bucket.slots]

    slots = wrapped()
    assert len(slots) == 2
    gc.collect()
    assert not any(slot() for slot in slots)


def test_the_model_does_not_keep_the_engine_alive(ranks: Ranks) -> None:
    ranks.run(1, check_weak)


def check_weak() -> None:
    ddp, optimizer = wrap(ep=1)
    train_step(ddp, optimizer)
    model, engine = ddp.module, weakref.ref(ddp.gather)
    del ddp, optimizer
    gc.collect()
    assert engine() is None
    tokens, targets = own_batch(0)
    F.cross_entropy(model(tokens), targets).backward()
    assert model.head.weight.grad is not None


# A peer that dies


def _with_a_dying_peer(rank: int, store: str, when: str, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=5),
    )
    ddp, optimizer = wrap(ep=1)
    train_step(ddp, optimizer)
    optimizer.zero_grad()
    if rank == 1:
        if when == "reduce":
            ddp(own_batch(0)[0])
        os._exit(1)
    start = time.monotonic()
    try:
        train_step(ddp, optimizer)
        answer.send("no error")
    except CollectiveError as error:
        answer.send((str(error), time.monotonic() - start))
    os._exit(0)


@pytest.mark.parametrize("when", ["gather", "reduce"])
def test_a_dead_peer_ends_in_a_clear_error(tmp_path: Path, when: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(
            target=_with_a_dying_peer, args=(rank, str(tmp_path / "store"), when, theirs)
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert ours.poll(60)
        message, seconds = ours.recv()
        assert f"the {'all-gather' if when == 'gather' else 'reduce-scatter'} of bucket" in message
        assert "another rank died" in message
        assert seconds < 30
    finally:
        for process in processes:
            process.kill()
            process.join()
