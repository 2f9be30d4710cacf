"""Variants that take turns, by a clock that the variants move."""

from __future__ import annotations

import math

import pytest
import torch

from megamoe.timing import in_turn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return now


def test_medians_of_all_rounds_but_the_first(clock: list[float]) -> None:
    calls: list[str] = []

    def takes(name: str, *times: float) -> None:
        clock[0] += times[calls.count(name)]
        calls.append(name)

    ms = in_turn({"a": lambda: takes("a", 99, 1, 9, 2), "b": lambda: takes("b", 7, 7, 7, 7)}, 3)
    assert ms == {"a": 2, "b": 7}
    assert [sorted(calls[i : i + 2]) for i in range(0, 8, 2)] == [["a", "b"]] * 4


def test_the_tuner_gives_a_tile_that_does_not_fit_no_time(clock: list[float]) -> None:
    triton = pytest.importorskip("triton")
    from megamoe.backends.triton.tune import _times

    def too_large() -> None:
        raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

    def takes(ms: float) -> None:
        clock[0] += ms

    assert _times([lambda: takes(3), too_large, lambda: takes(2)]) == [3, math.inf, 2]
