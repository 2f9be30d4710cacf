"""Configurations, layers and models of Megatron-core that several tests build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SOFTMAX = {"moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss"}
DEEPSEEK = {
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
}


def config(ep: int, bf16: bool = False, **options: Any) -> Any:
    """A small TransformerConfig with 8 experts that runs on the CPU."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "moe_ffn_hidden_size": 24,
            "num_moe_experts": 8,
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.02,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": ep,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "bf16": bf16,
            "params_dtype": torch.bfloat16 if bf16 else torch.float32,
            **SOFTMAX,
            **options,
        }
    )


def submodules() -> Any:
    """MoESubmodules of Megatron's own spec builder."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    spec = get_moe_module_spec(use_te=False, num_experts=8)
    return getattr(spec, "submodules", None) or spec.keywords["submodules"]


def both_layers(cfg: Any, **options: Any) -> tuple[Any, Any]:
    """Return (Megatron's MoELayer, ours with the same weights)."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megamoe.megatron import MegaMoEMegatronLayer, MegaMoEOptions

    theirs = MoELayer(cfg, submodules())
    ours = MegaMoEMegatronLayer(
        cfg, submodules(), options=MegaMoEOptions(backend="reference", **options)
    )
    for layer in (theirs, ours):
        layer.set_layer_number(1)
    if theirs.router.expert_bias is not None:
        theirs.router.expert_bias.normal_(std=0.05)
    copy_weights(theirs, ours)
    return theirs, ours


@torch.no_grad()
def copy_weights(theirs: Any, ours: Any) -> None:
    ours.router.load_state_dict(theirs.router.state_dict())
    if ours.shared_experts is not None:
        ours.shared_experts.load_state_dict(theirs.shared_experts.state_dict())
    fc1, fc2 = stacked(theirs, lambda param: param)
    ours.experts.fc1_weight.weight.copy_(fc1)
    ours.experts.fc2_weight.weight.copy_(fc2)


def stacked(theirs: Any, of: Any) -> tuple[Tensor, Tensor]:
    """Return ``of`` each local expert's two weights, stacked as ours are."""
    experts = theirs.experts.local_experts
    return (
        torch.stack([of(expert.linear_fc1.weight) for expert in experts]),
        torch.stack([of(expert.linear_fc2.weight) for expert in experts]),
    )


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    """The gradients of either layer under our names."""
    found = {
        name: param.grad
        for name, param in layer.named_parameters()
        if not name.startswith("experts.")
    }
    if hasattr(layer.experts, "local_experts"):
        fc1, fc2 = stacked(layer, lambda param: param.grad)
    else:
        fc1, fc2 = layer.experts.fc1_weight.weight.grad, layer.experts.fc2_weight.weight.grad
    return {**found, "fc1": fc1, "fc2": fc2}
