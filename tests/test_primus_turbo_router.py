"""The fused router of Primus-Turbo (simulated) against the plain one, forward and backward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megamoe import MegaMoEConfig
from megamoe.router import route
from tests import primus_turbo_simulator as simulator
from tests.megamoe_cases import SEED, assert_tensor_close

BASE = {"hidden_size": 512, "moe_ffn_hidden_size": 32, "num_moe_experts": 16}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.1}
SOFTMAX = {"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.1}
GROUPED = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}


def both(options: dict[str, object]) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """What the fused and the plain router make of the same logits, and how often the fused ran."""
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(50, 16, generator=generator)
    d_weights = torch.randn(50, int(options.get("moe_router_topk", 2)), generator=generator)
    answers = []
    spy = mock.Mock(wraps=simulator.fused_group_topk_routing_with_aux_score)
    with mock.patch.object(simulator, "fused_group_topk_routing_with_aux_score", spy):
        for backend in ("primus_turbo", "reference"):
            leaf = logits.clone().requires_grad_()
            with simulator.installed():
                ids, weights, aux_loss = route(
                    leaf, MegaMoEConfig(**BASE, **options, mega_moe_backend=backend)
                )
            ((weights * d_weights).sum() + aux_loss).backward()
            answers.append([ids, weights, aux_loss, leaf.grad])
    return *answers, spy.call_count


@pytest.mark.parametrize(
    "options",
    [
        SIGMOID,
        SOFTMAX,
        {**SOFTMAX, "moe_router_topk": 1},
        {**SIGMOID, "moe_router_topk_scaling_factor": 2.5},
        {**SIGMOID, **GROUPED},
        {**SOFTMAX, **GROUPED},
        {**SIGMOID, "moe_router_load_balancing_type": "none"},
        {**SIGMOID, "moe_router_force_load_balancing": True,
         "moe_router_force_load_balancing_type": "even"},
    ],
)  # fmt: skip
def test_equal_to_the_plain_router(options: dict[str, object]) -> None:
    fused, plain, calls = both(options)
    assert calls == 1
    assert torch.equal(fused[0], plain[0])
    for what, got, want in zip(("weights", "loss", "grad"), fused[1:], plain[1:], strict=True):
        assert_tensor_close(got, want, 1e-5, what)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="softmax after the top-k"),
        pytest.param({**SIGMOID, "moe_router_topk": 1}, id="a single sigmoid"),
        pytest.param(
            {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 3,
             "moe_router_topk": 3},
            id="three groups",
        ),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_know_stays_with_the_plain_router(
    options: dict[str, object],
) -> None:
    fused, plain, calls = both(options)
    assert calls == 0
    for got, want in zip(fused, plain, strict=True):
        assert torch.equal(got, want)
