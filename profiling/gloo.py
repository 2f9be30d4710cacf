"""Which of gloo's ranges is which call: on a CPU nothing in the trace links the two.

A call is made on the caller's thread and runs later, on one of the threads of its process group;
a group runs its calls in the order of issue. So a run belongs to a call only if it began after the
call, ended before the call's wait did, is of the same operation and moves tensors of its size.
Mostly this leaves one. Where it leaves several, the order of issue decides - within one process
group. Where it cannot (several groups, or more runs than calls), the match is in doubt and says so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from profiling.ranges import emulated

__all__ = ["OPERATIONS", "Call", "Match", "Run", "match"]

_GATHER = frozenset({"gloo:all_gather", "gloo:_all_gather_base", emulated("all_gather")})
# gloo reduces a whole tensor to scatter it.
_SCATTER = frozenset({"gloo:all_reduce", "gloo:reduce_scatter", emulated("reduce_scatter")})
_REDUCE = frozenset({"gloo:all_reduce", emulated("all_reduce")})
# c10d operator -> the names of the ranges that may be its run.
OPERATIONS: dict[str, frozenset[str]] = {
    "c10d::_allgather_base_": _GATHER,
    "c10d::allgather_": _GATHER,
    "c10d::allgather_into_tensor_coalesced_": _GATHER,
    "c10d::_reduce_scatter_base_": _SCATTER,
    "c10d::reduce_scatter_": _SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": _SCATTER,
    "c10d::allreduce_": _REDUCE,
    "c10d::allreduce_coalesced_": _REDUCE,
}
SLACK = 2_000_000  # ns; a waiter may be back before gloo's thread has noted the end


class Call(NamedTuple):
    """A collective as it was called."""

    start: int
    deadline: int | None  # when the wait for it ended; None if that was not recorded
    operations: frozenset[str]
    sizes: frozenset[int]  # elements of its tensors; empty where shapes were not recorded
    group: str  # calls with different ones are of different process groups; "" if not known


class Run(NamedTuple):
    """A range of gloo."""

    start: int
    end: int
    operation: str
    sizes: frozenset[int]


class Match(NamedTuple):
    """The run of a call: its index, or None; ``doubt`` then says why, or is empty if the recording
    ended before the run did."""

    run: int | None
    doubt: str = ""


def match(calls: Sequence[Call], runs: Sequence[Run]) -> list[Match]:
    """Return the match of each call. Both sequences are sorted by start."""
    starts = [run.start for run in runs]
    candidates: list[list[int]] = []
    for call in calls:
        last = len(runs) if call.deadline is None else bisect_right(starts, call.deadline)
        window = range(bisect_left(starts, call.start), last)
        candidates.append([index for index in window if _fits(call, runs[index])])
    matches: list[Match | None] = [None] * len(calls)
    taken: set[int] = set()
    _take_sure(candidates, matches, taken)
    for members, open_runs in _components(candidates, matches, taken):
        doubt = _doubt([calls[member] for member in members], len(open_runs))
        if doubt:
            for member in members:
                matches[member] = Match(None, doubt)
        else:
            for member, run in zip(members, sorted(open_runs), strict=False):
                matches[member] = Match(run)
    return [
        found if found is not None else Match(None, _missing(call))
        for call, found in zip(calls, matches, strict=True)
    ]


def _fits(call: Call, run: Run) -> bool:
    return (
        run.operation in call.operations
        and (not call.sizes or run.sizes <= call.sizes)
        and (call.deadline is None or run.end <= call.deadline + SLACK)
    )


def _take_sure(candidates: list[list[int]], matches: list[Match | None], taken: set[int]) -> None:
    """Match the calls that only one run fits, until that leaves no other call with one run."""
    changed = True
    while changed:
        changed = False
        for index, fitting in enumerate(candidates):
            if matches[index] is not None:
                continue
            free = [run for run in fitting if run not in taken]
            if len(free) == 1:
                matches[index] = Match(free[0])
                taken.add(free[0])
                changed = True


def _components(
    candidates: list[list[int]], matches: list[Match | None], taken: set[int]
) -> list[tuple[list[int], set[int]]]:
    """Return the open calls that compete for the same runs, with those runs."""
    groups: list[tuple[list[int], set[int]]] = []
    for index, fitting in enumerate(candidates):
        free = {run for run in fitting if run not in taken}
        if matches[index] is not None or not free:
            continue
        members = [index]
        for group in [group for group in groups if group[1] & free]:
            groups.remove(group)
            members, free = group[0] + members, group[1] | free
        groups.append((sorted(members), free))
    return groups


def _doubt(calls: list[Call], runs: int) -> str:
    """Return why the order of issue does not tell which run is which call, if it does not."""
    by_group: defaultdict[str, int] = defaultdict(int)
    for call in calls:
        by_group[call.group] += 1
    if len(by_group) > 1:
        return (
            f"{len(calls)} collectives of {len(by_group)} process groups were in flight at once "
            "and the trace does not tell them apart: record with record_shapes=True"
        )
    if runs > len(calls):
        return f"{runs} gloo ranges fit {len(calls)} calls: record with record_shapes=True"
    return ""


def _missing(call: Call) -> str:
    if call.deadline is None:
        return ""
    return "a collective was issued and waited for, but no gloo range fits it"
