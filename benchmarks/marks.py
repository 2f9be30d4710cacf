"""When the parts of a training step begin and end, and how much memory they take."""

from __future__ import annotations

import math
import time
from typing import Any

import torch


class Marks:
    """Four moments of each step: its begin, before and after the optimizer's part, its end. At each
    the time, what memory is taken, and the most that was taken since the one before."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._set: list[tuple[Any, float, float]] = []

    def set(self) -> None:
        if not self._on_gpu:
            self._set.append((time.perf_counter(), math.nan, math.nan))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._set.append((event, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()

    def steps(self) -> list[tuple[float, float, float, float]]:
        """Return of each step its ms, those of the optimizer, the peak of the allocated memory in
        GiB, and that of forward and backward over what was allocated at its begin."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found = []
        for begin, before, after, end in zip(*[iter(self._set)] * 4, strict=True):
            peak = max(most for _, _, most in (before, after, end))
            found.append(
                (
                    self._ms(begin, end),
                    self._ms(before, after),
                    peak / 2**30,
                    (before[2] - begin[1]) / 2**30,
                )
            )
        return found

    def _ms(self, first: Any, last: Any) -> float:
        if self._on_gpu:
            return float(first[0].elapsed_time(last[0]))
        return float(last[0] - first[0]) * 1e3
