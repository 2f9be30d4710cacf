"""Problems for the expert stages: the traps by name, the tolerances, and how results are compared.

Inputs are fresh in every session; a failure names the seed, and TEST_SEED repeats it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests import oracle

# Put into the environment so that the ranks' processes, which start later, use the same.
SEED = int(os.environ.setdefault("TEST_SEED", str(int.from_bytes(os.urandom(3), "big"))))

# Largest error allowed, as a share of the largest value of the same tensor. The oracle takes the
# very same (rounded) inputs, so this is the arithmetic alone: a few roundings of rows of a dtype
# with unit roundoff 2^-53, 2^-24, 2^-8, through two products and SwiGLU. Over 40 seeds the worst
# were 1.2e-15, 7.5e-7 and 2.7e-2 (grad topk_weights).
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-6, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Case:
    """One problem. Token counts are per rank and repeat when there are more ranks."""

    name: str
    tokens: tuple[int, ...] = (12, 0, 17, 8)
    experts: int = 8
    hidden: int = 24
    ffn: int = 20
    topk: int = 3
    ids: str = "distinct"
    weights: str = "uniform"
    clamp: float | None = None


CASES = [
    Case("ragged"),
    Case("no-token-anywhere", tokens=(0,)),
    Case("no-token-on-rank-0", tokens=(0, 6)),
    Case("T100", tokens=(100,), topk=2),
    Case("dropped-slots", ids="some-negative"),
    Case("all-dropped", ids="all-negative"),
    Case("idle-experts", ids="two-experts"),
    Case("same-id-in-every-slot", ids="same"),
    Case("counts-0-1-127-129", tokens=(257,), experts=4, topk=1, ids="counts"),
    Case("zero-and-negative-weights", weights="zero-and-negative"),
    Case("one-slot", topk=1),
    Case("odd-sizes", hidden=7, ffn=5),
    Case("clamp", clamp=0.5),
]


def runs(case: Case, dtype: torch.dtype) -> bool:
    """At a clamp the gradient jumps: rows rounded to its other side are not wrong, but differ."""
    return case.clamp is None or dtype == torch.float64


class Problem(NamedTuple):
    """One rank's tokens, and everybody's experts."""

    x: Tensor  # [T, H]
    topk_idx: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K] fp32, or fp64 beside an fp64 x
    dy: Tensor  # [T, H]


def draw_experts(case: Case, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """The weights of all experts: [E, 2I, H] and [E, H, I]."""
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(case.experts, 2 * case.ffn, case.hidden, generator=generator)
    w2 = torch.randn(case.experts, case.hidden, case.ffn, generator=generator)
    return (w1 / case.hidden**0.5).to(dtype), (w2 / case.ffn**0.5).to(dtype)


def draw_tokens(case: Case, dtype: torch.dtype, seed: int, rank: int) -> Problem:
    """The tokens of one rank, with their routing and the gradient of y."""
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    tokens, k = case.tokens[rank % len(case.tokens)], case.topk
    x = torch.randn(tokens, case.hidden, generator=generator)
    dy = torch.randn(tokens, case.hidden, generator=generator)
    weights = torch.rand(tokens, k, generator=generator)
    ids = torch.rand(tokens, case.experts, generator=generator).argsort(1)[:, :k]
    if case.ids == "some-negative":
        ids = ids.where(torch.rand(tokens, k, generator=generator) < 0.6, -1)
        weights = weights.where(ids >= 0, float("nan"))  # a dropped slot's weight is not read
    elif case.ids == "all-negative":
        ids = torch.full_like(ids, -7)
    elif case.ids == "two-experts":
        ids = torch.tensor([1, case.experts - 2])[ids % 2]
    elif case.ids == "same":
        ids = ids[:, :1].expand(tokens, k)
    elif case.ids == "counts":
        ids = torch.tensor([0] + [1] * 127 + [3] * 129).view(-1, 1)
    if case.weights == "zero-and-negative":
        sign = torch.randint(-1, 2, (tokens, k), generator=generator)
        weights = weights * sign
    weights_dtype = torch.promote_types(dtype, torch.float32)
    return Problem(x.to(dtype), ids, weights.to(weights_dtype), dy.to(dtype))


class Result(NamedTuple):
    """What is compared, for one rank's tokens and experts."""

    y: Tensor
    dx: Tensor
    d_topk_weights: Tensor
    dw1: Tensor
    dw2: Tensor


def solve(case: Case, dtype: torch.dtype, seed: int, ranks: int) -> list[Result]:
    """The oracle's answer for each of ``ranks`` ranks."""
    w1, w2 = (w.double().requires_grad_() for w in draw_experts(case, dtype, seed))
    answers, loss = [], torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        x, ids, weights, dy = draw_tokens(case, dtype, seed, rank)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        y = oracle.experts(x, ids, weights, w1, w2, case.clamp)
        loss = loss + (y * dy.double()).sum()
        answers.append((y, x, weights))
    leaves = [leaf for _, x, weights in answers for leaf in (x, weights)]
    *grads, dw1, dw2 = torch.autograd.grad(
        loss + 0 * (w1.sum() + w2.sum()), [*leaves, w1, w2], allow_unused=True
    )
    local = case.experts // ranks
    return [
        Result(
            y.detach(),
            _or_zero(grads[2 * rank], x),
            _or_zero(grads[2 * rank + 1], weights),
            dw1[rank * local : (rank + 1) * local],
            dw2[rank * local : (rank + 1) * local],
        )
        for rank, (y, x, weights) in enumerate(answers)
    ]


def _or_zero(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad


def assert_close(got: Result, want: Result, dtype: torch.dtype, where: str) -> None:
    for name, g, w in zip(Result._fields, got, want, strict=True):
        assert_tensor_close(g, w, TOLERANCE[dtype], f"{name} of {where}, {dtype}")


def assert_tensor_close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if want.numel() == 0:
        return
    largest = want.abs().max().item()
    error = (got.double() - want.double()).abs().max().item()
    assert error <= tolerance * largest, (  # also false for NaN
        f"{what}: off by {error:.3g}, largest value {largest:.3g}, tolerance {tolerance}; "
        f"TEST_SEED={SEED}"
    )


def assert_same_bits(got: Result, want: Result, what: str) -> None:
    for name, g, w in zip(Result._fields, got, want, strict=True):
        assert torch.equal(g, w), f"{name} of {what} differs; TEST_SEED={SEED}"
