"""Routing in Megatron's terms and in ours: our router behind Megatron's contract, and back.

Megatron's router returns two [T, E] tensors (probabilities and a boolean map); the stages want K
ids and K weights per token.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import apply_random_logits
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megamoe.megatron.options import MegaMoEOptions, layer_config
from megamoe.router import route

__all__ = ["FusedTopKRouter", "chosen", "without_forced_balancing"]


class FusedTopKRouter(TopKRouter):
    """Megatron's TopKRouter (its weight, its logits, its loss bookkeeping) with our selection.

    forward keeps Megatron's contract; with ``dense=False`` it returns what the stages need, with no
    [T, E] tensor in between. Scores are computed in fp32 where moe_router_dtype is not set. With a
    padding mask Megatron's own routing runs: only that leaves tokens out of the balancing loss.
    """

    def __init__(self, *, config: Any, options: MegaMoEOptions, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._layer_config = layer_config(config, options)

    def forward(
        self, input: Tensor, padding_mask: Tensor | None = None, *, dense: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return (probs [T, E], routing_map [T, E] bool) for hidden states [S, B, H].

        Not ``dense``: (weights [T, K], ids [T, K] int64). Either way the balancing loss is attached
        to the first.
        """
        if padding_mask is not None:
            probs, routing_map = super().forward(input, padding_mask)
            return (probs, routing_map) if dense else chosen(probs, routing_map, self.topk)
        weights, topk_idx = self._choose(input)
        if not dense:
            return weights, topk_idx
        probs = weights.new_zeros(topk_idx.shape[0], self.config.num_moe_experts)
        routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, topk_idx, True)
        return probs.scatter(1, topk_idx, weights), routing_map

    def _choose(self, input: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gating(input)
        if logits.dtype is torch.bfloat16:
            logits = logits.float()
        if self.config.moe_router_force_load_balancing:
            logits = apply_random_logits(logits)
        topk_idx, weights, aux_loss = route(logits.flatten(0, 1), self._layer_config)
        coeff = self.get_aux_loss_coeff("aux_loss")
        if coeff and self.training and torch.is_grad_enabled():
            weights = self.attach_and_log_load_balancing_loss(
                weights, coeff, aux_loss, "load_balancing_loss", self.tp_cp_group
            )
        return weights, topk_idx


def chosen(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return (weights [T, K], ids [T, K] ascending) for Megatron's (probs [T, E], map [T, E])."""
    experts = routing_map.shape[1]
    # Every key differs, so that top-k is the same in every run, whatever the device does with ties.
    keys = torch.arange(experts, 0, -1, dtype=torch.int32, device=probs.device)
    topk_idx = (routing_map * keys).topk(topk, dim=1).indices
    return probs.gather(1, topk_idx), topk_idx


def without_forced_balancing(config: Any) -> Any:
    """Return a configuration for a router whose choice is replaced afterwards."""
    config = copy.copy(config)
    config.moe_router_force_load_balancing = False
    return config
