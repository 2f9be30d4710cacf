"""What our Megatron layer is built with beyond Megatron's configuration, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.nn import functional as F

from megamoe.backends import check_backend
from megamoe.config import MegaMoEConfig
from megamoe.errors import ConfigError, ExpertBiasError, UnsupportedFeatureError
from megamoe.megatron.compat import graph_scopes

__all__ = ["MegaMoEOptions", "layer_config", "require_supported"]

_ROUTERS = ("megatron", "fused")
_BALANCES = ("uniform", "even")


@dataclass(frozen=True, kw_only=True)
class MegaMoEOptions:
    """Options of a `MegaMoEMegatronLayer` that a TransformerConfig has no field for.

    Raises ConfigError, UnknownBackendError.
    """

    backend: str = "auto"
    """Who computes the stages; see `megamoe.backends.BACKENDS`."""

    router: Literal["megatron", "fused"] = "megatron"
    """`megatron` is the router of the layer's spec (TopKRouter) with all its options; `fused` is
    ours, one kernel from the logits on where the backend has it."""

    fused: bool = False
    """Build the unsplit twin, in which nothing can hide: both weights at one call site."""

    force_load_balancing_type: Literal["uniform", "even"] = "uniform"
    """What config.moe_router_force_load_balancing means: random logits as Megatron draws them, or
    ids dealt out as (t K + k) mod E with the router's own weights."""

    def __post_init__(self) -> None:
        check_backend(self.backend)
        for name, value, choices in (
            ("router", self.router, _ROUTERS),
            ("force_load_balancing_type", self.force_load_balancing_type, _BALANCES),
        ):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}; choose one of {list(choices)}")

    @classmethod
    def from_args(cls, args: Any) -> MegaMoEOptions:
        """Take the options from training arguments or a configuration, by their flags' names.

        mega_moe_backend, mega_moe_router, mega_moe_fused, moe_router_force_load_balancing_type;
        what ``args`` does not have, or has as None, keeps its default.
        """
        flags = {
            "backend": "mega_moe_backend",
            "router": "mega_moe_router",
            "fused": "mega_moe_fused",
            "force_load_balancing_type": "moe_router_force_load_balancing_type",
        }
        given = {field: getattr(args, flag, None) for field, flag in flags.items()}
        return cls(**{field: value for field, value in given.items() if value is not None})


def layer_config(config: Any, options: MegaMoEOptions) -> MegaMoEConfig:
    """Return the part of a TransformerConfig that our router follows.

    Raises ConfigError where our router cannot mean the same.
    """
    balancing = config.moe_router_load_balancing_type
    if not isinstance(balancing, str):
        raise UnsupportedFeatureError(
            f"moe_router_load_balancing_type {balancing}: the fused router knows one balancing "
            "loss; router='megatron' has several"
        )
    return MegaMoEConfig(
        hidden_size=config.hidden_size,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        num_moe_experts=config.num_moe_experts,
        moe_router_topk=config.moe_router_topk,
        moe_router_num_groups=config.moe_router_num_groups,
        moe_router_group_topk=config.moe_router_group_topk,
        moe_router_score_function=config.moe_router_score_function,
        moe_router_pre_softmax=config.moe_router_pre_softmax,
        # Megatron takes 0 for "not set".
        moe_router_topk_scaling_factor=config.moe_router_topk_scaling_factor or None,
        moe_router_dtype=config.moe_router_dtype or "fp32",
        moe_router_load_balancing_type=balancing,
        moe_aux_loss_coeff=config.moe_aux_loss_coeff,
        moe_router_enable_expert_bias=config.moe_router_enable_expert_bias,
        moe_z_loss_coeff=config.moe_z_loss_coeff,
        moe_input_jitter_eps=config.moe_input_jitter_eps,
        mega_moe_backend=options.backend,
    )


def require_supported(config: Any, options: MegaMoEOptions, pg_collection: Any) -> None:
    """Raise a named error if a layer with this configuration would not be Megatron's.

    Raises:
        UnsupportedFeatureError: Every option in the way, in one message.
        ExpertBiasError: The fused router was chosen with moe_router_enable_expert_bias.
        ConfigError: The fused router was chosen and the router's options contradict one another.
    """
    expert_tp = getattr(pg_collection, "expt_tp", None)
    sizes = {
        "tensor_model_parallel_size": pg_collection.tp,
        "expert_tensor_parallel_size": expert_tp,
    }
    found = [
        f"{name} {dist.get_world_size(group)} (it must be 1)"
        for name, group in sizes.items()
        if group is not None and dist.get_world_size(group) > 1
    ]
    refused = {
        "gated_linear_unit False or an activation other than silu (the experts are SwiGLU)": not (
            config.gated_linear_unit and config.activation_func is F.silu
        ),
        "glu_linear_offset": bool(getattr(config, "glu_linear_offset", 0)),
        "add_bias_linear (the experts have no bias)": config.add_bias_linear,
        "fp8 or fp4 experts": bool(config.fp8 or getattr(config, "fp4", None)),
        "moe_expert_capacity_factor (no token is dropped)": (
            config.moe_expert_capacity_factor is not None
        ),
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "moe_latent_size": bool(getattr(config, "moe_latent_size", None)),
        "moe_shared_expert_overlap (the stages have no dispatcher to hide it in)": (
            config.moe_shared_expert_overlap
        ),
        "overlap_moe_expert_parallel_comm (it takes MoELayer apart)": (
            getattr(config, "overlap_moe_expert_parallel_comm", False)
        ),
        "delay_wgrad_compute": getattr(config, "delay_wgrad_compute", False),
        "overlap_dispatch_backward_with_experts_wgrad": (
            getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
        ),
        "transformer_impl inference_optimized": (
            getattr(config, "transformer_impl", None) == "inference_optimized"
        ),
    }
    found += [text for text, wrong in refused.items() if wrong]
    scopes = [scope for scope in graph_scopes(config) if scope.startswith("moe_")]
    if scopes and getattr(config, "cuda_graph_impl", "none") != "none":
        found.append(f"CUDA graphs of {', '.join(scopes)} (capture the whole layer instead)")
    if found:
        raise UnsupportedFeatureError(
            f"MegaMoEMegatronLayer does not support {'; '.join(found)}: unset it or keep MoELayer"
        )
    if options.router == "fused":
        _require_fused_router(config, options, pg_collection)


def _require_fused_router(config: Any, options: MegaMoEOptions, pg_collection: Any) -> None:
    remedy = "router='megatron' has it"
    try:
        layer_config(config, options).require_supported()
    except ExpertBiasError as error:
        raise ExpertBiasError(f"{error}; or {remedy}") from None
    except UnsupportedFeatureError as error:
        raise UnsupportedFeatureError(f"{error}: {remedy}") from None
    refused = {
        "context parallelism (its balancing loss counts one rank's tokens)": (
            dist.get_world_size(pg_collection.tp_cp) > 1
        ),
        "moe_enable_routing_replay": getattr(config, "moe_enable_routing_replay", False),
        "moe_router_force_biased": getattr(config, "moe_router_force_biased", None) is not None,
    }
    found = [text for text, wrong in refused.items() if wrong]
    if found:
        raise UnsupportedFeatureError(
            f"the fused router does not support {'; '.join(found)}: {remedy}"
        )
