"""The router: which experts each token goes to, with which weights, and the balancing loss.

Everything from the logits on is computed in the router's dtype (fp32 or fp64), whatever the model
trains in: logits that tie only after rounding to bf16 must not decide who gets a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megamoe.backends import get_fused_router
from megamoe.config import MegaMoEConfig
from megamoe.weight import init_normal_

__all__ = ["MegaMoERouter", "deal_evenly", "route"]

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class MegaMoERouter(nn.Module):
    """Top-k routing with sigmoid or softmax scores, as the configuration says.

    forward(x [T, H]) returns (topk_idx [T, K] int64, topk_weights [T, K], aux_loss []), weights
    and loss in the router's dtype.

    Raises the errors of `MegaMoEConfig.require_supported`.
    """

    def __init__(
        self,
        config: MegaMoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        config.require_supported()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_moe_experts, config.hidden_size, dtype=dtype, device=device)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_method_std^2) with torch's default CPU generator."""
        init_normal_(self.weight.data, self.config.init_method_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _DTYPES[self.config.moe_router_dtype]
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.to(dtype), self.weight.to(dtype))
            return route(logits, self.config)

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"experts={experts}, hidden={hidden}, topk={self.config.moe_router_topk}"


def route(logits: Tensor, config: MegaMoEConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return (topk_idx [T, K] int64, topk_weights [T, K], aux_loss []) for logits [T, E].

    Weights and loss are in the logits' dtype. One kernel does it all where the backend has one.
    """
    forced = (
        config.moe_router_force_load_balancing_type
        if config.moe_router_force_load_balancing
        else None
    )
    if forced == "uniform":
        # The value is random, the gradient is the logits': the router stays in the graph.
        logits = torch.rand_like(logits) + (logits - logits.detach())
    fused = _fused(logits, config)
    if fused is not None:
        topk_idx, topk_weights, sums, counts = fused
        aux_loss = _scale(logits, config) * (sums * counts).sum()
    else:
        topk_idx, topk_weights = _select(logits, config)
        aux_loss = _aux_loss(logits, config)
    if forced == "even":
        topk_idx = deal_evenly(topk_idx, config.num_moe_experts)
    return topk_idx, topk_weights, aux_loss


def deal_evenly(topk_idx: Tensor, experts: int) -> Tensor:
    """Return ids [T, K] that give every expert the same number of slots: slot t K + k its rest."""
    slots = torch.arange(topk_idx.numel(), device=topk_idx.device)
    return slots.view_as(topk_idx) % experts


def _fused(logits: Tensor, config: MegaMoEConfig) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(ids, weights, score sums, tokens per expert) in one kernel, if the backend has one."""
    router = get_fused_router(config.mega_moe_backend)
    return None if router is None else router(logits, config, _scale(logits, config) != 0)


def _scale(logits: Tensor, config: MegaMoEConfig) -> float:
    """coeff * E / (K T^2); 0 where there is no balancing loss."""
    if config.moe_router_load_balancing_type == "none":
        return 0.0
    tokens, experts = logits.shape
    scale = config.moe_aux_loss_coeff * experts
    return scale / (config.moe_router_topk * max(tokens, 1) ** 2)


def _select(logits: Tensor, config: MegaMoEConfig) -> tuple[Tensor, Tensor]:
    k = config.moe_router_topk
    if config.moe_router_score_function == "sigmoid":
        scores, topk_idx = _topk(torch.sigmoid(logits), config)
        weights = scores / (scores.sum(-1, keepdim=True) + 1e-20) if k > 1 else scores
    elif config.moe_router_pre_softmax:
        weights, topk_idx = _topk(torch.softmax(logits, dim=-1), config)
    else:
        chosen, topk_idx = _topk(logits, config)
        weights = torch.softmax(chosen, dim=-1)
    if config.moe_router_topk_scaling_factor is not None:
        weights = weights * config.moe_router_topk_scaling_factor
    return topk_idx, weights


def _topk(scores: Tensor, config: MegaMoEConfig) -> tuple[Tensor, Tensor]:
    """Return the K best (scores, ids) of each token, from its best groups if grouped."""
    k = config.moe_router_topk
    groups, group_topk = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is not None and group_topk is not None:
        # A group's score is the sum of its best K / group_topk scores.
        grouped = scores.detach().unflatten(1, (groups, -1))
        group_scores = grouped.topk(k // group_topk, dim=-1).values.sum(-1)
        best = group_scores.topk(group_topk, dim=-1).indices
        outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
        outside = outside[:, :, None].expand_as(grouped).flatten(1)
        scores = scores.masked_fill(outside, float("-inf"))
    values, indices = scores.topk(k, dim=-1)
    return values, indices


def _aux_loss(logits: Tensor, config: MegaMoEConfig) -> Tensor:
    """coeff * E / (K T^2) * sum over experts of (sum over tokens of score) * tokens.

    The scores are normalised over all experts, the tokens counted on the plain top-k of the
    scores (no groups, no forced ids): it measures what the router would do by itself.
    """
    scale = _scale(logits, config)
    if scale == 0:
        return logits.new_zeros(())
    if config.moe_router_score_function == "sigmoid":
        scores = torch.sigmoid(logits)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        scores = torch.softmax(logits, dim=-1)
    ids = scores.detach().topk(config.moe_router_topk, dim=-1).indices
    counts = torch.bincount(ids.reshape(-1), minlength=scores.shape[1]).to(scores.dtype)
    return scale * (scores.sum(0) * counts).sum()
