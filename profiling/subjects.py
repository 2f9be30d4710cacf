"""One rank as the figures see it, and the collectives that a rule can ask about.

A `Subject` is a collective that our ranges or the trace's metadata name, or any other communication
kernel: a foreign one has no layer of ours, and is called what the trace calls it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from profiling.attribution import CPU, Attribution, Collective, Found
from profiling.classification import Work
from profiling.intervals import EMPTY, Intervals, union
from profiling.ranges import Kind, is_dense, label
from profiling.spans import iteration_at
from profiling.trace import Category

__all__ = ["Queue", "RankFacts", "Subject"]


Times = npt.NDArray[np.int64]


class Queue(NamedTuple):
    """The compute kernels of a stream, by start; int64 [n] each."""

    starts: Times
    done: Times  # when this kernel and all before it had ended
    launched: Times  # -1 where the trace does not say


class RankFacts:
    """One rank's attribution, with what several figures need of it computed once."""

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.trace = attribution.trace

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Every collective of this rank."""
        return (*_named(self), *_foreign(self))

    @cached_property
    def launched(self) -> npt.NDArray[np.int64]:
        """int64 [n]: when each event of a device was launched; -1 where the trace does not say."""
        trace = self.trace
        calls = trace.of(Category.LAUNCH)
        calls = calls[trace.correlation[calls] >= 0]
        calls = calls[np.argsort(trace.correlation[calls], kind="stable")]  # the first call first
        when = np.full(len(trace), -1, np.int64)
        if len(calls):
            known = trace.correlation[calls]
            work = np.flatnonzero(trace.category >= Category.KERNEL)
            at = np.minimum(np.searchsorted(known, trace.correlation[work]), len(calls) - 1)
            same = known[at] == trace.correlation[work]
            when[work[same]] = trace.start[calls[at[same]]]
        return when

    @cached_property
    def launches(self) -> npt.NDArray[np.int64]:
        """When anything was launched, sorted."""
        return np.sort(self.launched[self.launched >= 0])

    def done(self, device: int, at: int) -> int:
        """Return the compute time of what a device was given by then; on a CPU, of what it did.

        Idle time is left out, so this tells how far the work had come, not how late it was.
        """
        if device not in self._progress:
            self._progress[device] = _Progress(self, device)
        return self._progress[device].at(at)

    @cached_property
    def _progress(self) -> dict[int, _Progress]:
        return {}

    @cached_property
    def communication(self) -> dict[int, Intervals]:
        """Device -> when any collective was busy there."""
        events = np.flatnonzero(self.attribution.work == Work.COMMUNICATION)
        parts: defaultdict[int, list[npt.NDArray[np.int64]]] = defaultdict(list)
        for device in np.unique(self.trace.device[events]).tolist():
            here = events[self.trace.device[events] == device]
            parts[device].append(np.stack((self.trace.start[here], self.trace.end[here]), axis=1))
        for collective in self.attribution.collectives:  # a copy engine's, too
            parts[collective.found.device].append(collective.found.busy)
        joined = {device: np.concatenate(rows) for device, rows in parts.items()}
        return {device: union(rows[:, 0], rows[:, 1]) for device, rows in joined.items()}

    def communication_ends(self, device: int) -> npt.NDArray[np.int64]:
        """Return when the communication events of a device ended, sorted."""
        if device not in self._ends:
            chosen = (self.attribution.work == Work.COMMUNICATION) & (self.trace.device == device)
            self._ends[device] = np.sort(self.trace.end[chosen])
        return self._ends[device]

    @cached_property
    def _ends(self) -> dict[int, npt.NDArray[np.int64]]:
        return {}

    def kernels(self, device: int) -> npt.NDArray[np.int64]:
        """Return a device's compute kernels, by start."""
        work = self.attribution.work
        events = np.flatnonzero((work == Work.COMPUTE) & (self.trace.device == device))
        return events[np.argsort(self.trace.start[events], kind="stable")]

    def queue(self, device: int, stream: int) -> Queue:
        """Return the compute kernels of one stream."""
        if (device, stream) not in self._queues:
            events = self.kernels(device)
            events = events[self.trace.stream[events] == stream]
            self._queues[device, stream] = Queue(
                self.trace.start[events],
                np.maximum.accumulate(self.trace.end[events]),
                self.launched[events],
            )
        return self._queues[device, stream]

    @cached_property
    def _queues(self) -> dict[tuple[int, int], Queue]:
        return {}

    def under(self, when: Intervals) -> dict[tuple[Kind, str], int]:
        """Return how much of ``when`` each stage of each layer was busy in, in nanoseconds."""
        found: defaultdict[tuple[Kind, str], int] = defaultdict(int)
        keys, starts, ends, reach = self._stages
        for begin, end in when.tolist():
            first, last = np.searchsorted(reach, begin, "right"), np.searchsorted(starts, end)
            for row in range(int(first), int(last)):
                length = min(end, int(ends[row])) - max(begin, int(starts[row]))
                if length > 0:
                    found[keys[row]] += length
        return dict(found)

    @cached_property
    def _stages(self) -> tuple[list[tuple[Kind, str]], Times, Times, Times]:
        """The stages' busy intervals by start: whose, start, end, and the last end up to there."""
        parts = [(key, row) for key, busy in self.attribution.stage_busy.items() for row in busy]
        parts.sort(key=lambda part: int(part[1][0]))
        rows = np.array([row for _, row in parts], np.int64).reshape(-1, 2)
        reach = np.maximum.accumulate(rows[:, 1]) if len(rows) else rows[:, 1]
        return [key for key, _ in parts], rows[:, 0], rows[:, 1], reach

    @cached_property
    def compute_streams(self) -> dict[int, tuple[int, ...]]:
        """Device -> the streams on which stages run; without stages, all that compute."""
        stages = [stage.events for stage in self.attribution.stages if len(stage.events)]
        events = (
            np.concatenate(stages)
            if stages
            else np.flatnonzero(self.attribution.work == Work.COMPUTE)
        )
        pairs = np.unique(
            np.stack((self.trace.device[events], self.trace.stream[events]), 1), axis=0
        )
        found: defaultdict[int, list[int]] = defaultdict(list)
        for device, stream in pairs.tolist():
            found[device].append(stream)
        return {device: tuple(streams) for device, streams in found.items()}


class _Progress:
    """How much of a device's compute time lies before an instant, or was launched before it."""

    def __init__(self, rank: RankFacts, device: int) -> None:
        compute = rank.attribution.compute.get(device, EMPTY)
        self._starts, self._lengths = compute[:, 0], compute[:, 1] - compute[:, 0]
        self._before = np.cumsum(self._lengths) - self._lengths
        self._launched: npt.NDArray[np.int64] | None = None
        if device != CPU:
            kernels = rank.kernels(device)
            kernels = kernels[np.argsort(rank.launched[kernels], kind="stable")]
            self._launched = rank.launched[kernels]
            self._ends = np.maximum.accumulate(rank.trace.end[kernels])

    def at(self, instant: int) -> int:
        if self._launched is not None:
            given = int(np.searchsorted(self._launched, instant))
            if not given:
                return 0
            instant = int(self._ends[given - 1])
        row = int(np.searchsorted(self._starts, instant)) - 1
        if row < 0:
            return 0
        return int(self._before[row] + min(self._lengths[row], instant - self._starts[row]))


@dataclass(frozen=True, eq=False)
class Subject:
    """A collective on one rank.

    Attributes:
        key: The same on every rank of its group, and on no other collective of the rank.
        name: What reports call it.
        labels: Layer -> what a rule's pattern may match. The layers are the experts modules whose
            weights it moves; where there is none, the one entry is its own name.
        iteration: Number of the iteration that issued it, or None.
        issued: Start of the range or call that issued it, or None where it is not known.
        collective: What attribution knows; None for a foreign one.
    """

    rank: RankFacts
    key: Hashable
    name: str
    labels: dict[str, tuple[str, ...]]
    iteration: int | None
    issued: int | None
    found: Found
    collective: Collective | None

    @property
    def kind(self) -> Kind | None:
        return None if self.collective is None else self.collective.issue.kind

    @property
    def label(self) -> str:
        """Its label where it is one of ours, else what the trace calls it."""
        return self.name if self.kind is None else label(self.kind, self.name)

    @property
    def inferred(self) -> bool:
        """Whether its name is a conclusion; else it is the one that the run itself gave."""
        return self.collective is not None and self.collective.inferred

    @property
    def modules(self) -> tuple[str, ...]:
        """The weights in its bucket."""
        return tuple(self.name.split(","))


def _named(rank: RankFacts) -> Iterator[Subject]:
    ordinals: defaultdict[str, int] = defaultdict(int)
    for collective in rank.attribution.collectives:
        issue, found = collective.issue, collective.found
        key: Hashable = issue.kind, issue.name, collective.iteration, collective.ordinal
        if found.comms_id is not None:
            key = found.comms_id, ordinals[found.comms_id]
            ordinals[found.comms_id] += 1
        labels: defaultdict[str, list[str]] = defaultdict(list)
        for module in issue.name.split(","):
            labels[_layer_of(module)].append(label(issue.kind, module))
        calls = _calls(rank, found.events)
        yield Subject(
            rank,
            key,
            issue.name,
            {layer: (*own, *calls) for layer, own in labels.items()},
            collective.iteration,
            issue.start,
            found,
            collective,
        )


def _layer_of(module: str) -> str:
    """Return the experts module of a weight; a bucket that is not of one weight is its own."""
    experts, _, weight = module.rpartition(".")
    return module if is_dense(module) or weight.isdecimal() or not experts else experts


def _foreign(rank: RankFacts) -> Iterator[Subject]:
    """Yield the communication kernels that no named collective has, in order of start."""
    trace, attribution = rank.trace, rank.attribution
    taken = [collective.found.events for collective in attribution.collectives]
    left = np.flatnonzero(attribution.work == Work.COMMUNICATION)
    left = left[trace.device[left] != CPU]
    left = np.setdiff1d(left, np.concatenate(taken)) if taken else left
    ordinals: defaultdict[Hashable, int] = defaultdict(int)
    for event in left[np.argsort(trace.start[left], kind="stable")].tolist():
        details = trace.details.get(event)
        group = None if details is None else details.group_ranks
        order: Hashable = group
        if details is not None:
            order = details.comms_id or group or details.group
        calls = _calls(rank, np.array([event]))
        launched = int(rank.launched[event])
        yield Subject(
            rank,
            ("foreign", order, ordinals[order]),
            calls[0],
            {calls[0]: calls},
            None if launched < 0 else iteration_at(attribution.iterations, launched),
            None if launched < 0 else launched,
            Found(
                union(trace.start[[event]], trace.end[[event]]),
                int(trace.device[event]),
                group,
                None if details is None else details.group_size,
                events=np.array([event]),
                comms_id=None if details is None else details.comms_id,
            ),
            None,
        )
        ordinals[order] += 1


def _calls(rank: RankFacts, events: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Return what the trace calls a collective: c10d's word where it is there, then the kernels."""
    trace = rank.trace
    found = [trace.details[event].collective for event in events.tolist() if event in trace.details]
    kernels = [trace.names[trace.name[event]] for event in events.tolist()]
    return tuple(dict.fromkeys([word for word in found if word] + kernels))
