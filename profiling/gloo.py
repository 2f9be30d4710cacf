"""Which of gloo's ranges is which call: on a CPU nothing in the trace links the two.

A call is made on the caller's thread and runs later, on one of the threads of its process group;
a group runs its calls in the order of issue. So a run belongs to a call only if it began after the
call, ended before the call's wait did, is of the same operation and moves tensors of its size.
Mostly this leaves one. Where it leaves several, the order of issue decides - within one process
group. Where it cannot (several groups, or more runs than calls), the match is in doubt and says so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
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
OVERTAKING = 16  # runs of other groups that may come before a call's own
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
    candidates = _candidates(calls, runs)
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


def _candidates(calls: Sequence[Call], runs: Sequence[Run]) -> list[list[int]]:
    """Return the runs that each call may have.

    Where no wait says by when a call was done, its run is among the next that fit, as many as
    calls before it had none yet and a few more: other groups may overtake.
    """
    starts = [run.start for run in runs]
    begun: defaultdict[frozenset[str], int] = defaultdict(int)  # calls before, by operations
    by_operation: defaultdict[frozenset[str], list[int]] = defaultdict(list)
    for operations in {call.operations for call in calls}:
        by_operation[operations] += [i for i, run in enumerate(runs) if run.operation in operations]
    candidates: list[list[int]] = []
    for call in calls:
        own = by_operation[call.operations]
        first = bisect_left(own, bisect_left(starts, call.start))
        if call.deadline is None:
            last = first + max(0, begun[call.operations] - first) + 1 + OVERTAKING
        else:
            last = bisect_left(own, bisect_right(starts, call.deadline))
        begun[call.operations] += 1
        candidates.append([index for index in own[first:last] if _fits(call, runs[index])])
    return candidates


def _fits(call: Call, run: Run) -> bool:
    return (not call.sizes or run.sizes <= call.sizes) and (
        call.deadline is None or run.end <= call.deadline + SLACK
    )


def _take_sure(candidates: list[list[int]], matches: list[Match | None], taken: set[int]) -> None:
    """Match the calls that only one run fits, until that leaves no other call with one run."""
    free = [set(fitting) for fitting in candidates]
    fitted: defaultdict[int, list[int]] = defaultdict(list)
    for index, fitting in enumerate(candidates):
        for run in fitting:
            fitted[run].append(index)
    sure = deque(index for index, left in enumerate(free) if len(left) == 1)
    while sure:
        index = sure.popleft()
        if not free[index]:
            continue  # another call took it
        run = free[index].pop()
        matches[index] = Match(run)
        taken.add(run)
        for other in fitted[run]:
            if run in free[other]:
                free[other].remove(run)
                if len(free[other]) == 1:
                    sure.append(other)


def _components(
    candidates: list[list[int]], matches: list[Match | None], taken: set[int]
) -> list[tuple[list[int], set[int]]]:
    """Return the open calls that compete for the same runs, with those runs."""
    parent: dict[int, int] = {}

    def root(run: int) -> int:
        while parent.setdefault(run, run) != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    free: dict[int, list[int]] = {}
    for index, fitting in enumerate(candidates):
        left = [run for run in fitting if run not in taken]
        if matches[index] is None and left:
            free[index] = left
            for run in left[1:]:
                parent[root(run)] = root(left[0])
    groups: dict[int, tuple[list[int], set[int]]] = {}
    for index, left in free.items():
        members, open_runs = groups.setdefault(root(left[0]), ([], set()))
        members.append(index)
        open_runs.update(left)
    return list(groups.values())


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
