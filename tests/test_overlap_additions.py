"""The sum in the order of ranks: torch's way, and the Triton kernel's (interpreted on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.additions import add_in_order

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ways() -> list[Any]:
    adding_kernel = pytest.importorskip("overlap.adding_kernel")
    return [add_in_order, adding_kernel.launch]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ranks", "rank"), [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3), (8, 5)], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 1 / 3], ids=["sum", "third"])
@pytest.mark.parametrize("way", [0, 1], ids=["add_in_order", "kernel"])
def test_sums_are_those_of_the_definition(
    way: int, ranks: int, rank: int, dtype: torch.dtype, out_dtype: torch.dtype, scale: float
) -> None:
    add: Callable[[Tensor, Tensor, int, Tensor, float], None] = ways()[way]
    numel = 64 * 37  # no multiple of a block
    generator = torch.Generator().manual_seed(ranks * 10 + rank)
    spread = 10.0 ** torch.randint(-4, 5, (ranks, numel), generator=generator)
    terms = (torch.randn(ranks, numel, generator=generator) * spread).to(dtype)
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    total = total * scale
    others = torch.full((ranks - 1, numel + 64), torch.nan, dtype=dtype)
    others[:, :numel] = torch.cat((terms[:rank], terms[rank + 1 :]))
    own = terms[rank].to(DEVICE)
    out = torch.full((numel + 1,), torch.nan, dtype=out_dtype, device=DEVICE)
    add(own, others.to(DEVICE), rank, out[:numel], scale)
    check(out[:numel], total, cuts=way == 1)
    assert out[numel].isnan()
    if dtype is out_dtype:  # in place
        add(own, others.to(DEVICE), rank, own, scale)
        check(own, total, cuts=way == 1)


def check(out: Tensor, total: Tensor, *, cuts: bool) -> None:
    """``cuts``: Triton's interpreter cuts fp32 to bf16 where a GPU rounds."""
    if cuts and out.dtype is torch.bfloat16 and not out.is_cuda:
        torch.testing.assert_close(out.float(), total, rtol=2**-7, atol=0)
    else:
        assert torch.equal(out.cpu(), total.to(out.dtype))
