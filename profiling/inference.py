"""Which weight a collective moves, where its range does not say: in a trace that is not ours.

Collectives are told apart by operation, message size and group, which c10d records, and the calls
of one size go through the layers in one order: gathers as forward uses the weights, reductions the
other way round. The user gives the weights' sizes (`assume`). Without them the stages of a gated
layer tell, whose fc1 weight has exactly twice the elements of its fc2 weight.

Nothing is guessed. Iterations whose calls do not fit the number of layers are left out with a note;
where no order fits, or two weights have one size, every collective is in doubt, and says why.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from profiling.assume import Assumptions, Weight
from profiling.attributed import Collective, Found, Source, Stage
from profiling.classification import Work
from profiling.launches import Launches
from profiling.layering import END, START, Window, windows
from profiling.nesting import Outermost
from profiling.ranges import Kind
from profiling.spans import BACKWARD, FORWARD, Span
from profiling.trace import Category, Details, Trace

__all__ = ["Call", "calls", "collectives"]


class Call(NamedTuple):
    """One gather or reduction, as it was called.

    Attributes:
        kind: PARAM_GATHER or GRAD_REDUCE.
        elements: Of the whole message: what a gather leaves, what a reduction starts from.
        start, end, lane: Its call on a CPU thread, in nanoseconds.
        events: int64 indices of what it ran on the device.
        details: What c10d recorded of it.
    """

    kind: Kind
    elements: int
    group_size: int
    start: int
    end: int
    lane: int
    events: npt.NDArray[np.int64]
    details: Details

    @property
    def size(self) -> tuple[int, int]:
        """What tells the calls for one weight from those for another."""
        return self.elements, self.group_size


def calls(trace: Trace, work: npt.NDArray[np.int8], launches: Launches) -> list[Call]:
    """Return the gathers and reductions of which c10d recorded size and group, by start."""
    records = [
        event
        for event, details in trace.details.items()
        if details.collective and trace.category[event] == Category.CPU_OP
    ]
    around = Outermost(trace, np.array(records, np.int64))
    launch, events = launches.pairs()
    communicates = work[events] == Work.COMMUNICATION
    launch, events = launch[communicates], events[communicates]
    rows = around.at(trace.lane[launch], trace.start[launch])
    recorded = (rows >= 0) | ~np.isin(events, events[rows >= 0])
    launch, events, rows = launch[recorded], events[recorded], rows[recorded]
    parts: defaultdict[tuple[int, Details], list[int]] = defaultdict(list)
    for event, call, row in zip(events.tolist(), launch.tolist(), rows.tolist(), strict=True):
        owner = call if row < 0 else int(around.events[row])
        details = trace.details.get(event) or trace.details.get(owner)
        if details is not None:
            parts[owner, details].append(event)
    found = []
    for (owner, details), moved in parts.items():
        message = _message(details)
        if message is not None:
            when = int(trace.start[owner]), int(trace.end[owner]), int(trace.lane[owner])
            found.append(Call(*message, *when, np.array(moved, np.int64), details))
    return sorted(found, key=lambda call: call.start)


def _message(details: Details) -> tuple[Kind, int, int] | None:
    """Return operation, elements and group size of a gather or reduction, or None."""
    name = (details.collective or "").replace("_", "").lower()
    if "reducescatter" in name:
        kind, whole, part = Kind.GRAD_REDUCE, details.in_elements, details.out_elements
    elif "allgather" in name:
        kind, whole, part = Kind.PARAM_GATHER, details.out_elements, details.in_elements
    else:
        return None
    size = details.group_size or len(details.group_ranks or ())
    if not whole or not size or (part and part * size != whole):
        return None
    return kind, whole, size


class _Refused(Exception):
    """The calls do not tell which layer is whose; the message says why."""


def collectives(
    found: Sequence[Call],
    stages: Sequence[Stage],
    iterations: Sequence[Span],
    assumptions: Assumptions | None,
    busy: Callable[[npt.NDArray[np.int64], Iterable[Details]], Found],
) -> tuple[list[Collective], list[str]]:
    """Return the collectives of expert weights by start, and notes on what is left out.

    Args:
        found: The calls of the trace.
        stages: The stages' runs, with their layers.
        assumptions: What the user says; if nothing, the sizes have to tell.
        busy: What the device's events of one collective say about it, and c10d's record of it.
    """
    order = _Order(stages, iterations, assumptions)
    if not order.layers or not found:
        return [], []
    if assumptions is not None:
        weights, source = assumptions.weights, Source.ASSUMED
    else:
        weights, source = _gated(found, order), Source.METADATA
        if not weights:
            return [], [
                "there are stages, but no two sizes of gathers that only the two weights of a "
                "gated layer can have: give the weights in an --assume file"
            ]
    sizes = Counter((weight.elements, weight.group_size) for weight in weights)
    named: list[Collective] = []
    notes: list[str] = []
    for kind in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE):
        for weight in weights:
            size = weight.elements, weight.group_size
            mine = [call for call in found if call.kind is kind and call.size == size]
            if not mine:
                continue
            try:
                if sizes[size] > 1:
                    raise _Refused(
                        f"{sizes[size]} weights have buckets of {size[0]:,} elements over "
                        f"{size[1]} ranks, so a message's size does not tell whose it is"
                    )
                placed, left = order.place(kind, weight.name, mine)
            except _Refused as doubt:
                named += _doubtful(kind, weight.name, mine[0], order.layers, source, str(doubt))
                continue
            named += [
                Collective(
                    Span(kind, f"{layer}.{weight.name}", call.lane, call.start, call.end),
                    iteration,
                    0,
                    None,
                    busy(call.events, [call.details]),
                    source,
                )
                for call, layer, iteration in placed
            ]
            if left:
                notes.append(
                    f"{left} {kind.value} of {weight.name}'s size are in iterations that have not "
                    "one for each layer, and are left out"
                )
    return sorted(named, key=lambda one: one.issue.start), notes


def _doubtful(
    kind: Kind, weight: str, call: Call, layers: Iterable[str], source: Source, doubt: str
) -> Iterator[Collective]:
    """Yield a collective without a time for each layer, so that each layer's row says the doubt."""
    for layer in layers:
        issue = Span(kind, f"{layer}.{weight}", call.lane, call.start, call.end)
        yield Collective(issue, None, 0, None, Found(doubt=doubt), source)


def _gated(found: Sequence[Call], order: _Order) -> tuple[Weight, ...]:
    """Return fc1 and fc2 where just two sizes of gathers fit all layers, one twice the other."""
    gathers = [call for call in found if call.kind is Kind.PARAM_GATHER]
    fitting = []
    for size in {call.size for call in gathers}:
        placed, left = order.split(Kind.PARAM_GATHER, [c for c in gathers if c.size == size])
        if placed and len(placed) > left:
            fitting.append(size)
    pairs = [
        (Weight("fc1_weight", *fc1), Weight("fc2_weight", *fc2))
        for fc1 in fitting
        for fc2 in fitting
        if fc1[0] == 2 * fc2[0] and fc1[1] == fc2[1]
    ]
    return pairs[0] if len(pairs) == 1 else ()


class _Order:
    """The order in which the layers run in each iteration.

    Attributes:
        layers: Their names, in forward order.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        iterations: Sequence[Span],
        assumptions: Assumptions | None,
    ) -> None:
        names = [stage.span.name for stage in stages if stage.span.kind in FORWARD]
        self.layers = assumptions.layers if assumptions else tuple(dict.fromkeys(names))
        self._windows = windows(iterations)
        self._starts: defaultdict[tuple[int | None, str, bool], list[tuple[int, int]]]
        self._starts = defaultdict(list)  # iteration, layer, backward -> microbatch, start
        last: dict[int | None, int] = {}
        for stage in stages:
            if stage.microbatch is not None:
                backward = stage.span.kind in BACKWARD
                self._starts[stage.iteration, stage.span.name, backward].append(
                    (stage.microbatch, stage.span.start)
                )
            last[stage.iteration] = max(stage.span.start, last.get(stage.iteration, START))
        # What is gathered after the last stage of an iteration is for the next one.
        ends = [last.get(window.iteration, window.end) for window in self._windows]
        if iterations:
            self._gather_windows = [
                Window(start, end, window.iteration)
                for start, end, window in zip([START, *ends], ends, self._windows, strict=False)
            ]
        else:
            self._gather_windows = [Window(START, END, None)]

    def split(
        self, kind: Kind, found: Sequence[Call]
    ) -> tuple[list[tuple[Window, list[Call]]], int]:
        """Return the calls of each window that has as many as layers (or as many for each
        microbatch), and how many windows with calls do not."""
        parts, left = [], 0
        gather = kind is Kind.PARAM_GATHER
        starts = [call.start for call in found]
        for window in self._gather_windows if gather else self._windows:
            inside = found[bisect_left(starts, window.start) : bisect_left(starts, window.end)]
            fits = len(inside) in {
                len(self.layers),
                len(self.layers) * self._microbatches(window.iteration),
            }
            if inside and fits:
                parts.append((window, list(inside)))
            left += bool(inside) and not fits
        return parts, left

    def place(
        self, kind: Kind, weight: str, found: Sequence[Call]
    ) -> tuple[list[tuple[Call, str, int | None]], int]:
        """Return each call with its layer and iteration, and how many calls were left out.

        Raises:
            _Refused: Most iterations do not fit, or a call comes when its layer cannot need it.
        """
        parts, odd = self.split(kind, found)
        if odd >= len(parts):
            raise _Refused(
                f"the {len(found)} {kind.value} of {weight}'s size are not one for each of the "
                f"{len(self.layers)} layers in an iteration"
            )
        placed = []
        for window, inside in parts:
            layers = self.layers if kind is Kind.PARAM_GATHER else self.layers[::-1]
            for index, call in enumerate(inside):
                layer, microbatch = layers[index % len(layers)], index // len(layers)
                if not self._possible(kind, window.iteration, layer, call.start, microbatch):
                    raise _Refused(
                        f"the order of the {kind.value} of {weight}'s size is not the order in "
                        "which the layers run"
                    )
                placed.append((call, layer, window.iteration))
        return placed, len(found) - len(placed)

    def _microbatches(self, iteration: int | None) -> int:
        starts = self._starts.get((iteration, self.layers[0], False), [])
        return 1 + max((microbatch for microbatch, _ in starts), default=0)

    def _possible(
        self, kind: Kind, iteration: int | None, layer: str, at: int, microbatch: int
    ) -> bool:
        """Return whether a gather comes before its layer's last stage, a reduction after its
        first."""
        backward = kind is Kind.GRAD_REDUCE
        runs = self._starts.get((iteration, layer, backward), [])
        starts = [start for number, start in runs if number == microbatch]
        if not starts:
            return not runs
        return at >= min(starts) if backward else at <= max(starts)
