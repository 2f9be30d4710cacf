"""The MoE layer as a loop over tokens: float64, one process, the definition and nothing else.

It shares no code with megamoe. Differentiable, so autograd gives its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def experts(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    clamp: float | None = None,
) -> Tensor:
    """y [T, H] in float64 for all experts' w1 [E, 2I, H] and w2 [E, H, I]."""
    x, topk_weights, w1, w2 = (t.double() for t in (x, topk_weights, w1, w2))
    rows = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[t])
        for k in range(topk_idx.shape[1]):
            expert = int(topk_idx[t, k])
            if expert < 0:
                continue
            gate, up = (w1[expert] @ x[t]).chunk(2)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
            y = y + topk_weights[t, k] * (w2[expert] @ (gate / (1 + torch.exp(-gate)) * up))
        rows.append(y)
    return torch.stack(rows) if rows else x * 0
