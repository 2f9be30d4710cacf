"""The layer that takes MoELayer's place: Megatron's router, shared expert and contract around the
two-stage experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megamoe.backends import get_backend, select_backend
from megamoe.checks import spread
from megamoe.errors import ConfigError, UnsupportedFeatureError
from megamoe.megatron.compat import mtp_flag
from megamoe.megatron.experts import MegatronExperts
from megamoe.megatron.options import MegaMoEOptions, require_supported
from megamoe.megatron.router import FusedTopKRouter, chosen, without_forced_balancing
from megamoe.router import deal_evenly

__all__ = ["MegaMoEMegatronLayer"]


class MegaMoEMegatronLayer(BaseMoELayer):
    """MoELayer's constructor and forward contract over `MegatronExperts`.

    Of ``submodules`` the router and the shared experts are built, the experts are ours. Parameters
    are named ``router.weight``, ``experts.fc1_weight.weight``, ``experts.fc2_weight.weight`` and
    ``shared_experts...``; distributed checkpoints use MoELayer's keys. Recomputation of "moe" and
    "shared_experts" is MoELayer's; "moe_act" is what the stages always do.

    Args:
        config: A TransformerConfig.
        submodules: MoELayer's; None for TopKRouter and no shared expert.
        layer_number: From 1; may follow by `set_layer_number`.
        pg_collection: Megatron's process groups; by default those of parallel_state.
        is_mtp_layer, name: Taken as MoELayer takes them.
        options: See `MegaMoEOptions`.

    Raises UnsupportedFeatureError, ExpertBiasError, ConfigError.
    """

    def __init__(
        self,
        config: Any,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        options: MegaMoEOptions | None = None,
    ) -> None:
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        options = options or MegaMoEOptions()
        require_supported(config, options, pg_collection)
        super().__init__(
            config=config,
            layer_number=layer_number,
            pg_collection=pg_collection,
            **mtp_flag(is_mtp_layer),
        )
        self.submodules = submodules
        self.options = options
        self.tp_group = pg_collection.tp
        self.topk = config.moe_router_topk
        forced = config.moe_router_force_load_balancing
        self.deals_evenly = forced and options.force_load_balancing_type == "even"
        self.router = self._router_builder()(
            config=without_forced_balancing(config) if self.deals_evenly else config,
            pg_collection=pg_collection,
            **mtp_flag(is_mtp_layer, router=True),
        )
        self.experts = MegatronExperts(config, pg_collection, options)
        if self.use_shared_expert:
            build = getattr(submodules, "shared_experts", None)
            if build is None:
                raise ConfigError(
                    "moe_shared_expert_intermediate_size is "
                    f"{config.moe_shared_expert_intermediate_size}, but the layer's submodules "
                    "have no shared_experts: take the spec from Megatron's spec builders"
                )
            self.shared_experts = build(
                config=config, pg_collection=pg_collection, gate=config.moe_shared_expert_gate
            )
        recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.moe_layer_recompute = "moe" in recomputed and config.cuda_graph_impl != "local"
        self.shared_experts_recompute = "shared_experts" in recomputed

    def _router_builder(self) -> Any:
        given = getattr(self.submodules, "router", TopKRouter)
        if self.options.router == "megatron":
            return given
        if given is not TopKRouter:
            raise ConfigError(
                f"router='fused' replaces TopKRouter, but the layer's submodules have {given!r}: "
                "choose router='megatron' to keep it"
            )
        return partial(FusedTopKRouter, options=self.options)

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return (output [S, B, H], None) for hidden states [S, B, H].

        Args:
            intermediate_tensors: MoELayer's door to partial CUDA graphs; refused.
            padding_mask: [B, S] bool, as Megatron hands it on to the router: it keeps padding out
                of the router's losses.

        Raises UnsupportedFeatureError.
        """
        if intermediate_tensors is not None:
            raise UnsupportedFeatureError(
                "intermediate_tensors (a CUDA graph of a part of the layer) is not supported: "
                "capture the whole layer"
            )
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            output = tensor_parallel.checkpoint(self._forward, False, hidden_states, padding_mask)
        else:
            output = self._forward(hidden_states, padding_mask)
        return output, None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared = self._shared(hidden_states)
        weights, topk_idx = self._choose(hidden_states, padding_mask)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
            self._require_capturable(tokens)
        if tokens.dtype != torch.float64:
            weights = weights.float()  # the stages weigh in fp32, whatever the router computes in
        output = self.experts(tokens, topk_idx, weights).view_as(hidden_states)
        return output if shared is None else output + shared

    def _require_capturable(self, tokens: Tensor) -> None:
        ffn, group = self.config.moe_ffn_hidden_size, spread(self.ep_group)
        backend = select_backend(self.options.backend, tokens, tokens.shape[1], ffn, group)
        if backend is get_backend("reference"):
            raise UnsupportedFeatureError(
                "backend 'reference' waits for the device in every forward and cannot be captured "
                "in a CUDA graph: use backend 'triton'"
            )

    def _choose(self, hidden_states: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (weights [T, K], ids [T, K] int64)."""
        # Through the module's call: the gather of the router's weight hangs on its pre-hook.
        if isinstance(self.router, FusedTopKRouter):
            weights, topk_idx = self.router(hidden_states, padding_mask, dense=False)
        else:
            probs, routing_map = self.router(hidden_states, padding_mask)
            weights, topk_idx = chosen(probs, routing_map, self.topk)
        if self.deals_evenly:
            topk_idx = deal_evenly(topk_idx, self.config.num_moe_experts)
        return weights, topk_idx

    def _shared(self, hidden_states: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        if self.shared_experts_recompute and self.training:
            return tensor_parallel.checkpoint(self.shared_experts, False, hidden_states)
        return self.shared_experts(hidden_states)

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Compute delayed weight gradients: the shared expert's; the stages delay none."""
        if routed_experts:
            self.experts.backward_dw()
        if shared_experts and self.shared_experts is not None:
            self.shared_experts.backward_dw()
