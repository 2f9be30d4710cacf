"""Runs on a true clock, and what each of their collectives really hid.

A `Case` says what a run was like and how its profiler wrote it down; `plan` lays it out in
nanoseconds. Nothing here uses `profiling`'s interval maths: the truth comes from looking at every
piece of time between two edges (`overlap`).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

US = 1_000  # ns
MAIN, AUTOGRAD = 100, 101  # threads
COMPUTE, SECOND, COMMUNICATION = 7, 13, 20  # streams
GATHER, REDUCE = "fc2 gather overlaps stage1 forward", "dW2 reduce-scatter overlaps stage1 backward"
THRESHOLD = 0.9
ELEMENTS = 4096 * 24  # of fc2's bucket; fc1's has twice as many

# How the profiler and the model name things.
OURS, PRIMUS, PLAIN = "ours", "primus_turbo", "plain"
# What a collective runs on the device.
NCCL, GENERIC, UNNAMED, PEER_COPY, SAME_COPY = "nccl", "generic", "unnamed", "PtoP", "DtoD"
# Where it runs, seen from the stage that should hide it.
PLACES = ("inside", "after", "before", "other stage", "partly", "mostly", "mixed")
# What takes the answer away.
LOSSES = ("one iteration", "group of one", "no stages", "no collectives")

EACH, WHOLE = "each stage", "whole layers"

PATTERNS = {
    "stage1.forward": "Experts.fc1",
    "stage1.backward": "Experts.fc1.backward",
    "stage2.forward": "Experts.fc2",
    "stage2.backward": "Experts.fc2.backward",
}


@dataclass(frozen=True)
class Case:
    """A run, and how it was written down.

    Of a run with ``unlinked`` or ``graph == WHOLE`` the truth may be out of reach: then a verdict
    must be right, but there need not be one.

    Attributes:
        seed: Of all durations and gaps.
        places: Where the gathers and where the reductions run; see `PLACES`.
        again: Whether backward runs stage 1's forward once more, on its own thread.
        late: Whether in some iterations one rank joins its collectives late.
        straggler: Whether the first gathers last far longer on all ranks but one, which started
            its profiler later.
        skew: Nanoseconds by which each rank's clock is ahead of the rank before.
        graph: Whether each stage's kernels come from one graph launch, or all stages' from one.
        shared: Whether a collective and a kernel of its stage share a correlation, as on ROCm.
        early: Whether kernels start a little before their launch, by their own clock.
        nested: Whether every range of a stage is in another of its own name.
        tiny: Whether a stage is hundreds of kernels shorter than a microsecond.
        second: Whether stages use two streams, whose kernels overlap.
        unlinked: Share of the stages' kernels that have no launch record.
        whole: Whether all times are whole microseconds without a base, as older traces have them.
        metadata: Whether collectives' kernels say operation, size and group; c10d always does.
        noise: Whether other things run, on this device and on another.
        loss: What takes the answer away, or nothing; see `LOSSES`.
    """

    seed: int
    places: tuple[str, str]
    style: str = OURS
    amd: bool = False
    kernel: str = NCCL
    layers: int = 2
    iterations: int = 3
    microbatches: int = 1
    again: bool = False
    ranks: int = 1
    late: bool = False
    straggler: bool = False
    skew: int = 0
    graph: str = ""
    shared: bool = False
    early: bool = False
    nested: bool = False
    tiny: bool = False
    second: bool = False
    unlinked: float = 0.0
    whole: bool = False
    metadata: bool = True
    noise: bool = False
    loss: str = ""

    @property
    def complete(self) -> bool:
        """Whether the trace holds all that a verdict needs."""
        return not self.loss and not self.unlinked and self.graph != WHOLE


def _usual(values: st.SearchStrategy[Any], usual: Any) -> st.SearchStrategy[Any]:
    """Mostly ``usual``, so that each case has a few peculiarities and not all at once."""
    return st.one_of(st.just(usual), st.just(usual), values)


RARELY = _usual(st.booleans(), False)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any run that can occur, with or without an answer."""
    loss = draw(_usual(st.sampled_from([*[""] * 8, *LOSSES]), ""))
    ranks = 1 if loss == "one iteration" else draw(_usual(st.integers(2, 4), 1))
    style = draw(_usual(st.sampled_from([PRIMUS, PLAIN]), OURS))
    kernels = [NCCL, GENERIC] + ([UNNAMED, PEER_COPY, SAME_COPY] if ranks == 1 else [])
    late = ranks > 1 and draw(st.booleans())
    return Case(
        seed=draw(st.integers(0, 2**32)),
        places=(draw(st.sampled_from(PLACES)), draw(st.sampled_from(PLACES))),
        style=style,
        amd=draw(st.booleans()),
        kernel=draw(st.sampled_from(kernels)),
        layers=draw(st.integers(1, 3)),
        iterations=1 if loss == "one iteration" else draw(st.integers(3, 5)),
        microbatches=draw(_usual(st.integers(2, 3), 1)),
        again=draw(RARELY),
        ranks=ranks,
        late=late,
        straggler=draw(RARELY),
        skew=draw(_usual(st.integers(-(10**9), 10**9), 0)),
        graph=draw(_usual(st.sampled_from([EACH, WHOLE]), "")),
        shared=draw(RARELY),
        early=not late and draw(RARELY),
        nested=draw(RARELY),
        tiny=draw(RARELY),
        second=draw(RARELY),
        unlinked=draw(_usual(st.sampled_from([0.1, 0.5, 1.0]), 0.0)),
        whole=draw(RARELY),
        metadata=draw(_usual(st.booleans(), True)),
        noise=draw(st.booleans()),
        loss=loss,
    )


class Truth(NamedTuple):
    """What really happened to one collective of one layer: its shares, and their sum by time."""

    shares: dict[tuple[int, int], float]  # rank, iteration -> hidden share of the transfer
    hidden: float


class Moved(NamedTuple):
    """One collective of one layer in one iteration, on the true clock.

    Every rank's kernel ends at ``end``; the transfer begins at ``begin``, when the last rank joins.
    """

    check: str
    layer: int
    begin: int
    end: int
    joined: list[int]  # by rank


class Kernel(NamedTuple):
    start: int
    end: int
    stream: int


class Run(NamedTuple):
    """One run of a stage: its kernels, on the true clock."""

    stage: int
    backward: bool
    layer: int
    microbatch: int
    kernels: list[Kernel]
    again: bool = False

    @property
    def place(self) -> tuple[int, bool, int, int]:
        """Which run of the program it is; one that backward repeats is none."""
        stage = 0 if self.again else self.stage
        return stage, self.backward, self.layer, self.microbatch

    @property
    def start(self) -> int:
        return min(kernel.start for kernel in self.kernels)

    @property
    def end(self) -> int:
        return max(kernel.end for kernel in self.kernels)


def overlap(begin: int, end: int, kernels: list[Kernel]) -> int:
    """How much of [begin, end) any kernel runs in, piece by piece between all edges."""
    inside = [one for one in kernels if one.start < end and one.end > begin]
    edges = {begin, end, *(edge for one in inside for edge in (one.start, one.end))}
    found, reach = 0, begin
    for at, following in itertools.pairwise(sorted(edge for edge in edges if begin <= edge <= end)):
        # Kernels that began by then and are not over: the longest of them covers the piece.
        reach = max([reach, *(one.end for one in inside if one.start <= at)])
        found += following - at if reach >= following else 0
    return found


def plan(case: Case) -> list[Iteration]:
    """Lay out the iterations of ``case``."""
    dice = random.Random(case.seed)
    return [_iteration(case, dice, number) for number in range(case.iterations)]


def truth_of(case: Case, plan: list[Iteration]) -> dict[tuple[str, int], Truth]:
    """Return (check, layer) -> what each of the collectives hid."""
    truth = {}
    for check, layer in itertools.product((GATHER, REDUCE), range(case.layers)):
        shares, hidden, total = {}, 0, 0
        for number, (runs, moves, _) in enumerate(plan):
            under = [
                kernel
                for run in runs
                if (run.stage, run.backward, run.layer) == (1, check == REDUCE, layer)
                for kernel in run.kernels
            ]
            (move,) = (one for one in moves if (one.check, one.layer) == (check, layer))
            inside, length = overlap(move.begin, move.end, under), move.end - move.begin
            for rank in range(case.ranks):
                shares[rank, number] = inside / length
                hidden, total = hidden + inside, total + length
        truth[check, layer] = Truth(shares, hidden / total)
    return truth


Iteration = tuple[list[Run], list[Moved], tuple[int, int]]


def _iteration(case: Case, dice: random.Random, number: int) -> Iteration:
    """Return the stages, collectives and time of one iteration."""
    start = 10_000_000_000 + number * 200_000_000
    at = start + 60_000 * US
    runs: list[Run] = []
    layers = range(case.layers)
    for microbatch in range(case.microbatches):
        order = [(stage, False, layer) for layer in layers for stage in (1, 2)]
        order = [(*entry, False) for entry in order]
        for layer in reversed(layers):
            order += [(1, False, layer, True)] * case.again
            order += [(2, True, layer, False), (1, True, layer, False)]
        for stage, backward, layer, again in order:
            kernels = _kernels(case, dice, at)
            runs.append(Run(stage, backward, layer, microbatch, kernels, again))
            at = runs[-1].end + dice.randrange(60, 200) * US
    moves = []
    for check, layer in itertools.product((GATHER, REDUCE), layers):
        backward = check == REDUCE
        microbatch = case.microbatches - 1 if backward else 0
        begin, end = _place(case, dice, runs, (backward, layer, microbatch), number)
        joined = [begin] * case.ranks
        waits = [rank for rank in range(case.ranks) if rank != number % case.ranks]
        if case.late and dice.random() < 0.5:
            for rank in waits:
                joined[rank] -= dice.randrange(20, 400) * US
        if case.straggler and number == 0 and check == GATHER:
            for rank in waits or [0]:
                joined[rank] -= 40_000 * US
        moves.append(Moved(check, layer, begin, end, joined))
    return runs, moves, (start, at + 5_000 * US)


def _kernels(case: Case, dice: random.Random, at: int) -> list[Kernel]:
    """Return a stage's kernels: 0.4 to 2 ms of work with short gaps."""
    if case.tiny and not case.whole:
        count, longest, gap = 60, 990, 30  # ns
    else:
        count, longest, gap = dice.randrange(2, 9), 250 * US, 2 * US
    kernels = []
    for index in range(count):
        length = dice.randrange(longest // 2, longest)
        length = _round(case, length)
        stream = SECOND if case.second and index % 2 else COMPUTE
        kernels.append(Kernel(at, at + length, stream))
        back = length // 2 if stream == SECOND else 0  # the two streams' kernels overlap
        at = _round(case, at + length - back + dice.randrange(gap))
    return kernels


def _round(case: Case, time: int) -> int:
    return time // US * US if case.whole else time


def _place(
    case: Case, dice: random.Random, runs: list[Run], whose: tuple[bool, int, int], number: int
) -> tuple[int, int]:
    """Return when a collective transfers."""
    backward = whose[0]
    (own,) = (run for run in runs if run.place == (1, *whose))
    place = case.places[backward]
    if place == "mixed":
        place = dice.choice(["inside", "after", "partly", "mostly"])
    span = own.end - own.start
    length = dice.randrange(span // 4, span // 2)
    index = runs.index(own)
    if place == "inside":
        begin = own.start + dice.randrange(span - length)
    elif place == "before" and backward:  # its gradient is not there before stage 2's backward is
        begin = runs[index - 1].end
        length = own.start - begin
    elif place == "before":
        begin = own.start - length
    elif place == "after":
        begin = own.end + dice.randrange(50) * US
    elif place == "other stage":
        other = runs[index - 1] if backward or index + 1 == len(runs) else runs[index + 1]
        length = min(length, other.end - other.start)
        begin = other.start
    else:
        share = dice.uniform(0.92, 0.99) if place == "mostly" else dice.uniform(0.1, 0.85)
        begin = own.end - int(length * share)
    begin = _round(case, begin)
    return begin, begin + max(US, _round(case, length))
