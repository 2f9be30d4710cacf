"""Every kernel of the Triton backend, launched once: for programs that watch or only compile it."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.backends.triton import ops, router


def launch_stages(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, dy: Tensor
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
    """Return (y, dx, d_topk_weights), and each weight's gradient beside the fp32 sum of two."""
    l1, row_weight, tables = ops._stage1_forward(x, ids, weights, w1)
    y = ops._stage2_forward(l1, weights, w2, tables, 1.0)
    d_l1, d_row_weight, act = ops._stage2_backward(dy, l1, row_weight, w2, tables, 1.0)
    dx = ops._rows_to_tokens(d_l1, w1, tables)
    d_weights = ops._slot_values(d_row_weight, tables[0])
    gradients = []
    for tokens_first, rows, out in ((True, act, dy), (False, d_l1, x)):
        gradient = ops._weight_grad(out, rows, tables, tokens_first)
        total = torch.empty_like(gradient, dtype=torch.float32)
        for add in (False, True):
            ops._weight_grad_out(total, out, rows, tables, tokens_first, add)
        gradients.append((gradient, total))
    return (y, dx, d_weights), gradients


def launch_router(tokens: int, experts: int, groups: int) -> Tensor:
    """Return the gradient of the logits of a top-2 router."""
    logits = torch.randn(tokens, experts)
    ids, weights, sums, _ = router.route(
        logits, 2, sigmoid=groups > 1, pre_softmax=False, groups=groups, group_topk=min(groups, 2),
        scaling=1.0, balance=True,
    )  # fmt: skip
    return router.route_backward(
        torch.ones_like(weights), torch.ones_like(sums), logits, ids,
        sigmoid=groups > 1, pre_softmax=False, scaling=1.0, balance=True,
    )  # fmt: skip
