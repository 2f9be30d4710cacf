"""The router against loops over tokens in float64, and against Megatron-core's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import MegaMoEConfig, MegaMoERouter
from tests import oracle
from tests.megamoe_cases import SEED, TOLERANCE, assert_tensor_close

EXPERTS, HIDDEN, TOKENS = 8, 16, 13

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-pre": {"moe_router_pre_softmax": True},
    "softmax-pre-k1": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid-k1": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "sigmoid-scaled": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sigmoid-grouped": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "softmax-grouped": {
        "moe_router_topk": 2,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 0.5,
    },
    "softmax-pre-grouped": {
        "moe_router_pre_softmax": True,
        "moe_router_topk": 3,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 3,
    },
    "all-experts": {"moe_router_topk": 8},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def config(options: dict[str, Any]) -> MegaMoEConfig:
    defaults = {"moe_router_dtype": "fp64", "init_method_std": 0.5, "moe_aux_loss_coeff": 0.3}
    return MegaMoEConfig(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=4,
        num_moe_experts=EXPERTS,
        **(defaults | options),
    )


def build(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> MegaMoERouter:
    torch.manual_seed(SEED)
    return MegaMoERouter(config(options), dtype=dtype)


def tokens(count: int = TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + count)
    return torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def expected(router: MegaMoERouter, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    c = router.config
    logits = x.double() @ weight.double().T
    ids, weights = oracle.route(
        logits,
        c.moe_router_topk,
        score_function=c.moe_router_score_function,
        pre_softmax=c.moe_router_pre_softmax,
        groups=c.moe_router_num_groups,
        group_topk=c.moe_router_group_topk,
        scaling=c.moe_router_topk_scaling_factor,
    )
    loss = oracle.aux_loss(
        logits, c.moe_router_topk, c.moe_aux_loss_coeff, c.moe_router_score_function
    )
    return ids, weights, loss


@variants
def test_against_the_oracle(options: dict[str, Any]) -> None:
    router = build(options)
    leaves = []
    for forward in (router, lambda x: expected(router, x, router.weight)):
        x = tokens().requires_grad_()
        ids, weights, loss = forward(x)
        router.weight.grad = None
        (weights * torch.arange(1.0, weights.numel() + 1).view_as(weights)).sum().add(
            loss
        ).backward()
        leaves.append((ids, weights.detach(), loss.detach(), x.grad, router.weight.grad))
    names = ("ids", "weights", "aux loss", "dx", "d router weight")
    for name, got, want in zip(names, *leaves, strict=True):
        if name == "ids":
            assert got.dtype == torch.int64
            assert torch.equal(got, want), f"TEST_SEED={SEED}"
        else:
            assert_tensor_close(got, want, 1e-13, name)


@variants
def test_against_megatron(options: dict[str, Any]) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    router = build(options | {"moe_router_dtype": "fp32"}, torch.float32)
    c, x = router.config, tokens(dtype=torch.float32)
    ids, weights, loss = router(x)
    logits = x @ router.weight.T
    probs, chosen = moe_utils.topk_routing_with_score_function(
        logits,
        c.moe_router_topk,
        use_pre_softmax=c.moe_router_pre_softmax,
        num_groups=c.moe_router_num_groups,
        group_topk=c.moe_router_group_topk,
        scaling_factor=c.moe_router_topk_scaling_factor,
        score_function=c.moe_router_score_function,
    )
    dense = torch.zeros_like(probs).scatter(1, ids, weights)
    assert torch.equal(dense != 0, chosen), f"TEST_SEED={SEED}"
    assert_tensor_close(dense, probs, 1e-6, "weights")
    counted, scores = moe_utils.compute_routing_scores_for_aux_loss(
        logits, c.moe_router_topk, c.moe_router_score_function
    )
    theirs = moe_utils.switch_load_balancing_loss_func(
        scores, counted.sum(0), TOKENS, c.moe_router_topk, EXPERTS, c.moe_aux_loss_coeff
    )
    assert_tensor_close(loss, theirs, 1e-6, "aux loss")


def test_logits_that_tie_in_bf16_are_told_apart() -> None:
    router = build({"moe_router_dtype": "fp32", "moe_router_topk": 2}, torch.bfloat16)
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1, 2**-12
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = 1
        router.weight[:, 1] = torch.tensor([0.0, 3, 6, 1, 7, 2, 5, 4])
    rounded = x @ router.weight.T
    assert rounded.unique().numel() == 1, "the example is meant to tie after rounding"
    ids, _, _ = router(x)
    assert ids.tolist() == [[4, 2]]


def test_autocast_does_not_reach_the_router() -> None:
    router, x = build({"moe_router_dtype": "fp32"}, torch.float32), tokens(dtype=torch.float32)
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ router.weight.T).dtype == torch.bfloat16
        cast = router(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("router_dtype", ["fp32", "fp64"])
def test_dtypes(dtype: torch.dtype, router_dtype: str) -> None:
    router = build({"moe_router_dtype": router_dtype}, dtype)
    _, weights, loss = router(tokens(dtype=dtype))
    assert (
        weights.dtype
        == loss.dtype
        == getattr(torch, {"fp32": "float32"}.get(router_dtype, "float64"))
    )
    (weights[:, 0].sum() + loss).backward()
    assert router.weight.grad.dtype == dtype


def force(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "moe_router_force_load_balancing": True,
        "moe_router_force_load_balancing_type": kind,
        **options,
    }


def test_forced_even() -> None:
    """The ids are dealt out; the weights, their gradient and the loss are the real ones."""
    free, even = build({"moe_router_topk": 3}), build(force("even", moe_router_topk=3))
    x = tokens()
    _, weights, loss = free(x)
    forced_ids, forced_weights, forced_loss = even(x)
    want = [[(t * 3 + k) % EXPERTS for k in range(3)] for t in range(TOKENS)]
    assert forced_ids.tolist() == want
    assert torch.equal(forced_weights, weights)
    assert torch.equal(forced_loss, loss)
    for router, w in ((free, weights), (even, forced_weights)):
        w.square().sum().backward()
        assert router.weight.grad.abs().max() > 0
    assert torch.equal(free.weight.grad, even.weight.grad)


def test_forced_uniform() -> None:
    """Ids and weights come from random logits, and the router still gets a gradient."""
    router, x = build(force("uniform")), tokens(4000)
    torch.manual_seed(SEED)
    ids, weights, _ = router(x)
    share = torch.bincount(ids.reshape(-1), minlength=EXPERTS) / ids.numel()
    assert (share - 1 / EXPERTS).abs().max() < 0.03  # 8 standard deviations
    torch.manual_seed(SEED)
    again, _, _ = router(x + 1)
    assert torch.equal(ids, again)
    assert not torch.equal(ids, router(x)[0])
    weights.square().sum().backward()
    assert router.weight.grad.abs().max() > 0


def test_the_aux_loss_accumulates_over_microbatches() -> None:
    """Each microbatch adds its own loss; backward in turn or at once gives the same gradient."""
    router = build({})
    batches = [tokens(count) for count in (5, 13, 1, 8)]
    for batch in batches:
        router(batch)[2].backward()
    accumulated = router.weight.grad
    router.weight.grad = None
    sum(router(batch)[2] for batch in batches).backward()
    assert_tensor_close(router.weight.grad, accumulated, 1e-13, "gradient at once")
    router.weight.grad = None
    sum(expected(router, batch, router.weight)[2] for batch in batches).backward()
    assert_tensor_close(accumulated, router.weight.grad, 1e-13, "gradient of the oracle")


def test_the_aux_loss_of_a_balanced_router_is_its_coefficient() -> None:
    router = build({"moe_router_topk": 8, "moe_aux_loss_coeff": 0.25})
    assert router(tokens())[2].item() == pytest.approx(0.25)


@pytest.mark.parametrize(
    "options", [{"moe_aux_loss_coeff": 0.0}, {"moe_router_load_balancing_type": "none"}]
)
def test_no_aux_loss(options: dict[str, Any]) -> None:
    loss = build(options)(tokens())[2]
    assert loss.shape == ()
    assert loss.item() == 0


@variants
def test_no_token(options: dict[str, Any]) -> None:
    router = build(options)
    ids, weights, loss = router(tokens(0))
    assert ids.shape == weights.shape == (0, router.config.moe_router_topk)
    assert loss.item() == 0
    (weights.sum() + loss).backward()
    assert router.weight.grad.eq(0).all()
