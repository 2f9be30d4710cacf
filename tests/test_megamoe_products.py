"""The pieces below the stages: grouped products, and the sum that brings rows back to tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.backends import products
from megamoe.backends.dispatch import combine, plan_routes
from tests.megamoe_cases import SEED, TOLERANCE, assert_tensor_close

COUNTS = torch.tensor([0, 5, 1, 0, 130, 8, 0])


@pytest.fixture(params=["loop", "grouped"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute; torch's grouped product also runs on the CPU from torch 2.9 or so."""
    if request.param == "grouped":
        try:
            products._grouped_mm(
                torch.zeros(8, 8, dtype=torch.bfloat16),
                torch.zeros(1, 8, 8, dtype=torch.bfloat16),
                offs=torch.tensor([8], dtype=torch.int32),
            )
        except (TypeError, RuntimeError, NotImplementedError):
            pytest.skip("this torch has no grouped product on the CPU")
        monkeypatch.setattr(products, "_takes_grouped", lambda *_: True)
    return request.param


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).bfloat16()


def by_expert(*rows: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.double().split(COUNTS.tolist()) for t in rows), strict=True))


def test_products(path: str) -> None:
    rows, weight = draw(int(COUNTS.sum()), 24), draw(len(COUNTS), 16, 24)
    want = [part @ w.double().T for (part,), w in zip(by_expert(rows), weight, strict=True)]
    got = products.rows_by_weight_t(rows, weight, COUNTS)
    assert_tensor_close(got, torch.cat(want), TOLERANCE[torch.bfloat16], "rows @ weight^T")
    straight = products.rows_by_weight(rows, weight.transpose(1, 2).contiguous(), COUNTS)
    assert_tensor_close(straight, torch.cat(want), TOLERANCE[torch.bfloat16], "rows @ weight")


def test_weight_gradient(path: str) -> None:
    left, right = draw(int(COUNTS.sum()), 24), draw(int(COUNTS.sum()), 16)
    want = torch.stack([a.T @ b for a, b in by_expert(left, right)])
    got = products.weight_grad(left, right, COUNTS)
    assert_tensor_close(got, want, TOLERANCE[torch.bfloat16], "left^T @ right")
    assert got[COUNTS == 0].eq(0).all()


def test_the_combine_rounds_once() -> None:
    """1 + 8 * 2^-9 fits bf16; adding 2^-9 to 1 in bf16, eight times, stays at 1."""
    topk_idx = torch.zeros(1, 9, dtype=torch.int64)
    routes = plan_routes(topk_idx, 1, None)
    returned = torch.tensor([1.0, *[2**-9] * 8, 0.0], dtype=torch.bfloat16)[:, None]
    one_by_one = torch.zeros(1, dtype=torch.bfloat16)
    for row in returned:
        one_by_one += row
    assert one_by_one.item() == 1
    for weights in (None, torch.ones(1, 9)):
        total = combine(returned, routes, weights, torch.float32)
        assert total.dtype == torch.bfloat16
        assert total.item() == 1 + 2**-6
