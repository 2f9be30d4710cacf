"""Reading several files side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from profiling.reading import LoadError, load_file
from profiling.trace import Trace

__all__ = ["load_in_parallel"]

_POLL = 0.1  # seconds between two looks at how far the processes are
_read: Synchronized[int] | None = None  # in a process: bytes that all of them have read


def load_in_parallel(
    files: Sequence[Path],
    ranks: Sequence[int | None],
    processes: int,
    report: Callable[[int], None],
) -> list[list[Trace]]:
    """Return what `reading.load_file` returns for each file.

    The processes are spawned, for a fork would copy the locks of whatever threads the caller has.

    Raises:
        LoadError: As `reading.load_file`; or a process died.
    """
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    reported = 0
    with ProcessPoolExecutor(processes, context, _begin, (counter,)) as pool:
        try:
            futures = [
                pool.submit(_load, file, rank) for file, rank in zip(files, ranks, strict=True)
            ]
            pending = set(futures)
            while pending:
                done, pending = wait(pending, _POLL, FIRST_EXCEPTION)
                now = counter.value
                report(now - reported)
                reported = now
                for future in done:
                    future.result()  # raises
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise LoadError(
                f"a process that read one of the {len(files)} files died, as when memory runs out: "
                "try again with one job"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(counter: Synchronized[int]) -> None:
    global _read
    _read = counter


def _load(file: Path, rank: int | None) -> list[Trace]:
    return load_file(file, rank, _report)


def _report(size: int) -> None:
    assert _read is not None
    with _read.get_lock():
        _read.value += size
