"""The public stage functions: check the inputs, pick the backend, apply the autograd nodes.

    mega_moe_stage1   dispatch + GEMM1
    mega_moe_stage2   SwiGLU + GEMM2 + combine
    fused_mega_moe    both in one autograd node: the baseline

| tensor | shape | dtype | |
|---|---|---|---|
| x | [T, H] | bf16, fp32 or fp64 | this rank's tokens; T may be 0 and differ by rank |
| topk_idx | [T, K] | int64 | global expert ids; a negative id drops its slot |
| topk_weights | [T, K] | fp32 (or fp64 beside an fp64 x) | routing weights |
| w1 | [g, 2I, H] | as x | g local experts, gate rows then up rows |
| w2 | [g, H, I] | as x | |
| l1_out | [P, 2I] | as x | rows before SwiGLU, expert-major |
| dispatch_weights | [P] | as topk_weights | the routing weight of each row |
| handle | tuple | | the backend's routing tables: opaque |
| y | [T, H] | as x | sum over k of weight * expert output |

Rank r of the group owns the experts r * g ... r * g + g - 1. Every rank of the group must make the
same calls in the same order, and agree on which inputs require a gradient. What is wrong with an
input is raised before this rank issues a collective. Gradients of gradients are refused.
"""

from __future__ import annotations

from torch import Tensor

from megamoe import checks
from megamoe.backends import Group, own_nodes, select_backend
from megamoe.functions import FusedStages, Stage1, Stage2

__all__ = ["fused_mega_moe", "mega_moe_stage1", "mega_moe_stage2"]


def mega_moe_stage1(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    group: Group,
    *,
    num_experts: int | None = None,
    name: str = "",
    backend: str = "reference",
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Send every token to its experts and apply their first weight.

    Args:
        group: The expert-parallel group; None where one rank owns all experts.
        num_experts: The global count, if known: then w1 and the group are checked against it.
        name: What the profiler ranges are labelled with.
        backend: Who computes; see `megamoe.backends.BACKENDS`.

    Returns (l1_out, dispatch_weights, handle) for `mega_moe_stage2`. Keeps x, w1 and the tables
    for the backward, and dispatches x again there.

    Raises InputError, UnknownBackendError.
    """
    checks.check_group(w1, group, num_experts)
    checks.check_routing(x, topk_idx, topk_weights)
    checks.check_w1(x, w1)
    implementation = select_backend(backend, x, w1.shape[2], w1.shape[1] // 2, group)
    implementation.check_stage1(x, topk_idx, w1, group)
    if own := own_nodes(implementation):
        return own.stage1(x, topk_idx, topk_weights, w1, group)
    l1_out, dispatch_weights, *handle = Stage1.apply(
        x, topk_idx, topk_weights, w1, checks.spread(group), name, implementation
    )
    return l1_out, dispatch_weights, tuple(handle)


def mega_moe_stage2(
    l1_out: Tensor,
    dispatch_weights: Tensor,
    handle: tuple[Tensor, ...],
    topk_idx: Tensor,
    topk_weights: Tensor,
    w2: Tensor,
    group: Group,
    *,
    clamp: float | None = None,
    name: str = "",
    backend: str = "reference",
) -> Tensor:
    """Apply the experts' second weight and bring the weighted sum back to the tokens: y.

    The first three arguments are what `mega_moe_stage1` returned, the others what it was given.

    Args:
        clamp: Where given, SwiGLU cuts its gate to at most this, and its up part to +- this.

    The gradient of the routing weights is returned in the slot of dispatch_weights, none in that
    of topk_weights: stage 1 holds the routes back to the tokens.

    Raises InputError, UnknownBackendError.
    """
    checks.check_group(w2, group, None)
    checks.check_rows(l1_out, dispatch_weights, topk_idx, topk_weights)
    checks.check_w2(l1_out, w2)
    implementation = select_backend(backend, l1_out, w2.shape[1], w2.shape[2], group)
    if own := own_nodes(implementation):
        return own.stage2(
            l1_out, dispatch_weights, handle, topk_idx, topk_weights, w2, clamp, group
        )
    return Stage2.apply(
        l1_out,
        dispatch_weights,
        topk_weights,
        w2,
        clamp,
        checks.spread(group),
        name,
        implementation,
        *handle,
    )


def fused_mega_moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    group: Group,
    *,
    num_experts: int | None = None,
    clamp: float | None = None,
    name: str = "",
    backend: str = "reference",
) -> Tensor:
    """Return the y of both stages, bit for bit, from a single autograd node.

    The baseline to compare with: it needs both weights before it starts and yields both weight
    gradients when it ends. Arguments and errors are those of the stages.
    """
    checks.check_group(w1, group, num_experts)
    checks.check_routing(x, topk_idx, topk_weights)
    checks.check_w1(x, w1)
    checks.check_fused_w2(w1, w2)
    implementation = select_backend(backend, x, w1.shape[2], w1.shape[1] // 2, group)
    implementation.check_stage1(x, topk_idx, w1, group)
    if own := own_nodes(implementation):
        return own.fused(x, topk_idx, topk_weights, w1, w2, clamp, group)
    return FusedStages.apply(
        x, topk_idx, topk_weights, w1, w2, clamp, checks.spread(group), name, implementation
    )
