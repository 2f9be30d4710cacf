"""What the engine does, written down, and collectives that are as late as they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from overlap import collectives
from overlap.bucket import Bucket


class _Logged:
    """An in-flight collective that says when it is waited for."""

    def __init__(self, flight: Any, log: list[str], what: str, landing: Callable[[], None]) -> None:
        self.flight, self.log, self.what, self.landing = flight, log, what, landing
        self.tensors = flight.tensors

    def wait(self) -> None:
        self.flight.wait()
        self.landing()
        self.log.append(f"wait {self.what}")


@contextmanager
def spying() -> Iterator[list[str]]:
    """Log issues and waits: "gather NAME", "wait gather NAME", "reduce NAME", "wait reduce NAME".

    Meanwhile no collective's result appears before it is waited for, and parameters that are stale
    or on their way are NaN wherever this rank does not own them: reading one too early shows.
    """
    log: list[str] = []
    gather, scatter, stepped = collectives.all_gather, collectives.reduce_scatter, Bucket.stepped

    def late_gather(output: Tensor, shard: Tensor, group: Any, what: str) -> Any:
        name = f"gather {what.rpartition(' ')[2]}"
        log.append(name)
        landed = torch.empty_like(output)
        flight = gather(landed, shard.clone(), group, what)
        return _Logged(flight, log, name, lambda: output.copy_(landed))

    def late_scatter(shard: Tensor, source: Tensor, group: Any, what: str) -> Any:
        name = f"reduce {what.rpartition(' ')[2]}"
        log.append(name)
        landed = torch.empty_like(shard)
        flight = scatter(landed, source.clone(), group, what)
        logged = _Logged(flight, log, name, lambda: shard.copy_(landed))
        shard.fill_(torch.nan)
        logged.tensors = (shard, source)
        return logged

    def poisoned_step(bucket: Bucket) -> None:
        stepped(bucket)
        own = bucket.param_shard.clone()
        bucket.params.fill_(torch.nan)
        bucket.param_shard.copy_(own)

    with (
        mock.patch.object(collectives, "all_gather", late_gather),
        mock.patch.object(collectives, "reduce_scatter", late_scatter),
        mock.patch.object(Bucket, "stepped", poisoned_step),
    ):
        yield log


def log_forwards(model: nn.Module, log: list[str]) -> None:
    """Log "enter PATH" when a module's forward starts, after the engine's own pre-hook."""
    for path, module in model.named_modules():
        if path:
            module.register_forward_pre_hook(lambda *_, path=path: log.append(f"enter {path}"))
