"""From a path to a `Profile`: which files, which rank each one is."""

from __future__ import annotations

import glob
import re
import zlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from profiling.columns import Columns
from profiling.decoding import NotATraceError, scan
from profiling.files import SUFFIXES, open_trace
from profiling.trace import Profile, Trace

__all__ = ["SUFFIXES", "LoadError", "load", "load_trace"]

_RANK = re.compile(r"rank[-_]?(\d+)(?:-of-(\d+))?", re.IGNORECASE)


class LoadError(ValueError):
    """No profile can be made of what the user named. The message is one sentence for them."""


def load(path: str | Path) -> Profile:
    """Read the traces of one run.

    Args:
        path: A trace (.json, .json.gz), a directory of traces or a glob pattern; one per rank.

    Raises:
        LoadError: There is no trace, one cannot be read, or two claim the same rank.
    """
    traces = [load_trace(file) for file in _files(str(path))]
    if len(traces) > 1:
        _refuse_mixture(traces)
    return Profile(str(path), tuple(sorted(traces, key=lambda trace: trace.rank or 0)))


def load_trace(file: str | Path) -> Trace:
    """Read one file.

    Raises:
        LoadError: It cannot be read, or is not a trace.
    """
    columns = Columns()
    try:
        with closing(open_trace(Path(file))) as stream:
            found = scan(stream, columns.take)
    except NotATraceError as error:
        raise LoadError(f"{file} is not a PyTorch profiler trace: {error}") from None
    except (OSError, zlib.error) as error:
        raise LoadError(f"{file} cannot be read: {error}") from None
    rank, world_size = _rank_in(Path(file).name)
    return columns.trace(str(file), found, rank, world_size)


def _files(path: str) -> list[Path]:
    if Path(path).is_dir():
        found = _traces(Path(path).iterdir())
        if not found:
            raise LoadError(f"{path} holds no trace ({' or '.join(SUFFIXES)})")
    elif Path(path).exists():
        found = [Path(path)]
    else:
        found = _traces(Path(match) for match in glob.glob(path))
        if not found:
            raise LoadError(f"{path} does not exist")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.name.endswith(SUFFIXES) and path.is_file())


def _rank_in(name: str) -> tuple[int | None, int | None]:
    match = _RANK.search(name)
    if match is None:
        return None, None
    return int(match[1]), int(match[2]) if match[2] else None


def _refuse_mixture(traces: list[Trace]) -> None:
    """Raise where the traces are not one per rank of one run."""
    seen: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank is None:
            raise LoadError(
                f"{trace.path} does not say its rank: name it in the file name (rank0...), "
                "or give this file alone"
            )
        if trace.rank in seen:
            raise LoadError(
                f"rank {trace.rank} is in both {seen[trace.rank].path} and {trace.path}: "
                "give the files of one recording (a pattern in quotes works too)"
            )
        seen[trace.rank] = trace
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        raise LoadError(
            f"the traces are of runs with {' and '.join(map(str, sorted(sizes)))} ranks: "
            "give the files of one recording"
        )
