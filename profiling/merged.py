"""Several ranks in one file: told apart where the file does so, else refused.

Tools that merge the files of several ranks mark them in one of two ways: every event names its
rank in its arguments, or the name of its process does ("Rank 0", "[rank1] python"). Without
either, processes that each launch work, or one that is in the same step twice at once, are several
ranks that nobody can tell apart, and figures over the mixture would be wrong. One rank's own trace
has one such process: its devices are processes of the viewer only, and a data loader's workers
launch nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from profiling.columns import COLLECTIVE, Table
from profiling.ranges import Kind, parse
from profiling.trace import Category

__all__ = ["SeveralRanksError", "rank_named_in", "separate"]

_RANK = re.compile(r"(?:([a-z]+)[-_. ]?)?rank[-_.:=# ]{0,2}(\d{1,7})(?!\d)", re.IGNORECASE)
# A rank inside a node or a model-parallel group is not the rank in the run.
_WITHIN = (
    "local",
    "node",
    "tp",
    "dp",
    "pp",
    "cp",
    "ep",
    "edp",
    "etp",
    "sp",
    "moe",
    "group",
    "role",
)
_STEP = re.compile(r"ProfilerStep#\d+$")
_MIXED = 0.3  # of the launches may share a correlation; with another rank's in the file half do


class SeveralRanksError(ValueError):
    """The file holds several ranks and does not say which event is whose."""


def rank_named_in(text: str) -> int | None:
    """Return the rank that ``text`` names ("rank3", "Rank 3", "global_rank-3"), if it is one."""
    found = {
        int(number)
        for prefix, number in _RANK.findall(text)
        if not prefix.lower().endswith(_WITHIN)
    }
    return found.pop() if len(found) == 1 else None


def separate(table: Table) -> list[tuple[int | None, Table]]:
    """Return the ranks of a file with the events of each; None for one that it does not name.

    Raises:
        SeveralRanksError: They cannot be told apart.
    """
    ranks = table.columns["rank"]
    if (ranks < 0).all():
        named = [_rank_of_process(table, lane.pid) for lane in table.lanes]
        ranks = np.array(named or [-1], np.int64)[table.columns["lane"]]
    present = np.unique(ranks[ranks >= 0]).tolist()
    if len(present) < 2:
        _refuse_mixture(table)
        return [(present[0] if present else None, table)]
    if (ranks < 0).any():
        nobody = int((ranks < 0).argmax())
        raise SeveralRanksError(
            f"it holds ranks {_listed(present)}, but {int((ranks < 0).sum()):,} events are of none "
            f"of them (the first is {table.names[table.columns['name'][nobody]]!r})"
        )
    return [(rank, table.part(ranks == rank)) for rank in present]


def _rank_of_process(table: Table, pid: int | str) -> int:
    names = (str(pid) if isinstance(pid, str) else "", table.process_names.get(pid, ""))
    found = [rank for rank in map(rank_named_in, names) if rank is not None]
    return found[0] if found else -1


def _refuse_mixture(table: Table) -> None:
    """Raise where events of several ranks are in one table."""
    columns = table.columns
    lanes = np.flatnonzero(np.bincount(columns["lane"][_driving(table)]))
    pids = {table.lanes[lane].pid for lane in lanes.tolist()}
    if len(pids) > 1:
        raise SeveralRanksError(
            f"it holds {len(pids)} processes that launch work or call collectives (pids "
            f"{_listed(sorted(map(str, pids)))}) and does not say which rank each is"
        )
    for step in _steps(table):
        events = np.flatnonzero(columns["name"] == step)
        events = events[np.argsort(columns["start"][events], kind="stable")]
        if (columns["start"][events][1:] < columns["end"][events][:-1]).any():
            raise SeveralRanksError(
                f"it is in {table.names[step]!r} twice at once, so it holds several ranks and does "
                "not say which events are whose"
            )
    # On ROCm launches of one rank can share a correlation; CUDA's do not.
    cuda = np.array([name.startswith("cu") for name in table.names] or [False])
    launches = np.flatnonzero(
        (columns["category"] == Category.LAUNCH)
        & (columns["correlation"] > 0)
        & cuda[columns["name"]]
    )
    # A driver call shares its correlation with the runtime call around it, which has another name.
    calls = columns["correlation"][launches].astype(np.int64) * len(table.names)
    calls = np.sort(calls + columns["name"][launches])
    shared = int((calls[1:] == calls[:-1]).sum())
    if shared > _MIXED * len(launches):
        raise SeveralRanksError(
            f"{shared:,} of its {len(launches):,} launches have the correlation of another one, so "
            "it holds several ranks and does not say which events are whose"
        )


def _driving(table: Table) -> npt.NDArray[np.bool_]:
    """Return which events only a rank's own process has, bool [n]."""
    calls = np.array(
        [name.startswith(COLLECTIVE) or name == "record_param_comms" for name in table.names]
        or [False]
    )
    on_cpu = table.columns["category"] <= Category.ANNOTATION
    launches = table.columns["category"] == Category.LAUNCH
    return launches | (on_cpu & calls[table.columns["name"]])


def _steps(table: Table) -> Iterator[int]:
    """Yield the indices of the names of iterations."""
    for index, name in enumerate(table.names):
        label = parse(name)
        if _STEP.match(name) or (label is not None and label.kind is Kind.ITERATION):
            yield index


def _listed(values: list[int] | list[str]) -> str:
    """Return the first few of ``values`` for a message."""
    few = ", ".join(map(str, values[:4]))
    return f"{few}, ... ({len(values)} in all)" if len(values) > 4 else few
