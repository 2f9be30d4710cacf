"""The router kernel against the float64 loop, through MegaMoERouter."""

from __future__ import annotations

import pytest
import torch

from megamoe import MegaMoEConfig, MegaMoERouter
from tests import oracle
from tests.triton_cases import DEVICE, relative_error

# isort: split
from megamoe.backends.triton.ops import ops


@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize(
    ("score_function", "pre_softmax", "topk"),
    [
        ("sigmoid", False, 4),
        ("sigmoid", False, 1),
        ("softmax", True, 4),
        ("softmax", True, 1),
        ("softmax", False, 4),
    ],
)
def test_router_equals_the_loop(
    score_function: str, pre_softmax: bool, topk: int, grouped: bool
) -> None:
    experts, tokens = (16, 37) if grouped else (11, 37)
    group_topk = min(topk, 2)
    config = MegaMoEConfig(
        hidden_size=24,
        moe_ffn_hidden_size=8,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_score_function=score_function,
        moe_router_pre_softmax=pre_softmax,
        moe_router_num_groups=4 if grouped else None,
        moe_router_group_topk=group_topk if grouped else None,
        moe_router_topk_scaling_factor=2.5,
        moe_aux_loss_coeff=0.1,
        mega_moe_backend="triton",
    )
    torch.manual_seed(topk)
    router = MegaMoERouter(config, dtype=torch.float32, device=DEVICE)
    with torch.no_grad():
        router.weight.mul_(20)  # scores that differ
    x = torch.randn(tokens, 24, device=DEVICE)
    ids, weights, aux_loss = router(x)
    d_weights = torch.randn(weights.shape, device=DEVICE)
    ((weights * d_weights).sum() + 3 * aux_loss).backward()

    weight = router.weight.detach().double().cpu().requires_grad_()
    logits = x.double().cpu() @ weight.T
    want_ids, want_weights = oracle.route(
        logits,
        topk,
        score_function=score_function,
        pre_softmax=pre_softmax,
        groups=4 if grouped else None,
        group_topk=group_topk if grouped else None,
        scaling=2.5,
    )
    want_loss = oracle.aux_loss(logits, topk, 0.1, score_function)
    ((want_weights * d_weights.double().cpu()).sum() + 3 * want_loss).backward()
    assert torch.equal(ids.cpu(), want_ids)
    assert relative_error(weights.cpu(), want_weights) < 1e-5
    assert relative_error(aux_loss.cpu(), want_loss) < 1e-5
    assert weight.grad is not None
    assert relative_error(router.weight.grad.cpu(), weight.grad) < 1e-4


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(5, 8, device=DEVICE)
    logits[:, 6] = 1.0
    ids, weights, sums, tokens = ops.route(logits, 3, True, False, 1, 1, 1.0, True)
    assert ids.tolist() == [[6, 0, 1]] * 5
    assert tokens.tolist() == [5, 5, 0, 0, 0, 0, 5, 0]
    assert torch.allclose(weights.sum(1), torch.ones(5, device=DEVICE))
    assert torch.allclose(sums.sum(), torch.tensor(5.0, device=DEVICE))


def test_no_token() -> None:
    logits = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    ids, weights, sums, tokens = ops.route(logits, 2, False, True, 1, 1, 1.0, True)
    assert ids.shape == weights.shape == (0, 2)
    assert not sums.any()
    assert not tokens.any()
    weights.sum().backward()
    assert logits.grad is not None
