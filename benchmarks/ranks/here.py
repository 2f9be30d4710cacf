"""A rank of a benchmark: its device, the time it has, clocks that start together, and its notes."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.shared_memory import shared_memory

__all__ = ["Here"]


@dataclass
class Here:
    """This rank.

    Attributes:
        toy: Sizes are those of a test on CPUs.
        notes: Where rank 0 writes what it finds, one JSON object a line.
        deadline: When the part has to be done, by time.monotonic() of rank 0.
    """

    rank: int
    world: int
    device: torch.device
    toy: bool
    out: Path
    notes: Path
    deadline: float

    def peer_memory(self) -> AbstractContextManager[None]:
        """What copy-engine transports need to be made; on CPUs a stand-in."""
        return nullcontext() if self.cuda else shared_memory()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def note(self, **facts: Any) -> None:
        """Keep facts for the results file."""
        if self.rank == 0:
            with self.notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")

    @property
    def shares_gpus(self) -> bool:
        """Whether there are more ranks than GPUs: gloo then, and no reading of a peer's memory."""
        return self.cuda and dist.get_backend() == "gloo"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Let the ranks' streams (and on a CPU the ranks) start what follows together."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def seconds_left(self) -> float:
        """The same number on every rank; a collective."""
        left = torch.tensor([self.deadline - time.monotonic()], device=self.device)
        dist.broadcast(left, 0)
        return float(left)

    def all_of(self, flag: bool) -> bool:
        """Whether it holds on every rank; a collective."""
        value = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return bool(value.item())

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; a collective."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def slowest(self, times: Sequence[float]) -> list[float]:
        """Each the largest on any rank; a collective."""
        values = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return [float(value) for value in values.tolist()]

    def medians(
        self, variants: Mapping[str, Callable[[], object]], rounds: int, ahead_ms: float = 2.0
    ) -> dict[str, float]:
        """Return each variant's median time in ms, that of the slowest rank.

        The variants take turns, every round in another order (the same on all ranks), and the
        ranks begin each together.

        Args:
            ahead_ms: About how long the host may take to enqueue one without the device waiting.
        """
        marks: dict[str, list[Callable[[], float]]] = {name: [] for name in variants}
        shuffled = random.Random(0)
        for index in range(rounds + 1):
            for name, run in shuffled.sample(sorted(variants.items()), len(variants)):
                elapsed = self._timed(run, ahead_ms)
                if index:  # the first round warms up
                    marks[name].append(elapsed)
        self.synchronize()
        mine = [statistics.median(e() for e in elapsed) for elapsed in marks.values()]
        return dict(zip(marks, self.slowest(mine), strict=True))

    def _timed(self, run: Callable[[], object], ahead_ms: float) -> Callable[[], float]:
        self.barrier()
        if not self.cuda:
            start = time.perf_counter()
            run()
            ms = (time.perf_counter() - start) * 1e3
            return lambda: ms
        torch.cuda._sleep(int(ahead_ms * 2e6))  # cycles, in which the host gets ahead
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        return lambda: begin.elapsed_time(end)
