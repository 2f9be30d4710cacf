"""The bounds against their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.emulation.bounds import exposed_backward, exposed_forward

TIMES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8
)  # whole numbers, so that sums are exact


@given(TIMES)
def test_depth_one(times: list[tuple[int, int]]) -> None:
    gathers, compute = zip(*times, strict=True)
    hidden = [max(0, gathers[j + 1] - compute[j]) for j in range(len(times) - 1)]
    assert exposed_forward(gathers, compute, 1) == gathers[0] + sum(hidden)


@given(TIMES)
def test_unlimited_depth(times: list[tuple[int, int]]) -> None:
    gathers, compute = zip(*times, strict=True)
    late = [sum(gathers[: j + 1]) - sum(compute[:j]) for j in range(len(times))]
    assert exposed_forward(gathers, compute, len(times)) == max(0, *late)


@given(TIMES)
def test_depth_zero_hides_nothing(times: list[tuple[int, int]]) -> None:
    gathers, compute = zip(*times, strict=True)
    assert exposed_forward(gathers, compute, 0) == sum(gathers)


@given(TIMES, st.integers(0, 50))
def test_backward(times: list[tuple[int, int]], rest: int) -> None:
    compute, reduces = zip(*times, strict=True)
    ready = [sum(compute[: j + 1]) for j in range(len(times))]
    backward = ready[-1] + rest
    latest = max(ready[j] + sum(reduces[j:]) for j in range(len(times)))
    assert exposed_backward(ready, reduces, backward) == max(0, latest - backward)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="1 gathers and 2 spans"):
        exposed_forward([1], [1, 2], 1)
    with pytest.raises(ValueError, match="1 buckets and 2 reductions"):
        exposed_backward([1], [1, 2], 1)
