"""Times of what runs on a GPU, measured side by side."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

__all__ = ["in_turn"]

Name = TypeVar("Name", str, int)


def in_turn(variants: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """Return each variant's median time in ms.

    The variants take turns, every round in another order: a product that follows a light kernel
    runs at a higher clock than one that follows its like (10 % seen), and so does one before which
    the chip rested. The first round warms up and is not counted.
    """
    marks: dict[Name, list[tuple[Any, Any]]] = {}
    shuffled = random.Random(0)
    for index in range(rounds + 1):
        for name, run in shuffled.sample(sorted(variants.items()), len(variants)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            if index:
                marks.setdefault(name, []).append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for name, pairs in marks.items()
    }
