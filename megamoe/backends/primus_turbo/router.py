"""The router on Primus-Turbo's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.backends.primus_turbo.limits import device_problem
from megamoe.backends.primus_turbo.package import operations
from megamoe.config import MegaMoEConfig

__all__ = ["fused_router"]


def fused_router(
    logits: Tensor, config: MegaMoEConfig, balance: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return (ids, weights, score sums, tokens per expert), or None where the kernel does not fit.

    It does for fp32 logits on a GPU of its own, expert and group counts that are powers of two (and
    k, if there are groups), and scores that it knows: softmax over all experts, or sigmoid
    normalised over the k chosen.
    """
    k = config.moe_router_topk
    groups = config.moe_router_num_groups or 1
    selected = config.moe_router_group_topk or 1
    if logits.dtype != torch.float32 or device_problem(logits.device) is not None:
        return None
    sizes = (logits.shape[1], groups, selected, k if groups > 1 else 1)
    if any(size & (size - 1) for size in sizes):
        return None
    sigmoid = config.moe_router_score_function == "sigmoid"
    # It normalises a single sigmoid too, to 1; softmax it takes before the top-k.
    if k == 1 if sigmoid else not config.moe_router_pre_softmax:
        return None
    scaling = config.moe_router_topk_scaling_factor
    factor = 1.0 if scaling is None else scaling
    scores, probs, chosen = operations().route(
        logits, k, groups, selected, config.moe_router_score_function, factor
    )
    # Its map says who was chosen, the stages take ids: the k chosen, heaviest first.
    ids = probs.detach().masked_fill(~chosen, float("-inf")).topk(k, dim=1).indices
    plain = chosen
    if groups > 1:  # the loss counts what the plain top-k would choose
        best = scores.detach().topk(k, dim=1).indices
        plain = torch.zeros_like(chosen).scatter(1, best, True)
    return ids, probs.gather(1, ids), scores.sum(0), plain.sum(0)
