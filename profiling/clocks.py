"""How far the clocks of the ranks differ: a collective ends on all ranks of its group at once.

The first event of a trace, or a collective's start, would align the profilers' or the ranks' own
delays. The end is common, so the difference of two ranks' clocks is the median difference of the
ends over the collectives that they had together. Ranks without a collective in common are linked
through others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from profiling.ranges import is_dense
from profiling.subjects import Subject
from profiling.trace import Group

__all__ = ["Offset", "clock_offsets", "described"]


class Offset(NamedTuple):
    """A rank's clock minus the reference's, in nanoseconds.

    ``scatter_ns`` is the median distance of a single collective's difference from it, and
    ``collectives`` how many there were; both of the link that the rank hangs on.
    """

    ns: int
    scatter_ns: int
    collectives: int


def clock_offsets(
    listed: dict[int, tuple[Group, ...]], matched: Iterable[dict[int, Subject]]
) -> dict[int, Offset | None]:
    """Return rank -> its clock's offset from the lowest rank's; None where nothing links them.

    Args:
        listed: Rank -> the process groups that it is in.
        matched: For each collective, rank -> its occurrence there.
    """
    differences: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for peers in matched:
        ranks = sorted(peers)
        for index, first in enumerate(ranks):
            group = _group(peers[first], listed.get(first, ()))
            if peers[first].found.comms_id is not None:
                group = tuple(ranks)
            for second in ranks[index + 1 :]:
                if group is not None and second in group:
                    differences[first, second].append(_end(peers[second]) - _end(peers[first]))
    offsets: dict[int, Offset | None] = dict.fromkeys(sorted(listed))
    if offsets:
        offsets[min(offsets)] = Offset(0, 0, 0)
    # The link with the most collectives first; each adds a rank.
    links = sorted(differences, key=lambda pair: -len(differences[pair]))
    while True:
        for first, second in links:
            known, other = offsets.get(first), offsets.get(second)
            if (known is None) != (other is None):
                break
        else:
            return offsets
        values = differences[first, second]
        between = round(statistics.median(values))
        scatter = round(statistics.median(abs(value - between) for value in values))
        if known is not None:
            offsets[second] = Offset(known.ns + between, scatter, len(values))
        elif other is not None:
            offsets[first] = Offset(other.ns - between, scatter, len(values))


def _end(subject: Subject) -> int:
    return int(subject.found.busy[-1, 1])


def _group(subject: Subject, listed: Collection[Group]) -> tuple[int, ...] | None:
    """Return the group of a collective where the trace alone says it."""
    if subject.found.group is not None or subject.collective is None:
        return subject.found.group
    word = _word(is_dense(subject.name))
    ours = {group.ranks for group in listed if group.description.split("_")[-1] == word}
    return ours.pop() if len(ours) == 1 else None


def _word(dense: bool) -> str:
    return "dp" if dense else "edp"


def described(groups: Collection[Group], dense: bool) -> set[tuple[int, ...]]:
    """Return the ranks of the groups that our engine's description names; of all, without one."""
    word = _word(dense)
    ours = {group.ranks for group in groups if group.description.split("_")[-1] == word}
    return ours or {group.ranks for group in groups}
