"""The offer of main_grad: the same bits with and without it, and nothing lost where it is refused,
broken or interrupted."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from overlap import (
    DistributedDataParallel,
    DistributedOptimizer,
    GradientOrderError,
    NonFiniteGradientError,
    OverlapConfig,
    ProcessGroups,
)
from tests.overlap_fused import WIDTH, ForgetfulTaker, HastyTaker, Model, Product, Taker
from tests.overlap_spies import spying
from tests.ranks import Ranks

NAMES = ("get_main_grad", "grad_added_to_main_grad", "overwrite_main_grad", "zero_out_wgrad")


def data(step: int, microbatch: int = 0) -> Tensor:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(5, WIDTH, generator=generator)


def wrap(model: Model | None = None, **config: Any) -> DistributedDataParallel:
    torch.manual_seed(7)
    return DistributedDataParallel(model or Model(), OverlapConfig(**config), ProcessGroups.build())


def poison(ddp: DistributedDataParallel) -> None:
    """Nothing that the buckets held before the first gradient may matter."""
    ddp.zero_grad()
    for bucket in ddp.buckets:
        bucket.grads.fill_(torch.nan)


def gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


# Training


def train(
    fusion: bool, microbatches: int, loss: str = "plain", **config: Any
) -> tuple[list[float], list[str]]:
    ddp = wrap(gradient_accumulation_fusion=fusion, check_for_nan=True, **config)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    with spying():
        for step in range(4):
            poison(ddp)
            for microbatch in range(microbatches):
                last = microbatch == microbatches - 1
                with nullcontext() if last else ddp.no_sync():
                    LOSSES[loss](ddp, data(step, microbatch)).backward()
            optimizer.step()
        ddp.finish_param_sync()
    weights = torch.cat([p.detach().flatten() for p in ddp.module.parameters()])
    return weights.tolist(), ddp.module.taker.log


def plain(ddp: Any, x: Tensor) -> Tensor:
    return ddp(x).square().mean()


def twice(ddp: Any, x: Tensor) -> Tensor:
    return ddp(x).square().mean() + ddp(x.flip(1)).abs().mean()


def regularised(ddp: Any, x: Tensor) -> Tensor:
    """Uses the weights in another way as well, before and after."""
    norms = [layer.weight.square().sum() for layer in ddp.module.weights]
    return norms[0] + ddp(x).square().mean() + norms[1]


def shallow(ddp: Any, x: Tensor) -> Tensor:
    """Leaves the second half of the weights out."""
    ddp.module.used = 2
    return plain(ddp, x)


def saliency(ddp: Any, x: Tensor) -> Tensor:
    """Asks for gradients that are no step's: of the input, of a weight, and for some only."""
    x = x.requires_grad_()
    torch.autograd.grad(plain(ddp, x), x)
    wanted = torch.autograd.grad(plain(ddp, x), ddp.module.weights[0].weight)[0]
    assert wanted.abs().sum() > 0
    plain(ddp, x).backward(inputs=[x])
    return plain(ddp, x)


def reentrant(ddp: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: plain(ddp, x), x.requires_grad_(), use_reentrant=True)


def recomputed(ddp: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: plain(ddp, x), x, use_reentrant=False)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    loss.__name__: loss
    for loss in (plain, twice, regularised, shallow, saliency, reentrant, recomputed)
}
WEIGHTS = 4


def both(microbatches: int, loss: str, config: dict[str, Any]) -> tuple[list[str], list[str]]:
    (weights, log), (expected, refused) = (
        train(fusion, microbatches, loss, **config) for fusion in (True, False)
    )
    assert weights == expected
    assert set(refused) == {"refused"}
    return log, refused


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"serialize": True},
        {"overlap_grad_reduce": False},
        {"share_expert_buckets": True},
        {"reduce_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_the_same_bits_with_and_without(
    ranks: Ranks, microbatches: int, config: dict[str, Any]
) -> None:
    one_step = ["overwrite"] * WEIGHTS + ["add"] * WEIGHTS * (microbatches - 1)
    for log, _ in ranks.run(2, both, microbatches, "plain", config):
        assert log == one_step * 4


@pytest.mark.parametrize(
    ("loss", "one_step"),
    [
        pytest.param("shallow", ["overwrite"] * 2, id="unused weights"),
        pytest.param("reentrant", ["overwrite"] * 4, id="reentrant checkpoints"),
        # The recomputed weight is a view without attributes.
        pytest.param("recomputed", ["refused"] * 4, id="non-reentrant checkpoints"),
        pytest.param(
            "saliency", ["refused"] * 3 * 4 + ["overwrite"] * 4, id="gradients for somebody else"
        ),
    ],
)
def test_the_same_bits_in_special_cases(ranks: Ranks, loss: str, one_step: list[str]) -> None:
    for log, _ in ranks.run(2, both, 1, loss, {"unused_parameters": "zero"}):
        assert log == one_step * 4


def check_sums(loss: str) -> None:
    """Where autograd sums several gradients first, the order of the sum differs by the offer."""
    got = []
    for fusion in (True, False):
        ddp = wrap(gradient_accumulation_fusion=fusion)
        poison(ddp)
        for microbatch in range(3):
            with nullcontext() if microbatch == 2 else ddp.no_sync():
                LOSSES[loss](ddp, data(0, microbatch)).backward()
        ddp.finish_grad_sync()
        got.append(gradients(ddp))
        assert ("add" in ddp.module.taker.log) == fusion
    torch.testing.assert_close(got[0], got[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["twice", "regularised"])
def test_no_use_of_a_weight_is_lost(ranks: Ranks, loss: str) -> None:
    ranks.run(1, check_sums, loss)


def check_rounding() -> None:
    """The offer spares the rounding to the weights' bf16, and changes nothing else."""
    model = Model(dtype=torch.bfloat16, layers=1)
    x = torch.randn(5, WIDTH).bfloat16()
    got = []
    for fusion in (True, False):
        ddp = wrap(model, gradient_accumulation_fusion=fusion)
        ddp(x).sum().backward()
        ddp.finish_grad_sync()
        got.append(gradients(ddp)["weights.1.weight"])
        ddp.remove()
    assert not torch.equal(got[0], got[1])
    assert torch.equal(got[0].bfloat16().float(), got[1])


def test_gradients_are_not_rounded(ranks: Ranks) -> None:
    ranks.run(1, check_rounding)


def check_create_graph() -> None:
    ddp = wrap()
    plain(ddp, data(0)).backward(create_graph=True)
    ddp.finish_grad_sync()
    got = gradients(ddp)
    poison(ddp)
    plain(ddp, data(0)).backward()
    ddp.finish_grad_sync()
    torch.testing.assert_close(gradients(ddp), got)


def test_create_graph(ranks: Ranks) -> None:
    ranks.run(1, check_create_graph)


# Who gets the offer


def check_offered() -> None:
    def offered(model: Model | None = None, **config: Any) -> list[bool]:
        ddp = wrap(model, **config)
        params = list(ddp.module.parameters())
        found = [hasattr(p, "overwrite_main_grad") for p in params]
        assert [all(hasattr(p, name) for name in NAMES) for p in params] == found
        ddp.remove()
        assert not any(hasattr(p, name) for p in params for name in NAMES)
        return found

    assert offered() == [True] * WEIGHTS + [False] * 2  # the head is no weight module
    for refused in (
        offered(gradient_accumulation_fusion=False),
        offered(grad_dtype=torch.bfloat16),
        offered(Model(takes_main_grad=False)),
    ):
        assert not any(refused)


def check_onlookers() -> None:
    """Whose hook looks at a gradient sees it."""
    ddp = wrap()
    first, second, third, _ = (layer.weight for layer in ddp.module.weights)
    seen: list[Tensor] = []
    handles = [
        first.register_hook(lambda grad: 2 * grad),
        second.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad)),
    ]
    plain(ddp, data(0)).backward()
    assert ddp.module.taker.log == ["overwrite", "overwrite", "refused", "refused"]
    ddp.finish_grad_sync()
    got = gradients(ddp)
    for handle in handles:
        handle.remove()
    poison(ddp)
    plain(ddp, data(0)).backward()
    assert ddp.module.taker.log[WEIGHTS:] == ["overwrite"] * WEIGHTS
    assert torch.equal(got["weights.0.weight"], 2 * first.main_grad)
    assert torch.equal(got["weights.2.weight"], third.main_grad)


def check_capture() -> None:
    ddp = wrap()
    streams = ddp.buckets[0]._streams
    with mock.patch.object(streams, "capturing", return_value=True), ddp.no_sync():
        plain(ddp, data(0)).backward()
    assert ddp.module.taker.log == ["refused"] * WEIGHTS


def check_copies() -> None:
    """A copy, a pickle and a model whose engine is gone have gradients like any other."""
    ddp = wrap()
    plain(ddp, data(0)).backward()
    ddp.finish_grad_sync()
    want = gradients(ddp)
    model = ddp.module
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.weights[0].weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.get_main_grad() is None
    twin.weights[1].weight = loaded
    twin.weights[1].weight.data.copy_(model.weights[1].weight.data)
    ddp.zero_grad()
    del ddp
    gc.collect()
    for orphan in (twin, model):
        orphan.taker = Taker()
        plain(orphan, data(0)).backward()
        assert orphan.taker.log == ["refused"] * WEIGHTS
        for name, param in orphan.named_parameters():
            assert torch.equal(param.grad, want[name]), name


@pytest.mark.parametrize(
    "check",
    [check_offered, check_onlookers, check_capture, check_copies],
    ids=lambda check: check.__name__,
)
def test_who_may_write(ranks: Ranks, check: Callable[[], None]) -> None:
    ranks.run(1, check)


# Writes that are lost, late or broken off


def check_forgetful() -> None:
    ddp = wrap(Model(ForgetfulTaker()), check_for_nan=True)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    poison(ddp)
    plain(ddp, data(0)).backward()
    with pytest.raises(NonFiniteGradientError, match=r"weights\.0\.weight"):
        optimizer.step()


def check_late() -> None:
    """While the bucket is being reduced, the taker is refused; one that does not ask is found."""
    for taker, entry in ((Taker(), "refused"), (HastyTaker(), "add")):
        ddp = wrap(Model(taker))
        weight = ddp.module.weights[3]
        with spying():
            plain(ddp, data(0)).backward()
            assert weight.weight.main_grad.isnan().any()  # it is on its way
            before = weight.weight.main_grad.clone()
            with pytest.raises(GradientOrderError, match=r"weights\.3\.weight arrived after"):
                Product.apply(data(1), weight(), taker).sum().backward()
        assert taker.log == ["overwrite"] * WEIGHTS + [entry]
        untouched = torch.equal(weight.weight.main_grad.nan_to_num(), before.nan_to_num())
        assert untouched == (entry == "refused")
        poison(ddp)
        plain(ddp, data(2)).backward()
        ddp.finish_grad_sync()
        assert taker.log[WEIGHTS + 1 :] == ["overwrite"] * WEIGHTS


def check_broken_off() -> None:
    """A backward that fails between the write and the hook."""
    ddp = wrap(unused_parameters="zero")
    taker, weight = ddp.module.taker, ddp.module.weights[3]
    plain(ddp, data(0)).backward()
    ddp.finish_grad_sync()
    want = gradients(ddp)
    poison(ddp)

    def break_off() -> None:
        taker.fails = True
        with pytest.raises(ZeroDivisionError):
            Product.apply(data(1), weight(), taker).sum().backward()
        assert weight.weight.grad_added_to_main_grad

    break_off()
    poison(ddp)
    assert not weight.weight.grad_added_to_main_grad
    plain(ddp, data(0)).backward()
    ddp.finish_grad_sync()
    assert all(torch.equal(got, want[name]) for name, got in gradients(ddp).items())
    # As a parameter without a gradient.
    poison(ddp)
    break_off()
    ddp.finish_grad_sync()
    assert not weight.weight.main_grad.any()
    # Who goes on without zero_grad() has that part of the gradient too, and loses none.
    poison(ddp)
    break_off()
    part = weight.weight.main_grad.clone()
    plain(ddp.module, data(0)).backward()
    ddp.finish_grad_sync()
    torch.testing.assert_close(weight.weight.main_grad, part + want["weights.3.weight"])


@pytest.mark.parametrize(
    ("check", "size"),
    [(check_forgetful, 2), (check_late, 2), (check_broken_off, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_writes_that_break_the_rules(ranks: Ranks, check: Callable[[], None], size: int) -> None:
    ranks.run(size, check)
