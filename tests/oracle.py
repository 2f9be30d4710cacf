"""The MoE layer as loops over tokens: float64, one process, the definition and nothing else.

It shares no code with megamoe. Everything is differentiable, so autograd gives its gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def swiglu(l1: Tensor, clamp: float | None = None) -> Tensor:
    """One row [2I] -> [I]: gate first, then up."""
    half = l1.shape[0] // 2
    gate, up = l1[:half], l1[half:]
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return gate / (1 + torch.exp(-gate)) * up


def experts(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    clamp: float | None = None,
) -> Tensor:
    """y [T, H] in float64; w1 [E, 2I, H] and w2 [E, H, I] are the weights of all experts."""
    x, topk_weights, w1, w2 = (t.double() for t in (x, topk_weights, w1, w2))
    rows = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[t])
        for k in range(topk_idx.shape[1]):
            expert = int(topk_idx[t, k])
            if expert >= 0:
                out = w2[expert] @ swiglu(w1[expert] @ x[t], clamp)
                y = y + topk_weights[t, k] * out
        rows.append(y)
    return torch.stack(rows) if rows else x * 1.0


def _best(values: list[float], count: int) -> list[int]:
    """The indices of the ``count`` largest values, largest first."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def route(
    logits: Tensor,
    k: int,
    *,
    score_function: str,
    pre_softmax: bool = False,
    groups: int | None = None,
    group_topk: int | None = None,
    scaling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids [T, K], weights [T, K]) of float64 logits [T, E], token by token."""
    all_ids, all_weights = [], []
    for row in logits:
        if score_function == "sigmoid":
            scores = 1 / (1 + torch.exp(-row))
        elif pre_softmax:
            scores = torch.exp(row) / torch.exp(row).sum()
        else:
            scores = row
        values = scores.tolist()
        if groups is not None and group_topk is not None:
            size = len(values) // groups
            members = [values[g * size : (g + 1) * size] for g in range(groups)]
            totals = [sum(sorted(m, reverse=True)[: k // group_topk]) for m in members]
            allowed = _best(totals, group_topk)
            values = [v if i // size in allowed else -math.inf for i, v in enumerate(values)]
        ids = _best(values, k)
        weights = scores[ids]
        if score_function == "sigmoid" and k > 1:
            weights = weights / weights.sum()
        if score_function == "softmax" and not pre_softmax:
            weights = torch.exp(weights) / torch.exp(weights).sum()
        all_ids.append(torch.tensor(ids))
        all_weights.append(weights * (1.0 if scaling is None else scaling))
    return torch.stack(all_ids), torch.stack(all_weights)


def aux_loss(logits: Tensor, k: int, coeff: float, score_function: str) -> Tensor:
    """coeff * E / (K T^2) * sum_e (sum_t score[t, e]) * tokens_e, on the plain top-k."""
    tokens, experts_ = logits.shape
    scores = 1 / (1 + torch.exp(-logits)) if score_function == "sigmoid" else torch.exp(logits)
    scores = scores / scores.sum(1, keepdim=True)
    total = logits.new_zeros(())
    for e in range(experts_):
        routed = sum(e in _best(scores[t].tolist(), k) for t in range(tokens))
        total = total + scores[:, e].sum() * routed
    return coeff * experts_ / (k * tokens**2) * total
