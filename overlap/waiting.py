"""How long compute stood still for collectives: a clock around the engine's own waits.

A profile says which collective and why; this says how much, in every step, without a profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["WaitClock"]


class WaitClock:
    """Adds up the waits of one rank.

    On a CPU a wait blocks its caller, and the host's clock times it. On a GPU it blocks the stream,
    and a pair of events around it does; they are read when the total is asked for.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._enabled = enabled
        self._on_host = device.type == "cpu"
        self._device = torch.get_device_module(device)
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def around(self, wait: Callable[[], None]) -> None:
        """Run ``wait`` and time it."""
        if not self._enabled:
            wait()
        elif self._on_host:
            start = time.perf_counter()
            wait()
            self._seconds += time.perf_counter() - start
        else:
            before, after = (self._device.Event(enable_timing=True) for _ in range(2))
            before.record()
            wait()
            after.record()
            self._events.append((before, after))

    def take_ms(self) -> float:
        """Return the milliseconds waited since the last call; on a GPU the host waits for them.

        Raises:
            RuntimeError: The clock is off.
        """
        if not self._enabled:
            raise RuntimeError("waits are not measured: set measure_waits where you wrap the model")
        if self._events:
            self._events[-1][1].synchronize()
        total = self._seconds * 1e3
        total += sum(before.elapsed_time(after) for before, after in self._events)
        self._seconds = 0.0
        self._events.clear()
        return total
