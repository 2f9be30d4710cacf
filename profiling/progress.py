"""A progress bar for long loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress_bar"]

LEAST = 64 << 20  # bytes of input; fewer are read before anybody wonders


@contextmanager
def progress_bar(stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield what `load` takes as ``progress``: a bar on a terminal, nothing elsewhere.

        with progress_bar() as progress:
            profile = load(path, progress=progress)

    Args:
        stream: Where it goes: standard error if not given.
    """
    out = sys.stderr if stream is None else stream
    bar: tqdm[NoReturn] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            if total < LEAST or not out.isatty():
                return
            from tqdm import tqdm

            bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="reading", file=out, leave=False
            )
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
