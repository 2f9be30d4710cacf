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
from collections.abc import Hashable, Sequence
from functools import cached_property

from profiling.clocks import Offset, clock_offsets, described
from profiling.intervals import Intervals, tail, total
from profiling.ranges import is_dense
from profiling.subjects import RankFacts, Subject
from profiling.trace import Group

__all__ = ["Transfers"]

AGES = 10  # times any later wait and any transfer: a rank that joins so late was not training yet


class Transfers:
    """Knows the transfer of each collective of a profile, and how far the ranks' clocks differ.

    Attributes:
        offsets: Rank -> its clock against the lowest rank's; None where nothing tells.
    """

    def __init__(self, ranks: Sequence[RankFacts]) -> None:
        self._by_key: defaultdict[Hashable, dict[int, Subject]] = defaultdict(dict)
        if any(rank.trace.rank is None for rank in ranks):
            ranks = ()
        for rank in ranks:
            for subject in rank.subjects:
                if len(subject.found.busy):
                    self._by_key[subject.key][rank.trace.rank or 0] = subject
        listed = {rank.trace.rank or 0: rank.trace.groups for rank in ranks}
        self.offsets: dict[int, Offset | None] = clock_offsets(listed, self._by_key.values())
        self._groups = {dense: self._infer(listed, dense) for dense in (False, True)}

    def of(self, subject: Subject) -> tuple[Intervals, bool]:
        """Return when ``subject`` transferred, and whether a peer says so.

        Without a peer in the profile it is all of the time that the collective took.
        """
        busy, group = subject.found.busy, subject.found.group
        rank = subject.rank.trace.rank
        if group is None and rank is not None and subject.collective is not None:
            group = self._groups[is_dense(subject.name)].get(rank)
        peers = self._by_key[subject.key]
        if group is None and subject.found.comms_id is not None:
            group = tuple(peers)
        if group is None:
            return busy, False
        lengths = [total(peers[peer].found.busy) for peer in group if peer in peers]
        if len(lengths) < 2:
            return busy, False
        return tail(busy, min(lengths)), True

    @cached_property
    def joined_late(self) -> int | None:
        """The first recorded iteration, if a rank was far later there than in any other.

        The others waited for it in that iteration's first collective, and its own host then has
        nothing enqueued ahead of the device: neither is how the run goes.
        """
        waited: defaultdict[int, int] = defaultdict(int)
        longest = 0
        for peers in self._by_key.values():
            for subject in peers.values():
                transfer = total(self.of(subject)[0])
                longest = max(longest, transfer)
                if subject.iteration is not None:
                    spent = total(subject.found.busy) - transfer
                    waited[subject.iteration] = max(waited[subject.iteration], spent)
        if len(waited) < 2:
            return None
        first = min(waited)
        usual = max(spent for number, spent in waited.items() if number != first)
        return first if waited[first] > AGES * max(usual, longest) else None

    def _infer(
        self, listed: dict[int, tuple[Group, ...]], dense: bool
    ) -> dict[int, tuple[int, ...]]:
        """Return rank -> the group of its expert (or dense) buckets, for the ranks that are sure.

        Args:
            listed: Rank -> the process groups that it is in.
        """
        occurrences = [
            peers
            for peers in self._by_key.values()
            if all(one.collective and is_dense(one.name) is dense for one in peers.values())
        ]
        fitting = {
            rank: {
                group
                for group in described(groups, dense)
                if len(group) > 1
                and all(self._met(group, rank, peers) for peers in occurrences if rank in peers)
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

    def _met(self, group: tuple[int, ...], rank: int, peers: dict[int, Subject]) -> bool:
        """Return whether ``rank`` may have had this collective with ``group``."""
        size = peers[rank].found.group_size
        if rank not in group or (size is not None and size != len(group)):
            return False
        shown = [peer for peer in group if peer in peers]
        begins = [int(peers[peer].found.busy[0, 0]) - self.ahead(peer) for peer in shown]
        ends = [int(peers[peer].found.busy[-1, 1]) - self.ahead(peer) for peer in shown]
        return max(begins) < min(ends)

    def ahead(self, rank: int | None) -> int:
        """Return by how much to set back a rank's clock: by nothing that may be mere scatter."""
        offset = None if rank is None else self.offsets.get(rank)
        return offset.ns if offset is not None and abs(offset.ns) > offset.scatter_ns else 0
