"""A collective's busy time and a stage's, on a device: from what their ranges launched.

A graph's kernels belong to the range that launched the graph. Where that is no stage's range (a
graph that covers whole layers, an iteration), the stages of its kernels are not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from profiling.attributed import NO_EVENTS, Found
from profiling.classification import Work
from profiling.intervals import Intervals, union
from profiling.launches import Launches
from profiling.ranges import Kind
from profiling.spans import Span
from profiling.trace import Category, Details, Trace

__all__ = ["Device", "by_device"]


def by_device(trace: Trace, events: npt.NDArray[np.int64]) -> dict[int, Intervals]:
    """Return device -> when any of ``events`` ran there."""
    devices = trace.device[events]
    return {
        int(device): union(trace.start[here], trace.end[here])
        for device in np.unique(devices)
        for here in [events[devices == device]]
    }


class Device:
    """Reads a trace with device work, of whose events ``work`` says what they are."""

    def __init__(self, trace: Trace, work: npt.NDArray[np.int8], launches: Launches) -> None:
        self._trace, self._work, self._launches = trace, work, launches
        self._records = _Records(trace)

    def stages(self, runs: Sequence[Span]) -> list[npt.NDArray[np.int64]]:
        """Return the compute kernels that each stage launched, without what another may have."""
        launched = [self._launched(run) for run in runs]
        own = [events[self._work[events] == Work.COMPUTE] for events in launched]
        claims: defaultdict[tuple[Kind, str], list[npt.NDArray[np.int64]]] = defaultdict(list)
        for run, events in zip(runs, own, strict=True):
            claims[run.kind, run.name].append(events)
        each = [np.unique(np.concatenate(parts)) for parts in claims.values()]
        events, stages = np.unique(np.concatenate([*each, NO_EVENTS]), return_counts=True)
        disputed = np.intersect1d(events[stages > 1], self._launches.torn)
        return [np.setdiff1d(events, disputed) for events in own] if len(disputed) else own

    def moved(self, issue: Span) -> Found:
        """Return what a collective kept busy, from what its issue launched."""
        launched = self._launched(issue)
        events = launched[self._work[launched] == Work.COMMUNICATION]
        return self.found(events, self._records.inside(issue)) if len(events) else Found()

    def found(self, events: npt.NDArray[np.int64], records: Iterable[Details] = ()) -> Found:
        """Return what the communication ``events`` say of the one collective that they are.

        Args:
            records: What c10d recorded around their launch; it counts where they say nothing.
        """
        trace = self._trace
        details = [trace.details[event] for event in events.tolist() if event in trace.details]
        details = details or list(records)
        groups = {detail.group_ranks for detail in details}
        sizes = {detail.group_size for detail in details}
        ids = {detail.comms_id for detail in details}
        return Found(
            union(trace.start[events], trace.end[events]),
            int(trace.device[events[0]]),
            groups.pop() if len(groups) == 1 else None,
            sizes.pop() if len(sizes) == 1 else None,
            events=events,
            comms_id=ids.pop() if len(ids) == 1 else None,
        )

    def sent(self, iterations: Sequence[Span]) -> list[dict[int, Intervals] | None]:
        """Return when the communication ran that each iteration launched; None without a launch."""
        launched = [self._launches.anywhere(span.start, span.end) for span in iterations]
        return [
            by_device(self._trace, events[self._work[events] == Work.COMMUNICATION])
            if len(events)
            else None
            for events in launched
        ]

    def unclaimed(
        self, stages: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
        """Return the compute kernels that may be any stage's, and what to say about them.

        They have no launch, or share a correlation with others without a stage of their own.


        Args:
            stages: The kernels of each stage run.
        """
        missing = self._launches.missing
        graphs = self._launches.of_graphs()
        claimed = np.unique(np.concatenate([*stages, NO_EVENTS]))
        loose = np.setdiff1d(graphs[self._work[graphs] == Work.COMPUTE], claimed)
        lost = np.union1d(missing, self._launches.in_company)
        lost = np.setdiff1d(lost[self._work[lost] == Work.COMPUTE], claimed)
        notes = []
        if len(missing):
            notes.append(
                f"{len(missing):,} of {int((self._trace.category >= Category.KERNEL).sum()):,} "
                "device events are unattributed, for no launch of theirs is in the trace: they "
                "count as what they are, but in no stage"
            )
        if len(loose):
            notes.append(
                f"{len(loose):,} kernels were launched by graphs outside of any stage's range: a "
                "graph that covers more than a stage does not tell whose kernels they are"
            )
        return np.union1d(lost, loose), tuple(notes)

    def _launched(self, span: Span) -> npt.NDArray[np.int64]:
        return self._launches.inside(span.lane, span.start, span.end)


class _Records:
    """What c10d recorded about collectives on CPU threads, by thread and time."""

    def __init__(self, trace: Trace) -> None:
        events = np.array(sorted(trace.details), np.int64)
        events = events[trace.category[events] == Category.CPU_OP]
        self._events = events[np.lexsort((trace.start[events], trace.lane[events]))]
        self._lane, self._start = trace.lane[self._events], trace.start[self._events]
        self._details = trace.details

    def inside(self, span: Span) -> list[Details]:
        low, high = np.searchsorted(self._lane, [span.lane, span.lane + 1])
        first, last = low + np.searchsorted(self._start[low:high], [span.start, span.end])
        found = [self._details[event] for event in self._events[first:last].tolist()]
        return [details for details in found if details.collective is not None]
