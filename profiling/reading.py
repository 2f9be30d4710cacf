"""One file to the traces in it: decoded, repaired, one for each rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from profiling.columns import LATEST, Columns, Table
from profiling.decoding import NotATraceError, Scan, scan, whole
from profiling.files import CompressionError, open_trace
from profiling.merged import SeveralRanksError, rank_named_in, separate
from profiling.ranges import EMULATED
from profiling.repair import repair
from profiling.trace import Group, Trace

__all__ = ["LoadError", "load_file", "load_trace"]

_COLUMNS = ("start", "end", "name", "category", "lane", "device", "stream", "correlation")
_SIZE = re.compile(r"rank[-_]?\d+-of-(\d+)", re.IGNORECASE)


class LoadError(ValueError):
    """No profile can be made of what the user named. The message is one sentence for them."""


def load_trace(file: str | Path, *, rank: int | None = None) -> Trace:
    """Read one file that holds one rank.

    Raises:
        LoadError: It cannot be read, is not a trace, or holds several ranks.
    """
    traces = load_file(Path(file), rank)
    if len(traces) > 1:
        raise LoadError(f"{file} holds {len(traces)} ranks: load() reads them all")
    return traces[0]


def load_file(
    file: Path, rank: int | None = None, report: Callable[[int], None] = lambda size: None
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
        _trace(file, found, table, named, damaged=damaged, told=rank, ranks=len(parts))
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
    ranks: int,
) -> Trace:
    """Return the trace of one rank.

    Args:
        named: The rank that the events name.
        told: The rank that the user named.
        ranks: How many the file holds. What it says about "the" rank is about the only one.
    """
    alone = ranks == 1
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
    if not alone:
        notes = [f"{note} (of all {ranks} ranks in the file)" for note in notes]
    if EMULATED in str(info.get("backend")):
        notes.append("EMULATED collectives (overlap.emulation): no network was measured")
    if damaged:
        notes.insert(0, "the compressed data are damaged: read up to there")
    elif not found.complete:
        notes.insert(0, "the file is cut off: read up to the cut")
    if found.unread and not damaged:
        notes.append(f"the end of the file is no part of the trace: {found.unread[:40]!r}")
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


def _rank_in(file: Path) -> tuple[int | None, int | None]:
    """Return the rank and the world size that the file's name says, or its directory's."""
    rank = rank_named_in(file.name)
    if rank is None:
        rank = rank_named_in(file.parent.name)
    size = _SIZE.search(file.name)
    return rank, int(size[1]) if size else None
