"""Weight gradients that the Triton stages write into an engine's fp32 memory, against float64."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from megamoe import MegaMoEExperts, fused_mega_moe
from overlap import DistributedDataParallel, OverlapConfig, ProcessGroups
from tests import oracle
from tests.ranks import Ranks
from tests.test_triton_stages import exact, forward, run
from tests.triton_cases import DEVICE, DTYPE, ON_GPU, Case, make_case, poison, relative_error

# isort: split
from megamoe.backends.triton.ops import ops

EXACT = 5e-3 if ON_GPU else 1e-5  # the inputs of the products are bf16 on a GPU, the sums are not


def offer(weight: Tensor, **more: object) -> None:
    """Offer NaN-filled memory, as an engine that never zeroes its buffers does."""
    weight.main_grad = torch.full(weight.shape, torch.nan, device=DEVICE)
    weight.grad_added_to_main_grad = False
    weight.overwrite_main_grad = True
    for name, value in more.items():
        setattr(weight, name, value)


def backward(case: Case, fused: bool = False) -> None:
    if fused:
        inputs = case.x, case.ids, case.weights, case.w1, case.w2
        fused_mega_moe(*inputs, None, backend="triton").backward(case.dy)
    else:
        forward(case).backward(case.dy)


def test_memory_that_is_zeroed_gets_every_gradient_added() -> None:
    """Megatron-core's form of the offer: no overwriting, and a flag that stays set."""
    case = make_case(80, 2, 3, 32, 16)
    want = exact(case)
    for weight in (case.w1, case.w2):
        weight.main_grad = torch.ones(weight.shape, device=DEVICE)
        weight.grad_added_to_main_grad = False
    for _ in range(2):  # two microbatches
        backward(case)
    for weight, gradient in ((case.w1, want[3]), (case.w2, want[4])):
        assert weight.grad_added_to_main_grad
        assert relative_error(weight.main_grad - 1, 2 * gradient) < EXACT


@pytest.mark.parametrize("fused", [False, True], ids=["staged", "fused"])
def test_the_first_gradient_overwrites_and_the_next_are_added(fused: bool) -> None:
    case = make_case(140, 2, 4, 40, 24)
    case = case._replace(ids=torch.where(case.ids == 1, -1, case.ids))  # expert 1 has no token
    want = exact(case)
    for weight in (case.w1, case.w2):
        offer(weight, zero_out_wgrad=True)
    for microbatch in range(3):
        poison(1 << 12, 1 << 16)
        backward(case, fused)
        for weight, gradient in ((case.w1, want[3]), (case.w2, want[4])):
            assert weight.grad_added_to_main_grad
            assert weight.grad._is_zerotensor()
            assert relative_error(weight.main_grad, (microbatch + 1) * gradient) < EXACT
            assert not weight.main_grad[1].any()
            # What the engine's hook does.
            weight.grad, weight.grad_added_to_main_grad = None, False
            weight.overwrite_main_grad = False
    if ON_GPU:
        assert not torch.equal(case.w1.main_grad, case.w1.main_grad.to(DTYPE).float())


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_token_at_all_overwrites_with_zeros(tokens: int) -> None:
    case = make_case(tokens, 2, 3, 16, 8)
    case = case._replace(ids=torch.full_like(case.ids, -1))
    for weight in (case.w1, case.w2):
        offer(weight)
    backward(case)
    assert not case.w1.main_grad.any()
    assert not case.w2.main_grad.any()


def test_two_uses_in_one_backward_add_up() -> None:
    case = make_case(50, 2, 3, 32, 16)
    want = exact(case)
    for weight in (case.w1, case.w2):
        offer(weight, zero_out_wgrad=True)
    (forward(case) + forward(case)).backward(case.dy)
    for weight, gradient in ((case.w1, want[3]), (case.w2, want[4])):
        assert relative_error(weight.main_grad, 2 * gradient) < EXACT


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "memory in bf16"])
def test_without_fp32_memory_the_gradient_is_left_to_autograd(refused: bool) -> None:
    case = make_case(30, 2, 3, 32, 16)
    want = run(case)
    offer(case.w1)
    if refused:
        case.w1.get_main_grad = lambda: None
    else:
        case.w1.main_grad = case.w1.main_grad.bfloat16()
    backward(case)
    assert not case.w1.grad_added_to_main_grad
    assert case.w1.main_grad.isnan().all()
    assert torch.equal(case.w1.grad, want[3])


def test_a_compiled_layer_does_not_take_the_offer() -> None:
    case = make_case(20, 2, 3, 16, 8)
    want = run(case)
    for weight in (case.w1, case.w2):
        offer(weight)
    torch.compile(forward, fullgraph=True, backend="aot_eager")(case).backward(case.dy)
    for weight, gradient in ((case.w1, want[3]), (case.w2, want[4])):
        assert not weight.grad_added_to_main_grad
        assert weight.main_grad.isnan().all()
        assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize("add", [False, True])
def test_the_operator_and_its_fake_agree(add: bool) -> None:
    case = make_case(20, 2, 3, 16, 8)
    x, weights, w1, _ = (leaf.detach() for leaf in case.leaves)
    l1, _, tables = ops.stage1_forward(x, case.ids, weights, w1)
    out = torch.zeros(w1.shape, device=DEVICE)
    torch.library.opcheck(
        ops.weight_grad_out.default,
        (out, x, l1, tables, False, add),
        test_utils=("test_schema", "test_faketensor") if ON_GPU else "test_faketensor",
    )


def check_in_the_engine() -> None:
    """Three microbatches, with another use of W2, against float64 and against no offer."""
    torch.manual_seed(3)
    cases = [make_case(40, 2, 3, 16, 8, seed=seed) for seed in range(3)]
    experts = MegaMoEExperts(16, 8, 3, backend="triton", init_std=0.3, dtype=DTYPE).to(DEVICE)
    weights = [experts.fc1_weight.weight, experts.fc2_weight.weight]
    want = [torch.zeros_like(weight, dtype=torch.float64).detach() for weight in weights]
    for case in cases:
        leaves = [weight.detach().cpu().double().requires_grad_() for weight in weights]
        x, ids, topk_weights, *_, dy = (tensor.detach().cpu() for tensor in case)
        y = oracle.experts(x.double(), ids, topk_weights.double(), *leaves, None)
        loss = (y * dy.double()).sum() + leaves[1].square().sum()
        for total, gradient in zip(want, torch.autograd.grad(loss, leaves), strict=True):
            total += gradient.to(DEVICE)
    groups = ProcessGroups.build()
    for fusion in (True, False):
        ddp = DistributedDataParallel(
            experts, OverlapConfig(gradient_accumulation_fusion=fusion), groups
        )
        for _ in range(2):
            ddp.zero_grad()
            for bucket in ddp.buckets:
                bucket.grads.fill_(torch.nan)
            with mock.patch.object(ops, "weight_grad_out", wraps=ops.weight_grad_out) as write:
                for microbatch, case in enumerate(cases):
                    with nullcontext() if microbatch == 2 else ddp.no_sync():
                        y = ddp(case.x, case.ids, case.weights)
                        loss = (y * case.dy).float().sum() + weights[1].float().square().sum()
                        loss.backward()
            added = [call.args[-1] for call in write.call_args_list]
            assert added == ([False] * 2 + [True] * 4 if fusion else [])
            ddp.finish_grad_sync()
            for weight, gradient in zip(weights, want, strict=True):
                assert relative_error(weight.main_grad, gradient) < (1e-2 if ON_GPU else 1e-5)
        ddp.remove()


def test_microbatches_in_the_engine(ranks: Ranks) -> None:
    ranks.run(1, check_in_the_engine)
