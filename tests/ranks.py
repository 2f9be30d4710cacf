"""Run a test's function on several gloo ranks, in worker processes that are started once.

Importing torch costs seconds and a process group costs milliseconds, so the workers live for the
whole test session and every call gets a new default process group. A call that fails or hangs ends
its workers; the next call starts new ones.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)
LONGEST_CALL = datetime.timedelta(minutes=4)


class RankError(AssertionError):
    """A rank raised; the message holds the traceback of every rank that did."""


def _serve(rank: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for call in itertools.count(1):
        try:
            function, args, kwargs, world_size, store = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            torch.manual_seed(0)
            result = ("ok", function(*args, **kwargs))
        except BaseException:
            result = ("error", traceback.format_exc())
        connection.send(result)
        if result[0] == "ok":
            dist.destroy_process_group()
        if call % 10 == 0:
            gc.collect()  # a wrapped model is a cycle; its groups' threads poll until it is freed


def _errors(answers: dict[int, tuple[str, Any]]) -> list[str]:
    return [
        f"rank {rank}: {text}" for rank, (kind, text) in sorted(answers.items()) if kind == "error"
    ]


class Ranks:
    """Up to ``most`` gloo ranks; ``run(n, function, ...)`` calls ``function`` on n of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0

    def run(
        self, world_size: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Return what ``function(*args, **kwargs)`` returned on each rank, in rank order.

        The function must be importable (defined at module level) and what it returns picklable.
        Raises RankError where a rank raised, with every traceback.
        """
        if world_size > self.most:
            raise ValueError(f"world_size {world_size} is over the {self.most} ranks of this pool")
        self._start()
        self._calls += 1
        store = Path(self._folder.name, f"store{self._calls}")
        workers = self._workers[:world_size]
        for _, connection in workers:
            connection.send((function, args, kwargs, world_size, str(store)))
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
        # After one rank has failed its peers may wait for it in vain: give them a moment only.
        while waiting and (
            ready := wait(list(waiting), 3 if _errors(answers) else LONGEST_CALL.total_seconds())
        ):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    code = workers[rank][0].exitcode
                    answers[rank] = ("error", f"the process died (exit code {code})")
        for rank in waiting.values():
            answers[rank] = ("error", "no answer in time")
        errors = _errors(answers)
        if errors:
            self.stop()
            raise RankError("\n".join(errors))
        return [answers[rank][1] for rank in range(world_size)]

    def _start(self) -> None:
        if self._workers and all(process.is_alive() for process, _ in self._workers):
            return
        self.stop()  # somebody else may have ended one: not the fault of the next call
        context = multiprocessing.get_context("spawn")
        for rank in range(self.most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self) -> None:
        """End the workers, and what calls have left in them; the next call starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()
