"""From paths to a `Profile`: which files, which rank each one is."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from profiling.columns import LATEST, Columns, Table
from profiling.decoding import NotATraceError, Scan, scan, whole
from profiling.files import SUFFIXES, CompressionError, open_trace
from profiling.merged import SeveralRanksError, rank_named_in, separate
from profiling.repair import repair
from profiling.trace import Group, Profile, Trace

__all__ = ["SUFFIXES", "LoadError", "load", "load_file", "load_trace", "parse_ranks"]

_SIZE = re.compile(r"rank[-_]?\d+-of-(\d+)", re.IGNORECASE)


class LoadError(ValueError):
    """No profile can be made of what the user named. The message is one sentence for them."""


def load(
    path: str | Path | Sequence[str | Path],
    *,
    ranks: Mapping[str, int] | int | None = None,
) -> Profile:
    """Read the traces of one run.

    Args:
        path: A trace (.json, .json.gz, .json.zst), a directory of traces or a glob pattern, or
            several of them. One file holds one rank, or several that it tells apart.
        ranks: The rank of the only file, or file (as named, or its name alone) -> its rank. It
            comes before what the file says.

    Raises:
        LoadError: There is no trace, one cannot be read, two claim the same rank, or ``ranks``
            names a file that is not there.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    files = _files([str(one) for one in paths])
    told = _told(files, ranks)
    traces = [trace for file in files for trace in load_file(file, rank=told.get(file))]
    if len(traces) > 1:
        _refuse_mixture(traces)
    label = " ".join(str(one) for one in paths)
    return Profile(label, tuple(sorted(traces, key=lambda trace: trace.rank or 0)))


def load_trace(file: str | Path, *, rank: int | None = None) -> Trace:
    """Read one file that holds one rank.

    Raises:
        LoadError: It cannot be read, is not a trace, or holds several ranks.
    """
    traces = load_file(Path(file), rank=rank)
    if len(traces) > 1:
        raise LoadError(f"{file} holds {len(traces)} ranks: load() reads them all")
    return traces[0]


def load_file(
    file: Path, *, rank: int | None = None, report: Callable[[int], None] = lambda size: None
) -> list[Trace]:
    """Read one file: one trace for each rank in it.

    Args:
        rank: What the user says that it is.
        report: Called with the number of bytes of the file that were read since the last call.

    Raises:
        LoadError: It cannot be read, is not a trace, holds several ranks that it does not tell
            apart, or several where the user named one.
    """
    columns = Columns()
    try:
        with closing(open_trace(file, report)) as stream:
            found = scan(stream, columns.take)
            damaged = stream.damaged
        parts = separate(repair(columns.table()))
    except NotATraceError as error:
        raise LoadError(f"{file} is not a PyTorch profiler trace: {error}") from None
    except SeveralRanksError as error:
        raise LoadError(
            f"{file} cannot be judged: {error}: give every rank's own file instead"
        ) from None
    except (OSError, CompressionError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from None
    if rank is not None and len(parts) > 1:
        raise LoadError(f"{file} holds {len(parts)} ranks, so it cannot be told to be rank {rank}")
    return [
        _trace(file, found, table, named, damaged=damaged, told=rank, alone=len(parts) == 1)
        for named, table in parts
    ]


def _trace(
    file: Path,
    found: Scan,
    table: Table,
    named: int | None,
    *,
    damaged: bool,
    told: int | None,
    alone: bool,
) -> Trace:
    """Return the trace of one rank.

    Args:
        named: The rank that the events name.
        told: The rank that the user named.
        alone: The file holds no other rank; what it says about "the" rank is about this one.
    """
    columns = table.columns
    base = whole(found.metadata.get("baseTimeNanoseconds"), 0)
    if 0 < base < LATEST * 1000:
        for key in ("start", "end"):
            columns[key] += base
    info = found.metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    own = _not_negative(info.get("rank"))
    by_name, size = _rank_in(file)
    notes = found.dropped.notes + table.dropped.notes
    if damaged:
        notes.insert(0, "the compressed data are damaged: read up to there")
    elif not found.complete:
        notes.insert(0, "the file is cut off: read up to the cut")
    if alone:
        says = next((rank for rank in (own, named, by_name) if rank is not None), None)
        rank = says if told is None else told
        if told is not None and says not in (None, told):
            notes.append(f"taken as rank {told}, though it says that it is rank {says}")
    else:
        rank = named
    return Trace(
        path=str(file),
        rank=rank,
        world_size=_not_negative(info.get("world_size")) or size,
        groups=_groups(info) if alone or rank == own else (),
        **{key: columns[key] for key in _COLUMNS},
        names=table.names,
        lanes=table.lanes,
        thread_names=table.thread_names,
        details=table.details,
        metadata=found.metadata,
        notes=tuple(notes),
        complete=found.complete and not damaged,
    )


_COLUMNS = ("start", "end", "name", "category", "lane", "device", "stream", "correlation")


def _not_negative(value: Any) -> int | None:
    number = whole(value, -1)
    return number if number >= 0 else None


def _groups(info: dict[str, Any]) -> tuple[Group, ...]:
    groups = []
    config = info.get("pg_config")
    for entry in config if isinstance(config, list) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            name, description = str(entry.get("pg_name")), str(entry.get("pg_desc"))
            groups.append(Group(name, description, tuple(ranks)))
    return tuple(groups)


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


def _rank_in(file: Path) -> tuple[int | None, int | None]:
    """Return the rank and the world size that the file's name says, or its directory's."""
    rank = rank_named_in(file.name)
    if rank is None:
        rank = rank_named_in(file.parent.name)
    size = _SIZE.search(file.name)
    return rank, int(size[1]) if size else None


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


def parse_ranks(texts: Sequence[str]) -> Mapping[str, int] | int | None:
    """Return what ``--rank N`` or a repeated ``--rank FILE=N`` says, as `load` takes it.

    Raises:
        LoadError: A text is of neither form, or they do not go together.
    """
    told: dict[str, int] = {}
    for text in texts:
        file, _, number = text.rpartition("=")
        if not (number.isascii() and number.isdecimal()):
            raise LoadError(f"--rank {text} is neither a rank (3) nor FILE=RANK (a.json=3)")
        if file in told and told[file] != int(number):
            raise LoadError(f"--rank {text} comes after --rank {file or told[file]}: give one")
        told[file] = int(number)
    if "" in told and len(told) > 1:
        raise LoadError(f"--rank {told['']} names no file, beside ones that do: say FILE=RANK")
    return told.get("", told or None)


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
