"""MegaMoEConfig: what it takes, what it refuses, and when a layer is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megamoe import MegaMoEConfig, MegaMoELayer, MegaMoERouter, errors

BASE: dict[str, Any] = {"hidden_size": 8, "moe_ffn_hidden_size": 6, "num_moe_experts": 8}

WRONG = [
    ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
    ({"num_moe_experts": 8.0}, r"num_moe_experts is 8.0 \(float\); expected int"),
    ({"moe_router_topk": True}, r"moe_router_topk is True \(bool\); expected int"),
    ({"moe_router_topk_scaling_factor": "two"}, "expected float or None"),
    ({"moe_router_topk": 9}, "moe_router_topk is 9, but num_moe_experts is 8"),
    ({"moe_router_topk": 1}, "would not learn; set moe_router_pre_softmax"),
    ({"moe_router_score_function": "relu"}, r"'relu'; choose one of \['softmax', 'sigmoid'\]"),
    ({"moe_router_dtype": "bf16"}, r"choose one of \['fp32', 'fp64'\]"),
    ({"moe_router_dtype": None}, r"is None; choose one of \['fp32', 'fp64'\]"),
    ({"moe_router_force_load_balancing_type": "odd"}, r"choose one of \['even', 'uniform'\]"),
    ({"moe_router_num_groups": 4}, "set both or neither"),
    ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "8 does not divide by .* 3"),
    ({"moe_router_num_groups": 2, "moe_router_group_topk": 4}, "group_topk is 4, but .* is 2"),
    (
        {"moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
        "moe_router_topk 3 does not divide by moe_router_group_topk 2",
    ),
    (
        {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
        "needs 4 experts per group, but a group has 2",
    ),
    ({"moe_aux_loss_coeff": -1.0}, "moe_aux_loss_coeff is -1.0"),
    ({"init_method_std": 0.0}, "init_method_std is 0.0"),
    ({"activation_func_clamp_value": 0.0}, "activation_func_clamp_value is 0.0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(row[0]) for row in WRONG])
def test_wrong_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        MegaMoEConfig(**(BASE | options))


UNSUPPORTED = [
    ({"moe_router_load_balancing_type": "seq_aux_loss"}, "seq_aux_loss"),
    ({"moe_router_load_balancing_type": "global_aux_loss"}, "global_aux_loss"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
    ({"moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff 0.001"),
    ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps 0.1"),
    ({"moe_expert_capacity_factor": 1.25}, "moe_expert_capacity_factor 1.25"),
    ({"add_bias_linear": True}, "add_bias_linear"),
    ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size 2"),
    ({"swiglu": False}, "swiglu"),
]


@pytest.mark.parametrize(("options", "message"), UNSUPPORTED, ids=[row[1] for row in UNSUPPORTED])
@pytest.mark.parametrize("build", [MegaMoELayer, MegaMoERouter])
def test_unsupported_options_are_legal_until_a_layer_is_built(
    build: type, options: dict[str, Any], message: str
) -> None:
    config = MegaMoEConfig(**(BASE | options))
    with pytest.raises(errors.UnsupportedFeatureError, match=message):
        build(config)


def test_all_unsupported_options_are_named_at_once() -> None:
    config = MegaMoEConfig(**BASE, swiglu=False, moe_z_loss_coeff=0.1)
    with pytest.raises(errors.UnsupportedFeatureError, match=r"swiglu.*; moe_z_loss_coeff"):
        config.require_supported()


def test_expert_bias_is_not_implemented() -> None:
    config = MegaMoEConfig(**BASE, moe_router_enable_expert_bias=True)
    with pytest.raises(NotImplementedError, match="moe_router_enable_expert_bias"):
        MegaMoELayer(config)


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text(
        "hidden_size: 8\nmoe_ffn_hidden_size: 6\nnum_moe_experts: 8\n"
        "moe_aux_loss_coeff: 1e-3  # a string to YAML 1.1\nmoe_router_score_function: sigmoid\n"
        "moe_router_topk_scaling_factor: 2\nbf16: true\nmoe_z_loss_coeff: null\n"
    )
    assert MegaMoEConfig.from_yaml(path) == MegaMoEConfig(
        **BASE,
        moe_aux_loss_coeff=0.001,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2,
        bf16=True,
    )


BAD_YAML = [
    ("num_experts: 8", r"unknown option 'num_experts'; did you mean num_moe_experts"),
    ("xyzzy: 8", r"unknown option 'xyzzy'; see MegaMoEConfig"),
    ("hidden_size: 8", r"missing moe_ffn_hidden_size, num_moe_experts"),
    ("- 8", "must hold a mapping"),
    ("", "must hold a mapping"),
    ("a: [", "not valid YAML"),
    (
        "hidden_size: eight\nmoe_ffn_hidden_size: 6\nnum_moe_experts: 8",
        r"hidden_size is 'eight' \(str\); expected int",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_YAML)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text(text)
    with pytest.raises(errors.ConfigError, match=message):
        MegaMoEConfig.from_yaml(path)


ALL = {"enable_primus_turbo": True, "use_turbo_mega_moe": True, "bf16": True}
GROUP: Any = object()  # explain() asks only whether there is one


def test_replaced_when_all_five_conditions_hold() -> None:
    config = MegaMoEConfig(**BASE, **ALL)
    assert len(config.conditions(GROUP)) == 5
    assert config.replaces_layer(GROUP)
    assert config.explain(GROUP).startswith("MoE layer replaced")
    assert "NO" not in config.explain(GROUP)


@pytest.mark.parametrize(
    ("change", "group", "failing"),
    [
        ({"enable_primus_turbo": False}, GROUP, "enable_primus_turbo is set"),
        ({"use_turbo_mega_moe": False}, GROUP, "use_turbo_mega_moe is set"),
        ({"tensor_model_parallel_size": 2}, GROUP, "tensor_model_parallel_size is 1"),
        ({"bf16": False}, GROUP, "bf16 is set"),
        ({}, None, "there is an expert-parallel group"),
    ],
)
def test_kept_when_one_condition_fails(change: dict[str, Any], group: Any, failing: str) -> None:
    config = MegaMoEConfig(**(BASE | ALL | change))
    assert not config.replaces_layer(group)
    lines = config.explain(group).splitlines()
    assert lines[0] == "MoE layer kept: 1 of 5 conditions do not hold"
    assert [line.split("NO")[1].strip() for line in lines if "NO" in line] == [failing]


def test_the_group_must_have_the_size_of_the_configuration() -> None:
    config = MegaMoEConfig(**BASE, expert_model_parallel_size=2)
    assert not dist.is_initialized()
    with pytest.raises(errors.ConfigError, match="is 2, but ep_group has 1 ranks"):
        MegaMoELayer(config)
