"""From paths to a `Profile`: which files, which rank each one is."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from profiling.files import SUFFIXES
from profiling.parallel import load_in_parallel
from profiling.reading import LoadError, load_file, load_trace
from profiling.trace import Profile, Trace

__all__ = ["SUFFIXES", "LoadError", "load", "load_trace"]

LEAST = 8 << 20  # bytes; fewer are read sooner than a process starts


def load(
    path: str | Path | Sequence[str | Path],
    *,
    ranks: Mapping[str, int] | int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    jobs: int | None = 1,
) -> Profile:
    """Read the traces of one run.

    Args:
        path: A trace (.json, .json.gz, .json.zst), a directory of traces or a glob pattern, or
            several of them. One file holds one rank, or several that it tells apart.
        ranks: The rank of the only file, or file (as named, or its name alone) -> its rank. It
            comes before what the file says.
        progress: Called now and then with the bytes read so far and the bytes of all files.
        jobs: Processes that read large files side by side; None for one per core. More than one
            are spawned, so that a script needs its ``if __name__ == "__main__"``.

    Raises:
        LoadError: There is no trace, one cannot be read, two claim the same rank, or an argument
            makes no sense.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    files = _files([str(one) for one in paths])
    told = _told(files, ranks)
    traces = [
        trace
        for found in _load(files, [told.get(file) for file in files], progress, jobs)
        for trace in found
    ]
    if len(traces) > 1:
        _refuse_mixture(traces)
    label = " ".join(str(one) for one in paths)
    return Profile(label, tuple(sorted(traces, key=lambda trace: trace.rank or 0)))


def _load(
    files: list[Path],
    ranks: list[int | None],
    progress: Callable[[int, int], None],
    jobs: int | None,
) -> list[list[Trace]]:
    """Return the traces in each file."""
    if jobs is not None and jobs < 1:
        raise LoadError(f"jobs is {jobs}, but must be at least 1")
    total = sum(_size(file) for file in files)
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    processes = min(len(files), jobs or os.cpu_count() or 1)
    if processes > 1 and total >= LEAST:
        return load_in_parallel(files, ranks, processes, report)
    return [load_file(file, rank, report) for file, rank in zip(files, ranks, strict=True)]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # reading it will say why


def _files(paths: list[str]) -> list[Path]:
    """Return the trace files that ``paths`` name, each once."""
    if not paths:
        raise LoadError("no path was given")
    files: dict[Path, None] = {}
    for path in paths:
        try:
            files.update(dict.fromkeys(_files_of(path)))
        except (OSError, ValueError) as error:
            if isinstance(error, LoadError):
                raise
            reason = error.strerror if isinstance(error, OSError) else error
            raise LoadError(f"{path} cannot be read: {reason}") from None
    return list(files)


def _files_of(path: str) -> list[Path]:
    if not path:
        raise LoadError("the path is empty")
    if Path(path).is_dir():
        found = _traces(Path(path).iterdir()) or _traces(Path(path).glob("*/*"))
        if not found:
            raise LoadError(f"{path} holds no trace ({' or '.join(SUFFIXES)})")
    elif Path(path).exists():
        found = [Path(path)]
    else:
        matches = [Path(match) for match in glob.glob(path)]
        found = _traces(matches)
        if matches and not found:
            raise LoadError(f"{path} matches no trace ({' or '.join(SUFFIXES)})")
        if not matches:
            raise LoadError(f"{path} does not exist")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.name.endswith(SUFFIXES) and path.is_file())


def _told(files: list[Path], ranks: Mapping[str, int] | int | None) -> dict[Path, int]:
    """Return the rank of each file whose rank the user says."""
    if ranks is None:
        return {}
    if isinstance(ranks, int):
        if len(files) > 1:
            raise LoadError(
                f"rank {ranks} was given for {len(files)} files: say for which (FILE={ranks})"
            )
        ranks = {str(files[0]): ranks}
    told: dict[Path, int] = {}
    for name, rank in ranks.items():
        meant = [file for file in files if name in (str(file), file.name)]
        meant = meant or [file for file in files if file.resolve() == Path(name).resolve()]
        if len(meant) != 1:
            raise LoadError(
                f"rank {rank} was given for {name}, which is {len(meant)} of the "
                f"{len(files)} files: name one of them"
            )
        if rank < 0:
            raise LoadError(f"rank {rank} was given for {name}, but a rank is at least 0")
        told[meant[0]] = rank
    return told


def _refuse_mixture(traces: list[Trace]) -> None:
    """Raise where the traces are not one per rank of one run."""
    seen: dict[int, Trace] = {}
    for trace in traces:
        if trace.rank is None:
            raise LoadError(
                f"{trace.path} does not say its rank: tell it (FILE=RANK), name it in the file "
                "name (rank0...), or give this file alone"
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
