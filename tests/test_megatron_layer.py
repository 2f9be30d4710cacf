"""Our Megatron layer against Megatron-core's MoELayer with the same weights."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import megatron_cases as cases
from tests import megatron_shim
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

SEQUENCE, BATCH, MICROBATCHES = 6, 3, 4
# Name: expert-parallel size (of 4 ranks), TransformerConfig's options, ours.
SCENARIOS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "softmax": (2, cases.SOFTMAX, {}),
    "sigmoid-groups": (2, {**cases.DEEPSEEK, "moe_shared_expert_intermediate_size": 40}, {}),
    "sigmoid-groups, fused router": (2, cases.DEEPSEEK, {"router": "fused"}),
    "softmax, fused router": (4, {"moe_shared_expert_intermediate_size": 40}, {"router": "fused"}),
    "pre-softmax, top 1": (
        4,
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"router": "fused"},
    ),
    "one expert group": (1, cases.DEEPSEEK, {}),
    "expert bias": (4, {**cases.DEEPSEEK, "moe_router_enable_expert_bias": True}, {}),
    "recomputed": (
        2,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_shared_expert_intermediate_size": 40,
        },
        {},
    ),
    "shared expert recomputed": (
        2,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["shared_experts"],
            "moe_shared_expert_intermediate_size": 40,
        },
        {},
    ),
    "unsplit": (2, {}, {"fused": True}),
    "clamped": (2, {"activation_func_clamp_value": 0.02}, {}),
    "z-loss and sequence balance": (
        2,
        {"moe_z_loss_coeff": 1e-2, "moe_router_load_balancing_type": "seq_aux_loss"},
        {},
    ),
    "bf16": (2, {**cases.DEEPSEEK, "moe_shared_expert_intermediate_size": 40}, {"bf16": True}),
}


def run(layer: Any, inputs: list[Tensor], padding: Tensor | None) -> dict[str, Tensor]:
    """Accumulate the gradients of all inputs; return the layer's outputs, gradients and loss."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / MICROBATCHES))
    outputs, input_grads = [], []
    for x in inputs:
        x = x.clone().requires_grad_()
        output, bias = layer(x, padding_mask=padding)
        assert bias is None
        (output.float().square().sum() / MICROBATCHES).backward()
        outputs.append(output.detach())
        input_grads.append(x.grad)
    grads = cases.gradients(layer)
    return {"y": torch.stack(outputs), "dx": torch.stack(input_grads), **grads, **logged()}


def logged() -> dict[str, Tensor]:
    """The balancing losses that Megatron's log holds; empties it."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    entries = get_moe_layer_wise_logging_tracker().items()
    losses = {name: entry["values"].clone() for name, entry in entries if entry["values"].any()}
    for _, entry in entries:
        entry["values"].zero_()
    return losses


def compare(names: list[str], padded: bool = False, broken: str = "") -> list[str]:
    """Return what differs, in the named scenarios, on this rank.

    ``broken`` harms our layer in that respect first.
    """
    differences = []
    logged()  # what earlier tests have left there
    for name in names:
        ep, options, ours_options = SCENARIOS[name]
        bf16 = ours_options.get("bf16", False)
        settings = {key: value for key, value in ours_options.items() if key != "bf16"}
        with megatron_shim.on_cpu():
            megatron_shim.initialize(ep)
            torch.manual_seed(5)  # the same on all ranks: replicas of one model
            theirs, ours = cases.both_layers(cases.config(ep, bf16, **options), **settings)
            harm(ours, broken)
            generator = torch.Generator().manual_seed(100 + torch.distributed.get_rank())
            inputs = torch.randn(MICROBATCHES, SEQUENCE, BATCH, 32, generator=generator)
            padding = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
            padding[1, 4:] = True
            arguments = (list(inputs.to(theirs.config.params_dtype)), padding if padded else None)
            wanted, got = run(theirs, *arguments), run(ours, *arguments)
        assert wanted.keys() == got.keys(), (name, wanted.keys(), got.keys())
        assert any("loss" in key for key in wanted), "no balancing loss was logged"
        differences += [
            f"{name}: {key}" for key in wanted if differs(wanted[key], got[key], bf16, key)
        ]
    return differences


@torch.no_grad()
def harm(layer: Any, how: str) -> None:
    if how == "gate and up swapped":
        weight = layer.experts.fc1_weight.weight
        weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))
    elif how == "balancing loss":
        layer.router.config = copy.copy(layer.router.config)
        layer.router.config.moe_aux_loss_coeff *= 1.01


def differs(want: Tensor, got: Tensor, bf16: bool, what: str) -> bool:
    assert want.abs().max() > 0, what
    if bf16:
        flat = (tensor.double().flatten() for tensor in (want, got))
        return bool(F.cosine_similarity(*flat, dim=0) < 0.999)
    return bool((got - want).abs().max() > 1e-5 * want.abs().max())


def test_equals_moe_layer(ranks: Ranks) -> None:
    assert ranks.run(4, compare, list(SCENARIOS)) == [[]] * 4


def test_padding_leaves_the_balancing_loss(ranks: Ranks) -> None:
    assert ranks.run(4, compare, ["softmax", "sigmoid-groups, fused router"], True) == [[]] * 4


@pytest.mark.parametrize(
    ("how", "seen"),
    [("gate and up swapped", ["y", "dx", "fc1", "fc2"]), ("balancing loss", ["router.weight"])],
)
def test_the_comparison_notices(ranks: Ranks, how: str, seen: list[str]) -> None:
    for found in ranks.run(4, compare, ["softmax"], False, how):
        assert {f"softmax: {what}" for what in seen} <= set(found)
