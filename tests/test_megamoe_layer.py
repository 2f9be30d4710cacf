"""The whole layer: against the oracle, checkpointed, reused, under autocast; 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megamoe import MegaMoEConfig, MegaMoELayer, errors
from tests import oracle
from tests.megamoe_cases import SEED, TOLERANCE, assert_tensor_close
from tests.ranks import Ranks

OPTIONS: dict[str, Any] = {
    "hidden_size": 16,
    "moe_ffn_hidden_size": 12,
    "num_moe_experts": 8,
    "moe_shared_expert_intermediate_size": 10,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.0,
    "moe_aux_loss_coeff": 0.05,
    "init_method_std": 0.3,
}
TOKENS = (11, 0, 7, 16)  # per rank


def build(
    group: Any = None, *, fused: bool = False, dtype: Any = None, **more: Any
) -> MegaMoELayer:
    torch.manual_seed(SEED)
    if dtype == torch.float64:
        more["moe_router_dtype"] = "fp64"
    return MegaMoELayer(MegaMoEConfig(**(OPTIONS | more)), group, fused=fused, dtype=dtype)


def tokens(dtype: torch.dtype, rank: int = 0, count: int | None = None) -> tuple[Tensor, Tensor]:
    """x and the gradient of y."""
    count = TOKENS[rank] if count is None else count
    generator = torch.Generator().manual_seed(SEED + 10 + rank)
    x, dy = torch.randn(2, count, 16, generator=generator, dtype=torch.float64).to(dtype)
    return x, dy


def solve(
    layer: MegaMoELayer, ranks: int, dtype: torch.dtype
) -> tuple[list[Any], dict[str, Tensor]]:
    """(y, aux loss, dx) of each rank and the gradients of all parameters, from a full layer."""
    params = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    answers, total = [], torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        x, dy = (t.double() for t in tokens(dtype, rank))
        x.requires_grad_()
        if x.shape[0] == 0:
            answers.append((x.detach(), x.new_zeros(()), x.detach()))
            continue
        logits = x @ params["router.weight"].T
        ids, weights = oracle.route(
            logits, 4, score_function="sigmoid", groups=4, group_topk=2, scaling=2.0
        )
        loss = oracle.aux_loss(logits, 4, 0.05, "sigmoid")
        y = oracle.experts(
            x,
            ids,
            weights,
            params["experts.fc1_weight.weight"],
            params["experts.fc2_weight.weight"],
        )
        shared = [
            params["shared_expert.fc2.weight"] @ oracle.swiglu(row)
            for row in x @ params["shared_expert.fc1.weight"].T
        ]
        y = y + torch.stack(shared)
        (dx,) = torch.autograd.grad((y * dy).sum() + loss, x, retain_graph=True)
        total = total + (y * dy).sum() + loss
        answers.append((y.detach(), loss.detach(), dx))
    grads = torch.autograd.grad(total, list(params.values()))
    return answers, dict(zip(params, grads, strict=True))


def check_on_rank(dtype: torch.dtype, fused: bool) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    layer = build(group, fused=fused, dtype=dtype)
    x, dy = tokens(dtype, rank)
    x.requires_grad_()
    y, loss = layer(x)
    torch.autograd.backward([y, loss], [dy, torch.ones_like(loss)])
    answers, want = solve(build(dtype=dtype), ranks, dtype)
    for name, got, wanted in zip(("y", "aux", "dx"), (y, loss, x.grad), answers[rank], strict=True):
        assert_tensor_close(got, wanted, TOLERANCE[dtype], f"{name} on rank {rank}")
    for name, param in layer.named_parameters():
        grad = param.grad.double()
        if ".weight" in name and "experts." in name:
            size = param.shape[0]
            wanted = want[name][rank * size : (rank + 1) * size]
        else:
            dist.all_reduce(grad)
            wanted = want[name]
        assert_tensor_close(grad, wanted, TOLERANCE[dtype], f"gradient of {name} on rank {rank}")


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_against_the_oracle(ranks: Ranks, world_size: int, dtype: torch.dtype, fused: bool) -> None:
    ranks.run(world_size, check_on_rank, dtype, fused)


def backward(layer: MegaMoELayer, x: Tensor, dy: Tensor, mode: str) -> dict[str, Tensor]:
    """Values and gradients by name; ``mode`` says how the layer is run."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(SEED)
    if mode == "plain":
        y, loss = layer(x)
    else:
        y, loss = checkpoint(layer, x, use_reentrant=mode == "reentrant")
    torch.autograd.backward([y, loss], [dy, torch.ones_like(loss)])
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"y": y.detach(), "aux loss": loss.detach(), "dx": x.grad} | grads


def check_checkpointing(forced: bool, mode: str, fused: bool) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    layer = build(group, fused=fused, moe_router_force_load_balancing=forced)
    x, dy = tokens(torch.float32, rank)
    plain = backward(layer, x, dy, "plain")
    recomputed = backward(layer, x, dy, mode)
    for name, value in plain.items():
        assert torch.equal(recomputed[name], value), f"{name} differs; TEST_SEED={SEED}"


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("mode", ["reentrant", "not-reentrant"])
@pytest.mark.parametrize("forced", [False, True], ids=["free", "random-logits"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_activation_checkpointing_gives_the_same_bits(
    ranks: Ranks, world_size: int, forced: bool, mode: str, fused: bool
) -> None:
    ranks.run(world_size, check_checkpointing, forced, mode, fused)


def check_double_use() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    layer = build(group, dtype=torch.float64)
    inputs = [tokens(torch.float64, rank, count) for count in (9, 4 + rank)]
    apart = []
    for x, dy in inputs:
        layer.zero_grad()
        y, loss = layer(x)
        (y * dy).sum().add(loss).backward()
        apart.append({name: p.grad for name, p in layer.named_parameters()})
    layer.zero_grad()
    outputs = [layer(x) for x, _ in inputs]
    total = sum((y * dy).sum() + loss for (y, loss), (_, dy) in zip(outputs, inputs, strict=True))
    total.backward()
    for name, param in layer.named_parameters():
        assert_tensor_close(param.grad, sum(a[name] for a in apart), 1e-13, name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_layer_used_twice_before_any_backward(ranks: Ranks, world_size: int) -> None:
    ranks.run(world_size, check_double_use)


def test_one_layer_applied_to_its_own_output() -> None:
    """As deep as two layers with equal weights, whose gradients are summed."""
    once, (x, dy) = build(dtype=torch.float64), tokens(torch.float64)
    first, second = copy.deepcopy(once), copy.deepcopy(once)
    once(once(x)[0])[0].backward(dy)
    second(first(x)[0])[0].backward(dy)
    for (name, p), a, b in zip(
        once.named_parameters(), first.parameters(), second.parameters(), strict=True
    ):
        assert_tensor_close(p.grad, a.grad + b.grad, 1e-13, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_split_and_fused_give_the_same_bits(dtype: torch.dtype) -> None:
    x, dy = tokens(dtype)
    split = backward(build(dtype=dtype), x, dy, "plain")
    fused = backward(build(dtype=dtype, fused=True), x, dy, "plain")
    for name, value in split.items():
        assert torch.equal(fused[name], value), name


def test_leading_dimensions_are_kept() -> None:
    layer, (x, _) = build(dtype=torch.float64), tokens(torch.float64, count=12)
    flat, loss = layer(x)
    for shape in ((3, 4, 16), (2, 3, 2, 16)):
        y, same = layer(x.view(shape))
        assert y.shape == shape
        assert torch.equal(y.view(12, 16), flat)
        assert torch.equal(same, loss)
    transposed = layer(x.view(3, 4, 16).transpose(0, 1))[0]
    assert_tensor_close(transposed.transpose(0, 1).reshape(12, 16), flat, 1e-13, "transposed")


def test_autocast_leaves_the_experts_alone() -> None:
    layer, (x, _) = build(moe_shared_expert_intermediate_size=None), tokens(torch.float32)
    plain = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x)[0], plain)


def test_the_configuration_decides_the_dtype() -> None:
    assert {p.dtype for p in build(bf16=True).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in build().parameters()} == {torch.float32}
    assert {p.dtype for p in build(bf16=True, dtype=torch.float32).parameters()} == {torch.float32}


def test_registration_order_and_names() -> None:
    assert [name for name, _ in build().named_parameters()] == [
        "router.weight",
        "experts.fc1_weight.weight",
        "experts.fc2_weight.weight",
        "shared_expert.fc1.weight",
        "shared_expert.fc2.weight",
    ]


def test_a_wrong_hidden_size_is_named() -> None:
    with pytest.raises(errors.InputError, match=r"\[3, 15\]; its last size must be hidden_size 16"):
        build()(torch.zeros(3, 15))
