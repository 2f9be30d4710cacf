"""The same collective on several ranks: who took part, and how long the transfer was.

A collective lasts until its last rank arrives, so on the others it is longer than its transfer by
the time they waited for that one. The transfer is as long as on the rank where it was shortest,
and ends when the collective does. That needs to know who the peers are. The trace says so (NCCL),
or it follows from the process groups that the ranks list, of which all expert buckets use one and
all dense buckets one: in a real group no rank is done before the last has begun, and every rank is
in exactly one. Where that leaves several, the descriptions that our engine gives its groups tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from profiling.attribution import Attribution, Collective
from profiling.intervals import Intervals, tail, total
from profiling.ranges import Kind, is_dense
from profiling.trace import Group

__all__ = ["Transfers"]

_Key = tuple[Kind, str, "int | None", int]


class Transfers:
    """Knows the transfer of each collective of a profile."""

    def __init__(self, ranks: Sequence[Attribution]) -> None:
        self._by_key: defaultdict[_Key, dict[int, Collective]] = defaultdict(dict)
        if any(rank.trace.rank is None for rank in ranks):
            ranks = ()
        for rank in ranks:
            for collective in rank.collectives:
                if len(collective.found.busy):
                    self._by_key[_key(collective)][rank.trace.rank or 0] = collective
        listed = {rank.trace.rank or 0: rank.trace.groups for rank in ranks}
        self._groups = {dense: self._infer(listed, dense) for dense in (False, True)}

    def of(self, rank: int | None, collective: Collective) -> tuple[Intervals, bool]:
        """Return when ``collective`` transferred on ``rank``, and whether a peer says so.

        Without a peer in the profile it is all of the time that the collective took.
        """
        busy = collective.found.busy
        group = collective.found.group
        if group is None and rank is not None:
            group = self._groups[is_dense(collective.issue.name)].get(rank)
        if group is None:
            return busy, False
        peers = self._by_key[_key(collective)]
        lengths = [total(peers[peer].found.busy) for peer in group if peer in peers]
        if len(lengths) < 2:
            return busy, False
        return tail(busy, min(lengths)), True

    def _infer(
        self, listed: dict[int, tuple[Group, ...]], dense: bool
    ) -> dict[int, tuple[int, ...]]:
        """Return rank -> the group of its expert (or dense) buckets, for the ranks that are sure.

        Args:
            listed: Rank -> the process groups that it is in.
        """
        occurrences = [
            peers for (_, name, *_), peers in self._by_key.items() if is_dense(name) is dense
        ]
        word = "dp" if dense else "edp"
        fitting = {
            rank: {
                group
                for group in _described(groups, word)
                if len(group) > 1
                and all(_met(group, rank, peers) for peers in occurrences if rank in peers)
            }
            for rank, groups in listed.items()
        }
        sure: dict[int, tuple[int, ...]] = {}
        while open_ranks := [rank for rank, left in fitting.items() if len(left) == 1]:
            group = fitting.pop(open_ranks[0]).pop()
            sure.update(dict.fromkeys(group, group))
            fitting = {
                rank: {other for other in left if not set(other) & set(group)}
                for rank, left in fitting.items()
                if rank not in group
            }
        return sure


def _described(groups: tuple[Group, ...], word: str) -> set[tuple[int, ...]]:
    """Return the ranks of the groups that our engine's description names; of all, without one."""
    ours = {group.ranks for group in groups if group.description.split("_")[-1] == word}
    return ours or {group.ranks for group in groups}


def _key(collective: Collective) -> _Key:
    issue = collective.issue
    return issue.kind, issue.name, collective.iteration, collective.ordinal


def _met(group: tuple[int, ...], rank: int, peers: dict[int, Collective]) -> bool:
    """Return whether ``rank`` may have had this collective with ``group``."""
    size = peers[rank].found.group_size
    if rank not in group or (size is not None and size != len(group)):
        return False
    busy = [peers[peer].found.busy for peer in group if peer in peers]
    return max(int(rows[0, 0]) for rows in busy) < min(int(rows[-1, 1]) for rows in busy)
