"""The reference backend on one GPU, with torch's grouped product where the shapes allow it."""

from __future__ import annotations

import pytest
import torch

from megamoe import fused_mega_moe
from megamoe.backends import products
from tests.megamoe_cases import (
    CASES,
    SEED,
    TOLERANCE,
    Case,
    Problem,
    assert_close,
    assert_same_bits,
    draw_experts,
    draw_tokens,
    runs,
    solve,
)
from tests.test_megamoe_stages import run, staged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ALIGNED = Case("aligned", tokens=(200,), hidden=64, ffn=32)
ALIGNED_IDLE = Case("aligned-idle", tokens=(200,), hidden=64, ffn=32, ids="two-experts")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [*CASES, ALIGNED, ALIGNED_IDLE], ids=lambda case: case.name)
def test_against_the_oracle(case: Case, dtype: torch.dtype) -> None:
    if not runs(case, dtype):
        pytest.skip("a clamp is compared in float64")
    problem = Problem(*(t.cuda() for t in draw_tokens(case, dtype, SEED, 0)))
    w1, w2 = (w.cuda() for w in draw_experts(case, dtype, SEED))
    split = run(staged, case, problem, w1, w2)
    fused = run(fused_mega_moe, case, problem, w1, w2)
    assert_same_bits(fused, split, "the fused node")
    on_cpu = type(split)(*(t.cpu() for t in split))
    assert_close(on_cpu, solve(case, dtype, SEED, 1)[0], dtype, case.name)


def test_the_grouped_product_is_used_where_it_can_be() -> None:
    if products._grouped_mm is None or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no grouped product on this device")
    rows = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    assert products._takes_grouped(rows, 64, 32)
    assert not products._takes_grouped(rows, 64, 20)
    assert not products._takes_grouped(rows.float(), 64, 32)
    assert not products._takes_grouped(rows[:0], 64, 32)
