"""enable, disable and what our Megatron layer refuses; routers and forced balancing."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import megatron_cases as cases
from tests import megatron_shim
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

HOLDING = {
    "enable_primus_turbo": True,
    "use_turbo_mega_moe": True,
    "tensor_model_parallel_size": 1,
    "bf16": True,
}


def layer_class(spec: Any) -> str:
    """The class that a layer's spec puts in the place of the MLP."""
    mlp = spec.submodules.mlp
    return str(getattr(mlp, "module", None) or mlp.func).rpartition(".")[2].rstrip("'>")


def switching() -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs

    from megamoe.megatron import MegaMoEOptions, disable, enable, split_spec

    def built() -> str:
        return layer_class(gpt_layer_specs.get_gpt_layer_local_spec(num_experts=8))

    megatron_shim.initialize(2)
    original = moe_module_specs.get_moe_module_spec_for_backend
    assert built() == "MoELayer"
    disable()  # without enable before, nothing
    for name, wrong, condition in (
        ("enable_primus_turbo", False, "enable_primus_turbo is set"),
        ("use_turbo_mega_moe", False, "use_turbo_mega_moe is set"),
        ("tensor_model_parallel_size", 2, "tensor_model_parallel_size is 1"),
        ("bf16", False, "bf16 is set"),
    ):
        assert enable(argparse.Namespace(**HOLDING))
        decision = enable(argparse.Namespace(**{**HOLDING, name: wrong}))
        assert not decision
        assert [text for text, holds in decision.conditions.items() if not holds] == [condition]
        assert f"NO   {condition}" in str(decision)
        assert built() == "MoELayer"  # it also takes back what was enabled before
    for _ in range(2):  # a second call is harmless
        decision = enable(argparse.Namespace(**HOLDING))
        assert decision
        assert "all conditions hold" in str(decision)
        assert built() == "MegaMoEMegatronLayer"
    enable(argparse.Namespace(**HOLDING, mega_moe_router="fused", mega_moe_backend="reference"))
    spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=8).submodules.mlp
    given = getattr(spec, "params", None) or spec.keywords
    assert given["options"] == MegaMoEOptions(router="fused", backend="reference")
    assert layer_class(gpt_layer_specs.get_gpt_layer_local_spec()) == "MLP"  # a dense layer
    disable()
    disable()
    assert built() == "MoELayer"
    assert moe_module_specs.get_moe_module_spec_for_backend is original
    assert gpt_layer_specs.get_moe_module_spec_for_backend is original

    theirs = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=8)
    assert layer_class(split_spec(theirs)) == "MegaMoEMegatronLayer"
    assert layer_class(theirs) == "MoELayer"

    parallel_state.destroy_model_parallel()
    decision = enable(argparse.Namespace(**HOLDING))
    assert not decision
    assert "NO   there is an expert-parallel group" in str(decision)


def test_enable_and_disable(ranks: Ranks) -> None:
    ranks.run(2, switching)


def refusals() -> None:
    from torch.nn import functional as F

    from megamoe.errors import ConfigError, ExpertBiasError, UnsupportedFeatureError
    from megamoe.megatron import MegaMoEMegatronLayer, MegaMoEOptions

    def build(options: dict[str, Any] | None = None, **fields: Any) -> Any:
        config = cases.config(2)
        for name, value in fields.items():  # past the checks of the configuration itself
            setattr(config, name, value)
        options = {"backend": "reference", **(options or {})}
        return MegaMoEMegatronLayer(config, cases.submodules(), options=MegaMoEOptions(**options))

    fused = {"router": "fused"}
    scopes = "cuda_graph_scope"
    if hasattr(cases.config(2), "cuda_graph_modules"):
        scopes = "cuda_graph_modules"
    with megatron_shim.on_cpu():
        megatron_shim.initialize(2)
        wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: build(add_bias_linear=True), UnsupportedFeatureError, "add_bias_linear"),
            (lambda: build(activation_func=F.gelu), UnsupportedFeatureError, "SwiGLU"),
            (lambda: build(gated_linear_unit=False), UnsupportedFeatureError, "SwiGLU"),
            (lambda: build(fp8="hybrid"), UnsupportedFeatureError, "fp8"),
            (
                lambda: build(moe_expert_capacity_factor=1.0),
                UnsupportedFeatureError,
                "capacity_factor",
            ),
            (
                lambda: build(moe_shared_expert_overlap=True, delay_wgrad_compute=True),
                UnsupportedFeatureError,
                "moe_shared_expert_overlap.*delay_wgrad_compute",
            ),
            (
                lambda: build(cuda_graph_impl="transformer_engine", **{scopes: ["moe_router"]}),
                UnsupportedFeatureError,
                "CUDA graphs of moe_router.*whole layer",
            ),
            (
                lambda: build(fused, moe_router_enable_expert_bias=True),
                ExpertBiasError,
                "router='megatron' has it",
            ),
            (
                lambda: build(fused, moe_router_load_balancing_type="seq_aux_loss"),
                UnsupportedFeatureError,
                "seq_aux_loss.*router='megatron' has it",
            ),
            (lambda: build(fused, moe_z_loss_coeff=0.1), UnsupportedFeatureError, "z_loss"),
            (lambda: build({"router": "best"}), ConfigError, "router is 'best'"),
            (
                lambda: MegaMoEMegatronLayer(
                    cases.config(2, moe_shared_expert_intermediate_size=16),
                    options=MegaMoEOptions(backend="reference"),
                ),
                ConfigError,
                "have no shared_experts",
            ),
            (
                lambda: build()(torch.zeros(2, 1, 32), intermediate_tensors=(None,)),
                UnsupportedFeatureError,
                "capture the whole layer",
            ),
        ]
        for call, error, text in wrong:
            with pytest.raises(error, match=text):
                call()
        assert isinstance(build().experts.fc1_weight.weight, torch.nn.Parameter)


def test_refusals(ranks: Ranks) -> None:
    ranks.run(2, refusals)


def forced() -> dict[str, torch.Tensor]:
    """Tokens per expert under forced balancing, and the router's gradient."""
    found = {}
    with megatron_shim.on_cpu():
        megatron_shim.initialize(2)
        for kind in ("even", "uniform"):
            for router in ("megatron", "fused"):
                torch.manual_seed(3)
                config = cases.config(2, moe_router_force_load_balancing=True)
                _, layer = cases.both_layers(config, router=router, force_load_balancing_type=kind)
                # Every logit alike but for one: unforced, all tokens would meet expert 7.
                with torch.no_grad():
                    layer.router.weight.zero_()
                    layer.router.weight[7] = 1
                x = torch.ones(16, 2, 32)
                weights, ids = layer._choose(x, None)
                layer(x)[0].sum().backward()
                assert layer.router.weight.grad.abs().max() > 0
                found[f"{kind} {router}"] = ids.flatten().bincount(minlength=8)
                if kind == "even":
                    assert weights.max() > 0.9  # the router's own
    return found


def test_forced_balancing(ranks: Ranks) -> None:
    for found in ranks.run(2, forced):
        for router in ("megatron", "fused"):
            assert found[f"even {router}"].tolist() == [8] * 8  # 32 tokens, top 2
            counts = found[f"uniform {router}"]
            assert counts.sum() == 64
            assert counts[7] < 24, counts  # unforced it would be 32
            assert counts.max() > 8  # drawn, not dealt


def routers() -> list[str]:
    """What differs between TopKRouter and our fused router behind its contract."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    differences = []
    for options in (cases.SOFTMAX, cases.DEEPSEEK):
        with megatron_shim.on_cpu():
            megatron_shim.initialize(2)
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
            config = cases.config(2, **options)
            theirs, ours = cases.both_layers(config, router="fused")
            x = torch.randn(5, 3, 32)
            for mask in (None, torch.rand(5, 3) < 0.3):
                results = []
                for router in (theirs.router, ours.router):
                    router.zero_grad()
                    tokens = x.clone().requires_grad_()
                    probs, routing_map = router(tokens, mask)
                    (probs * torch.arange(8.0)).sum().backward()
                    results.append((probs, routing_map, tokens.grad, router.weight.grad))
                names = ("probs", "map", "dx", "dW")
                differences += [
                    f"{name} of {options} with mask {mask is not None}"
                    for name, want, got in zip(names, *results, strict=True)
                    if not torch.allclose(want.float(), got.float(), rtol=1e-5, atol=1e-7)
                ]
            assert type(theirs.router) is not type(ours.router)
    return differences


def test_routers_agree(ranks: Ranks) -> None:
    assert ranks.run(2, routers) == [[], []]


def experts_of(ep: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    from megamoe.megatron import MegaMoEMegatronLayer, MegaMoEOptions

    with megatron_shim.on_cpu():
        megatron_shim.initialize(ep)
        torch.manual_seed(11)
        config = cases.config(ep, init_method_std=0.5, num_layers=8)
        layer = MegaMoEMegatronLayer(
            config, cases.submodules(), options=MegaMoEOptions(backend="reference")
        )
    experts = layer.experts
    return (
        experts.first_expert,
        experts.fc1_weight.weight.detach(),
        experts.fc2_weight.weight.detach(),
    )


def test_initialisation(ranks: Ranks) -> None:
    """Megatron's deviations, and the same global experts for any expert-parallel size."""
    found = {}
    for ep in (1, 2, 4):
        parts = sorted(ranks.run(4, experts_of, ep)[:ep], key=lambda part: part[0])
        found[ep] = [torch.cat([part[i] for part in parts]) for i in (1, 2)]
        assert [part[0] for part in parts] == [rank * 8 // ep for rank in range(ep)]
    fc1, fc2 = found[1]
    assert fc1.std().item() == pytest.approx(0.5, rel=0.05)
    assert fc2.std().item() == pytest.approx(0.5 / (2 * 8) ** 0.5, rel=0.05)
    for ep in (2, 4):
        for want, got in zip(found[1], found[ep], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
