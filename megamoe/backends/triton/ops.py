"""The kernels as torch operators, so that torch.compile and fake tensors see shapes, not pointers.

    megamoe::stage1_forward      tables and GEMM1
    megamoe::stage2_forward      SwiGLU, GEMM2, combine
    megamoe::stage2_backward     gathered dy @ W2, SwiGLU backward
    megamoe::rows_to_tokens      d_l1 @ W1, combine
    megamoe::weight_grad         dW1 or dW2
    megamoe::weight_grad_out     the same, written or added to an existing fp32 gradient
    megamoe::slot_values         a value per row, brought back to [T, K]
    megamoe::route               ids, weights and balance sums of router logits; differentiable
    megamoe::route_backward      its gradient

Tables travel as one list, in the order of `RoutingTables`. Operands may have any strides; they are
made dense here, which copies only what is not. Those of the stages have no autograd formula: they
are called from inside the autograd nodes of `megamoe.functions`. All are registered for CUDA, and
for the CPU for Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from megamoe.backends.triton.activation import swiglu, swiglu_backward
from megamoe.backends.triton.combine import combine, gather_rows, slot_values
from megamoe.backends.triton.gemm import rows_by_weight
from megamoe.backends.triton.router import route, route_backward
from megamoe.backends.triton.schedule import grid_for
from megamoe.backends.triton.tables import ROW_ALIGN, RoutingTables, build_tables, max_rows
from megamoe.backends.triton.tuning import Shape, TileConfig, choose
from megamoe.backends.triton.weight_gemm import weight_grad

__all__ = ["ops"]

_LIBRARY = torch.library.Library("megamoe", "DEF")  # the registrations live as long as it does

ops: Any = torch.ops.megamoe


def _op(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the operator's kernel on CUDA and CPU."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        name = schema.split("(", 1)[0]
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, kernel, key)
        return kernel

    return register


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return torch.library.register_fake(f"megamoe::{name}", lib=_LIBRARY)


@_op(
    "stage1_forward(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w1)"
    " -> (Tensor, Tensor, Tensor[])"
)
def _stage1_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tables, row_weight = build_tables(topk_idx.contiguous(), topk_weights.contiguous(), w1.shape[0])
    l1 = _rows_by_weight("fc1", dense(x), dense(w1), tables, gather=True, transposed=True)
    return l1, row_weight, list(tables)


@_fake("stage1_forward")
def _(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w1: Tensor) -> Any:
    experts = w1.shape[0]
    rows = max_rows(topk_idx.shape[0] * topk_idx.shape[1], experts)

    def ints(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    tables = RoutingTables(
        slot_row=ints(*topk_idx.shape),
        row_token=ints(rows),
        counts=ints(experts),
        starts=ints(experts + 1),
        tile_expert=ints(rows // ROW_ALIGN),
    )
    l1 = x.new_empty(rows, w1.shape[1])
    return l1, x.new_empty(rows, dtype=torch.float32), list(tables)


@_op(
    "stage2_forward(Tensor l1, Tensor topk_weights, Tensor w2, Tensor[] tables, float? clamp)"
    " -> Tensor"
)
def _stage2_forward(
    l1: Tensor, topk_weights: Tensor, w2: Tensor, tables: list[Tensor], clamp: float | None
) -> Tensor:
    routing = RoutingTables(*tables)
    act = swiglu(dense(l1), routing.starts, clamp)
    rows = _rows_by_weight("fc2", act, dense(w2), routing, gather=False, transposed=True)
    return combine(rows, routing.slot_row, topk_weights.contiguous())


@_fake("stage2_forward")
def _(
    l1: Tensor, topk_weights: Tensor, w2: Tensor, tables: list[Tensor], clamp: float | None
) -> Tensor:
    return l1.new_empty(topk_weights.shape[0], w2.shape[1])


@_op(
    "stage2_backward(Tensor dy, Tensor l1, Tensor dispatch_weights, Tensor w2, Tensor[] tables,"
    " float? clamp) -> (Tensor, Tensor, Tensor)"
)
def _stage2_backward(
    dy: Tensor,
    l1: Tensor,
    dispatch_weights: Tensor,
    w2: Tensor,
    tables: list[Tensor],
    clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad l1, grad dispatch_weights, dispatch weight * act)."""
    routing = RoutingTables(*tables)
    d_act = _rows_by_weight("d_act", dense(dy), dense(w2), routing, gather=True, transposed=False)
    d_l1, d_weights = swiglu_backward(
        d_act, dense(l1), dispatch_weights.contiguous(), routing.row_token, routing.starts, clamp
    )
    return d_l1, d_weights, d_act


@_fake("stage2_backward")
def _(
    dy: Tensor,
    l1: Tensor,
    dispatch_weights: Tensor,
    w2: Tensor,
    tables: list[Tensor],
    clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = l1.shape
    return (
        l1.new_empty(rows, width),
        dispatch_weights.new_empty(rows),
        l1.new_empty(rows, width // 2),
    )


@_op("rows_to_tokens(Tensor d_l1, Tensor w1, Tensor[] tables) -> Tensor")
def _rows_to_tokens(d_l1: Tensor, w1: Tensor, tables: list[Tensor]) -> Tensor:
    routing = RoutingTables(*tables)
    rows = _rows_by_weight("d_x", dense(d_l1), dense(w1), routing, gather=False, transposed=False)
    return combine(rows, routing.slot_row, None)


@_fake("rows_to_tokens")
def _(d_l1: Tensor, w1: Tensor, tables: list[Tensor]) -> Tensor:
    return d_l1.new_empty(RoutingTables(*tables).slot_row.shape[0], w1.shape[2])


@_op("weight_grad(Tensor tokens, Tensor rows, Tensor[] tables, bool tokens_first) -> Tensor")
def _weight_grad(tokens: Tensor, rows: Tensor, tables: list[Tensor], tokens_first: bool) -> Tensor:
    """Sum tokens[t] outer rows[r] over each expert's rows r, t the row's token; or transposed."""
    return _summed(tokens, rows, tables, tokens_first)


@_fake("weight_grad")
def _(tokens: Tensor, rows: Tensor, tables: list[Tensor], tokens_first: bool) -> Tensor:
    first, second = (tokens, rows) if tokens_first else (rows, tokens)
    experts = RoutingTables(*tables).counts.shape[0]
    return rows.new_empty(experts, first.shape[1], second.shape[1])


@_op(
    "weight_grad_out(Tensor(a!) out, Tensor tokens, Tensor rows, Tensor[] tables,"
    " bool tokens_first, bool add) -> ()"
)
def _weight_grad_out(
    out: Tensor, tokens: Tensor, rows: Tensor, tables: list[Tensor], tokens_first: bool, add: bool
) -> None:
    _summed(tokens, rows, tables, tokens_first, out, add)


@_fake("weight_grad_out")
def _(
    out: Tensor, tokens: Tensor, rows: Tensor, tables: list[Tensor], tokens_first: bool, add: bool
) -> None:
    return None


@_op("slot_values(Tensor values, Tensor slot_row) -> Tensor")
def _slot_values(values: Tensor, slot_row: Tensor) -> Tensor:
    return slot_values(values.contiguous(), slot_row)


@_fake("slot_values")
def _(values: Tensor, slot_row: Tensor) -> Tensor:
    return values.new_empty(slot_row.shape)


@_op(
    "route(Tensor logits, int top_k, bool sigmoid, bool pre_softmax, int groups, int group_topk,"
    " float scaling, bool balance) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _route(
    logits: Tensor,
    top_k: int,
    sigmoid: bool,
    pre_softmax: bool,
    groups: int,
    group_topk: int,
    scaling: float,
    balance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return route(
        logits.contiguous(),
        top_k,
        sigmoid=sigmoid,
        pre_softmax=pre_softmax,
        groups=groups,
        group_topk=group_topk,
        scaling=scaling,
        balance=balance,
    )


@_fake("route")
def _(logits: Tensor, top_k: int, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    return (
        logits.new_empty(tokens, top_k, dtype=torch.int64),
        logits.new_empty(tokens, top_k),
        logits.new_empty(experts),
        logits.new_empty(experts),
    )


@_op(
    "route_backward(Tensor d_weights, Tensor d_sums, Tensor logits, Tensor ids, bool sigmoid,"
    " bool pre_softmax, float scaling, bool balance) -> Tensor"
)
def _route_backward(
    d_weights: Tensor,
    d_sums: Tensor,
    logits: Tensor,
    ids: Tensor,
    sigmoid: bool,
    pre_softmax: bool,
    scaling: float,
    balance: bool,
) -> Tensor:
    return route_backward(
        d_weights.contiguous(),
        d_sums.contiguous(),
        logits.contiguous(),
        ids,
        sigmoid=sigmoid,
        pre_softmax=pre_softmax,
        scaling=scaling,
        balance=balance,
    )


@_fake("route_backward")
def _(d_weights: Tensor, d_sums: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep_for_route_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, sigmoid, pre_softmax, _, _, scaling, balance = inputs
    ctx.save_for_backward(logits, output[0])
    ctx.options = sigmoid, pre_softmax, scaling, balance


def _d_route(
    ctx: Any, d_ids: Tensor, d_weights: Tensor, d_sums: Tensor, d_counts: Tensor
) -> tuple[Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    return ops.route_backward(d_weights, d_sums, logits, ids, *ctx.options), *(None,) * 7


torch.library.register_autograd(
    "megamoe::route", _d_route, setup_context=_keep_for_route_backward, lib=_LIBRARY
)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous from a 16-byte boundary on, which TMA asks for."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _rows_by_weight(
    product: str,
    a: Tensor,
    weight: Tensor,
    tables: RoutingTables,
    *,
    gather: bool,
    transposed: bool,
) -> Tensor:
    experts, n, k = weight.shape
    if not transposed:
        n, k = k, n
    config = _config(product, 0, n, k, experts, tables, a)
    return rows_by_weight(
        a, weight, tables, gather=gather, transposed=transposed, config=config,
        grid=grid_for(a.device),
    )  # fmt: skip


def _summed(
    tokens: Tensor,
    rows: Tensor,
    tables: list[Tensor],
    tokens_first: bool,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    routing = RoutingTables(*tables)
    tokens, rows = dense(tokens), dense(rows)
    if tokens_first:
        product, a, b = "d_w2", tokens, rows
    else:
        product, a, b = "d_w1", rows, gather_rows(tokens, routing)
    experts = routing.counts.shape[0]
    config = _config(product, a.shape[1], b.shape[1], 0, experts, routing, a)
    return weight_grad(
        a, b, routing, gather=tokens_first, config=config, grid=grid_for(a.device), out=out, add=add
    )


def _config(
    product: str, m: int, n: int, k: int, experts: int, tables: RoutingTables, like: Tensor
) -> TileConfig:
    slots = triton.next_power_of_2(max(tables.slot_row.numel(), 1))
    return choose(Shape(product, m, n, k, experts, slots, str(like.dtype)), like.device)
