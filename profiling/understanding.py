"""From a path to what every command works on: the traces, attributed, and what links them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from profiling.assume import Assumptions
from profiling.attribution import attribute
from profiling.loading import LoadError, load
from profiling.peers import Transfers
from profiling.subjects import RankFacts
from profiling.trace import Profile

__all__ = ["Reading", "read"]


@dataclass(frozen=True, eq=False)
class Reading:
    """A profile, understood.

    Attributes:
        ranks: The ranks that were asked for.
        transfers: What the ranks together say of each collective; of all ranks of the profile.
        notes: What was dropped, repaired, missing or concluded, one sentence each.
    """

    path: str
    ranks: tuple[RankFacts, ...]
    transfers: Transfers
    notes: tuple[str, ...]


def read(
    profile: Profile | str | Path,
    *,
    assumptions: Assumptions | None = None,
    only: Collection[int] | None = None,
) -> Reading:
    """Read and attribute a profile.

    Args:
        profile: What `load` returned, or a path for it.
        assumptions: What the user says about traces without our ranges.
        only: The ranks to judge; all by default. The others still tell how long a transfer was.

    Raises:
        LoadError: The path holds no usable profile, or not the ranks that were asked for.
    """
    loaded = profile if isinstance(profile, Profile) else load(profile)
    ranks = [RankFacts(attribute(trace, assumptions)) for trace in loaded.traces]
    chosen = [rank for rank in ranks if only is None or rank.trace.rank in only]
    if only is not None and len(chosen) < len(set(only)):
        there = ", ".join(trace.label for trace in loaded.traces)
        absent = ", ".join(
            str(rank) for rank in sorted(set(only) - {rank.trace.rank for rank in ranks})
        )
        raise LoadError(f"{loaded.path} has no rank {absent}, only {there}")
    inferred = (f"{rank.trace.label}: {note}" for rank in chosen for note in rank.attribution.notes)
    return Reading(
        loaded.path, tuple(chosen), Transfers(ranks), (*loaded.notes, *inferred, *_absent(loaded))
    )


def _absent(profile: Profile) -> list[str]:
    """Return a note if the run had ranks that the profile has not: a slow one may be among them."""
    there = {trace.rank for trace in profile.traces}
    size = max((trace.world_size or 0 for trace in profile.traces), default=0)
    absent = sum(rank not in there for rank in range(size))
    if None in there or not absent:
        return []
    return [f"{absent} of the run's {size} ranks are not in the profile, and not judged"]
