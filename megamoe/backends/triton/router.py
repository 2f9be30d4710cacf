"""The router from the logits on, in one kernel each way: scores, grouped top-k, weights, balance.

Forward reads the logits once and writes ids, weights, and per block of tokens the sums that the
balancing loss needs; backward recomputes the scores from the logits. All in fp32. Ties go to the
lower id, so a choice is the same in every run. Nothing waits for the device (torch.bincount does).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["routable", "route", "route_backward"]

_ELEMENTS = 4096  # logits per program
_EPSILON = 1e-20  # as in the plain router: a sum of sigmoids may underflow to 0
_NEVER = tl.constexpr(-float("inf"))
_EPS = tl.constexpr(_EPSILON)


def routable(experts: int, groups: int) -> bool:
    """Whether the kernel takes this router: grouped experts need powers of two."""
    return groups == 1 or (experts & (experts - 1) == 0 and groups & (groups - 1) == 0)


@triton.jit
def _scores(logits, inside, SIGMOID: tl.constexpr):
    """Sigmoid, or softmax over the experts; 0 outside."""
    if SIGMOID:
        return tl.where(inside, tl.sigmoid(logits), 0.0)
    shifted = tl.where(inside, logits, _NEVER)
    exp = tl.where(inside, tl.exp(shifted - tl.max(shifted, 1)[:, None]), 0.0)
    return exp / tl.sum(exp, 1)[:, None]


@triton.jit
def _take(values, column):
    """Return the largest value of each row, its column, and the values without it."""
    best, at = tl.max(values, 1, return_indices=True, return_indices_tie_break_left=True)
    return best, at, tl.where(column == at[:, None], _NEVER, values)


@triton.jit
def _allowed(
    values, column, TOKENS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr, PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Leave the values of the GROUP_TOPK groups whose best PER_GROUP values sum highest."""
    SIZE: tl.constexpr = COLS // GROUPS
    left = values.reshape(TOKENS * GROUPS, SIZE)
    inner = tl.arange(0, SIZE)[None, :]
    total = tl.zeros([TOKENS * GROUPS], tl.float32)
    for _ in tl.static_range(PER_GROUP):
        best, _at, left = _take(left, inner)
        total += best
    groups = total.reshape(TOKENS, GROUPS)
    group = tl.arange(0, GROUPS)[None, :]
    keep = tl.zeros([TOKENS, COLS], tl.int32)
    for _ in tl.static_range(GROUP_TOPK):
        _best, at, groups = _take(groups, group)
        keep += (column // SIZE == at[:, None]).to(tl.int32)
    return tl.where(keep > 0, values, _NEVER)


@triton.jit
def _route(
    logits_ptr, ids_ptr, weights_ptr, sums_ptr, counts_ptr, num_tokens, scaling,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, PRE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, BALANCE: tl.constexpr,
    TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLS)[None, :]
    valid = token < num_tokens
    inside = valid[:, None] & (column < EXPERTS)
    at = token.to(tl.int64)[:, None] * EXPERTS + column
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    scores = _scores(logits, inside, SIGMOID)
    ranked = scores if SIGMOID or PRE else logits
    ranked = tl.where(column < EXPERTS, ranked, _NEVER)

    left = ranked
    if GROUPS > 1:
        left = _allowed(ranked, column, TOKENS, COLS, GROUPS, GROUP_TOPK, TOP_K // GROUP_TOPK)
    # Choice k is kept in column k: COLS >= EXPERTS >= TOP_K. What the others hold is not stored; it
    # is not zeros, because a single column of weights would be turned through shared memory with
    # several threads writing the same word: harmless, but a race to a checker.
    ids = tl.zeros([TOKENS, COLS], tl.int32)
    weights = scores
    total = tl.zeros([TOKENS], tl.float32)
    first = tl.max(left, 1)
    chosen = tl.zeros([TOKENS, COLS], tl.int32)
    for k in tl.static_range(TOP_K):
        best, expert, left = _take(left, column)
        chosen += (column == expert[:, None]).to(tl.int32)
        value = best if SIGMOID or PRE else tl.exp(best - first)
        total += value
        ids = tl.where(column == k, expert[:, None], ids)
        weights = tl.where(column == k, value[:, None], weights)
    if not PRE and not (SIGMOID and TOP_K == 1):
        weights = weights / (total + _EPS)[:, None]
    slot = token.to(tl.int64)[:, None] * TOP_K + column
    kept = valid[:, None] & (column < TOP_K)
    tl.store(ids_ptr + slot, ids.to(tl.int64), kept)
    tl.store(weights_ptr + slot, weights * scaling, kept)

    if BALANCE:
        if GROUPS > 1:  # the loss counts the plain top-k
            left = ranked
            chosen = tl.zeros([TOKENS, COLS], tl.int32)
            for _ in tl.static_range(TOP_K):
                _best, expert, left = _take(left, column)
                chosen += (column == expert[:, None]).to(tl.int32)
        normal = scores
        if SIGMOID:
            normal = scores / (tl.sum(scores, 1)[:, None] + _EPS)
        cols = tl.arange(0, COLS)
        out = block * EXPERTS + cols
        tl.store(sums_ptr + out, tl.sum(tl.where(inside, normal, 0.0), 0), cols < EXPERTS)
        tl.store(counts_ptr + out, tl.sum(tl.where(inside, chosen, 0), 0), cols < EXPERTS)


@triton.jit
def _route_backward(
    logits_ptr, ids_ptr, d_weights_ptr, d_sums_ptr, d_logits_ptr, num_tokens, scaling,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, PRE: tl.constexpr,
    BALANCE: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLS)[None, :]
    valid = token < num_tokens
    inside = valid[:, None] & (column < EXPERTS)
    at = token.to(tl.int64)[:, None] * EXPERTS + column
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    scores = _scores(logits, inside, SIGMOID)

    slot = token.to(tl.int64) * TOP_K
    chosen = tl.zeros([TOKENS, COLS], tl.int32)
    d_chosen = tl.zeros([TOKENS, COLS], tl.float32)  # gradient of the weights, at their experts
    for k in tl.static_range(TOP_K):
        hit = column == tl.load(ids_ptr + slot + k, mask=valid, other=-1)[:, None]
        grad = tl.load(d_weights_ptr + slot + k, mask=valid, other=0.0) * scaling
        chosen += hit.to(tl.int32)
        d_chosen += tl.where(hit, grad[:, None], 0.0)

    d_scores = tl.zeros([TOKENS, COLS], tl.float32)
    d_logits = tl.zeros([TOKENS, COLS], tl.float32)
    if SIGMOID and TOP_K > 1:
        picked = tl.where(chosen > 0, scores, 0.0)
        total = tl.sum(picked, 1)[:, None] + _EPS
        pull = tl.sum(d_chosen * picked, 1)[:, None] / (total * total)
        d_scores += tl.where(chosen > 0, d_chosen / total - pull, 0.0)
    elif SIGMOID or PRE:
        d_scores += d_chosen
    else:
        picked = tl.where(chosen > 0, logits, _NEVER)
        share = tl.where(chosen > 0, tl.exp(picked - tl.max(picked, 1)[:, None]), 0.0)
        share = share / (tl.sum(share, 1)[:, None] + _EPS)
        d_logits += share * (d_chosen - tl.sum(d_chosen * share, 1)[:, None])
    if BALANCE:
        d_sums = tl.load(d_sums_ptr + column, mask=column < EXPERTS, other=0.0)
        if SIGMOID:
            total = tl.sum(scores, 1)[:, None] + _EPS
            d_scores += d_sums / total - tl.sum(d_sums * scores, 1)[:, None] / (total * total)
        else:
            d_scores += d_sums
    if SIGMOID:
        d_logits += d_scores * scores * (1.0 - scores)
    else:
        d_logits += scores * (d_scores - tl.sum(d_scores * scores, 1)[:, None])
    tl.store(d_logits_ptr + at, d_logits, mask=inside)


def route(
    logits: Tensor,  # [T, E] fp32
    top_k: int,
    *,
    sigmoid: bool,
    pre_softmax: bool,
    groups: int,
    group_topk: int,
    scaling: float,
    balance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K], score sums [E], tokens [E] fp32).

    The last two are over all tokens: of the scores normalised over the experts, and of the plain
    top-k; zeros without ``balance``. groups = 1 means no groups.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(tokens, top_k)
    block, cols = _block(experts)
    blocks = triton.cdiv(tokens, block)
    partial = blocks if balance else 0
    sums = logits.new_empty(partial, experts)
    counts = torch.empty(partial, experts, dtype=torch.int32, device=logits.device)
    if tokens:
        _route[(blocks,)](
            logits, ids, weights, sums, counts, tokens, scaling,
            EXPERTS=experts, TOP_K=top_k, SIGMOID=sigmoid, PRE=pre_softmax and not sigmoid,
            GROUPS=groups, GROUP_TOPK=group_topk, BALANCE=balance, TOKENS=block, COLS=cols,
        )  # fmt: skip
    return ids, weights, sums.sum(0), counts.sum(0).to(logits.dtype)


def route_backward(
    d_weights: Tensor,  # [T, K]
    d_sums: Tensor,  # [E]
    logits: Tensor,
    ids: Tensor,
    *,
    sigmoid: bool,
    pre_softmax: bool,
    scaling: float,
    balance: bool,
) -> Tensor:
    """Return the gradient of the logits, [T, E]."""
    tokens, experts = logits.shape
    d_logits = torch.empty_like(logits)
    block, cols = _block(experts)
    if tokens:
        _route_backward[(triton.cdiv(tokens, block),)](
            logits, ids, d_weights, d_sums, d_logits, tokens, scaling,
            EXPERTS=experts, TOP_K=ids.shape[1], SIGMOID=sigmoid, PRE=pre_softmax and not sigmoid,
            BALANCE=balance, TOKENS=block, COLS=cols,
        )  # fmt: skip
    return d_logits


def _block(experts: int) -> tuple[int, int]:
    cols: Any = triton.next_power_of_2(max(experts, 2))
    return max(1, _ELEMENTS // cols // 4), cols
