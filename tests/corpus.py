"""Runs with a known answer, written as Kineto writes them: the truth that verdicts are tested on.

A `Case` says what the run was like and how its profiler wrote it down. `build` lays the run out on
a true clock in nanoseconds, works out what each collective really hid, and only then writes the
traces. Nothing here uses `profiling`'s interval maths: the truth comes from looking at every piece
of time between two edges (`overlap`).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
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


@dataclass
class Built:
    """The traces of a case and what is true of it.

    Attributes:
        traces: By rank, as a JSON object.
        truth: (check, layer) -> what happened; empty where the case says that nobody can know.
    """

    case: Case
    traces: list[dict[str, Any]]
    truth: dict[tuple[str, int], Truth] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        for rank, trace in enumerate(self.traces):
            path = folder / f"rank{rank}.pt.trace.json"
            path.write_bytes(msgspec.json.encode(trace))
        return folder


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


def build(case: Case) -> Built:
    """Lay out the run of ``case``, work out its truth and write its traces."""
    dice = random.Random(case.seed)
    plan = [_iteration(case, dice, number) for number in range(case.iterations)]
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
    writers = [_Writer(case, rank, random.Random(case.seed + 1)) for rank in range(case.ranks)]
    traces = [writer.trace(plan) for writer in writers]
    return Built(case, traces, {} if case.loss else truth)


_Iteration = tuple[list[Run], list[Moved], tuple[int, int]]


def _iteration(case: Case, dice: random.Random, number: int) -> _Iteration:
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


class _Op(NamedTuple):
    """A range on a CPU thread, and what is launched in it."""

    at: int  # when its first kernel starts, on the true clock
    thread: int
    what: Run | Moved
    weight: str = "fc2_weight"  # of a collective


class _Writer:
    """Writes down what one rank's profiler saw."""

    def __init__(self, case: Case, rank: int, dice: random.Random) -> None:
        self._case, self._rank, self._dice = case, rank, dice
        self._events: list[dict[str, Any]] = []
        self._correlations = itertools.count(1000)
        # Absolute time is base + ts; older traces have no base, and microseconds since 1970.
        self._ahead = rank * case.skew + (10**18 if case.whole else 0)

    def trace(self, plan: list[_Iteration]) -> dict[str, Any]:
        for number, (runs, moves, (start, end)) in enumerate(plan):
            self._range(self._step(number), start, end, MAIN)
            self._iteration(runs, moves, start)
        if self._case.noise:
            self._noise(plan)
        group = self._group()
        info = {"rank": self._rank, "world_size": self._case.ranks, "backend": "nccl"}
        info["pg_config"] = [{"pg_name": "7", "pg_desc": "edp", "ranks": group}]
        found: dict[str, Any] = {"schemaVersion": 1, "distributedInfo": info}
        if not self._case.whole:
            found["baseTimeNanoseconds"] = 1_700_000_000_000_000_000
        self._dice.shuffle(self._events)  # nothing says that a trace is in order
        return found | {"traceEvents": self._events}

    def _step(self, number: int) -> str:
        if self._case.style == OURS and self._case.seed % 2:
            return f"overlap::iteration[{number}]"
        return f"ProfilerStep#{number}"

    def _group(self) -> list[int]:
        alone = self._case.loss == "group of one"
        return [self._rank] if alone else list(range(max(2, self._case.ranks)))

    # What the CPU did, in the order of the program

    def _iteration(self, runs: list[Run], moves: list[Moved], start: int) -> None:
        ops = self._program(runs, moves)
        if self._case.early:
            ops.sort(key=lambda op: op.at)
        free = {MAIN: start + 10 * US, AUTOGRAD: start + 10 * US}
        graph = next(self._correlations) if self._case.graph == WHOLE else None
        shared: dict[tuple[bool, int], int] = {}
        if graph is not None:
            self._launch(start + 5 * US, MAIN, graph, "GraphLaunch")
        for op in ops:
            at = max(free.values())  # backward waits for forward, whichever thread runs it
            if self._case.early:
                at = max(free[op.thread], op.at - 3 * US)
            if isinstance(op.what, Run):
                self._stage(op.what, at, op.thread, graph, shared)
            else:
                self._collective(op, at, shared)
            free[op.thread] = at + 61 * US

    def _program(self, runs: list[Run], moves: list[Moved]) -> list[_Op]:
        case, last = self._case, self._case.microbatches - 1
        ops = []
        for run in runs:
            thread = AUTOGRAD if run.backward or run.again else MAIN
            own = _Op(run.start, thread, run)
            before: list[_Op] = []
            after: list[_Op] = []
            if not run.backward and not run.again and run.microbatch == 0:
                before += self._issues(GATHER, run, runs, moves, thread)
            if run.backward and run.microbatch == last:
                after += self._issues(REDUCE, run, runs, moves, thread)
            ops += [*before, own, *after]
        return ops if case.loss != "no stages" else [op for op in ops if not _is_run(op)]

    def _issues(
        self, check: str, run: Run, runs: list[Run], moves: list[Moved], thread: int
    ) -> list[_Op]:
        """Return what is issued just before a forward or just after a backward run."""
        (move,) = (one for one in moves if (one.check, one.layer) == (check, run.layer))
        (own,) = (one for one in runs if one.place == (1, *run.place[1:]))
        # A gather that runs after its stage may be issued after it, and so may a reduction.
        at_second = (move.begin >= own.end) is (check == GATHER)
        issued = []
        if run.stage == 1:  # fc1's own collective, beside the stage and of no interest
            at = own.start - 50 * US if check == GATHER else own.end + 5 * US
            apart = Moved(check, run.layer, at, at + 20 * US, [at] * self._case.ranks)
            issued.append(_Op(at, thread, apart, "fc1_weight"))
        if run.stage == (2 if at_second else 1) and self._case.loss != "no collectives":
            issued.append(_Op(move.joined[self._rank], thread, move))
        return issued

    def _stage(
        self,
        run: Run,
        at: int,
        thread: int,
        graph: int | None,
        shared: dict[tuple[bool, int], int],
    ) -> None:
        if graph is None or self._case.seed % 3:  # a replayed graph may have no ranges at all
            name = self._stage_name(run)
            self._range(name, at, at + 60 * US, thread)
            if self._case.nested:
                self._range(name, at + 1 * US, at + 59 * US, thread)
        one = next(self._correlations) if self._case.graph == EACH else None
        if one is not None:
            self._launch(at + 4 * US, thread, one, "GraphLaunch")
        for index, kernel in enumerate(run.kernels):
            correlation = graph or one
            if correlation is None:
                correlation = next(self._correlations)
                if self._case.shared and run.stage == 1 and index == 0:
                    key = run.backward, run.layer
                    correlation = shared.setdefault(key, correlation)
                if self._dice.random() >= self._case.unlinked:
                    self._launch(at + 6 * US + index * US // 2, thread, correlation)
            self._kernel("gemm_bf16", kernel.start, kernel.end, kernel.stream, correlation)

    def _stage_name(self, run: Run) -> str:
        way = "backward" if run.backward else "forward"
        if self._case.style == PRIMUS:
            return f"fused_mega_moe_stage{run.stage}_{way}"
        if self._case.style == PLAIN:
            return PATTERNS[f"stage{run.stage}.{way}"]
        return f"megamoe::stage{run.stage}.{way}[{layer_name(self._case, run.layer)}]"

    def _collective(self, op: _Op, at: int, shared: dict[tuple[bool, int], int]) -> None:
        assert isinstance(op.what, Moved)
        move, reduce = op.what, op.what.check == REDUCE
        if self._case.style == OURS:
            kind = "grad_reduce" if reduce else "param_gather"
            name = f"overlap::{kind}[{layer_name(self._case, move.layer)}.{op.weight}]"
            self._range(name, at, at + 40 * US, op.thread)
        correlation = next(self._correlations)
        if self._case.shared and op.weight == "fc2_weight":
            correlation = shared.setdefault((reduce, move.layer), correlation)
        self._add(
            "cpu_op",
            "record_param_comms",
            at + 2 * US,
            at + 38 * US,
            op.thread,
            self._message(reduce, op.weight),
        )
        self._launch(at + 6 * US, op.thread, correlation)
        says = self._message(reduce, op.weight) if self._case.metadata else {}
        start = move.joined[self._rank]
        kernel = self._case.kernel
        if kernel in (PEER_COPY, SAME_COPY):
            self._kernel(
                f"Memcpy {kernel} (Device -> Device)",
                start,
                move.end,
                COMMUNICATION,
                correlation,
                "gpu_memcpy",
            )
            return
        names = {
            NCCL: f"ncclDevKernel_{'ReduceScatter_Sum_f32' if reduce else 'AllGather'}_RING_LL()",
            GENERIC: "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
            UNNAMED: "elementwise_copy",
        }
        self._kernel(names[kernel], start, move.end, COMMUNICATION, correlation, **says)

    def _message(self, reduce: bool, weight: str) -> dict[str, Any]:
        group = self._group()
        elements = ELEMENTS * (2 if weight == "fc1_weight" else 1)
        whole, part = elements, elements // len(group)
        return {
            "Collective name": "_reduce_scatter_base" if reduce else "_allgather_base",
            "In msg nelems": whole if reduce else part,
            "Out msg nelems": part if reduce else whole,
            "Group size": len(group),
            "Process Group Name": "7",
            "Process Group Ranks": str(group),
            "dtype": "Float" if reduce else "BFloat16",
        }

    # What else there may be

    def _noise(self, plan: list[_Iteration]) -> None:
        for runs, _, (start, end) in plan:
            self._add("gpu_user_annotation", "nccl:_all_gather_base", start, end, COMPUTE, {})
            self._kernel("gemm_of_another_device", start, end, COMPUTE, None, device=1)
            self._kernel("Memset (Device)", start, end, 30, None, "gpu_memset")
            self._kernel("Memcpy HtoD (Pinned -> Device)", start, end, 31, None, "gpu_memcpy")
            for run in runs[::2]:  # between two stages, and of neither
                at = run.end + US
                correlation = next(self._correlations)
                self._launch(start + 2 * US, MAIN, correlation)
                self._kernel("rmsnorm", at, at + 30 * US, COMPUTE, correlation)
            self._kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", start, start + US, 40, None)
            bad = {"device": 0, "stream": COMPUTE, "correlation": 1}
            for broken in ({"dur": -5}, {}, {"dur": 9e15}):
                event = {"ph": "X", "cat": "kernel", "name": "broken", "pid": 0, "tid": 7}
                self._events.append(event | {"ts": self._ts(start), "args": bad} | broken)
            self._events.append({"ph": "i", "name": "Iteration Start", "ts": self._ts(start)})

    # Events

    def _ts(self, time: int) -> float | int:
        time += self._ahead
        return time // US if self._case.whole else time / US

    def _add(
        self, category: str, name: str, start: int, end: int, thread: int, args: dict[str, Any]
    ) -> None:
        times = {
            "ts": self._ts(start),
            "dur": (end - start) // US if self._case.whole else (end - start) / US,
        }
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
        self._events.append(event | times | {"args": args})

    def _range(self, name: str, start: int, end: int, thread: int) -> None:
        self._add("user_annotation", name, start, end, thread, {})

    def _launch(self, at: int, thread: int, correlation: int, what: str = "LaunchKernel") -> None:
        args = {"correlation": correlation, "External id": correlation}
        runtime = "hip" if self._case.amd else "cuda"
        self._add("cuda_runtime", f"{runtime}{what}", at, at + 2 * US, thread, args)
        if not self._case.amd and self._case.seed % 2:  # the driver's call inside the runtime's
            self._add("cuda_driver", f"cu{what}", at, at + US, thread, args)

    def _kernel(
        self,
        name: str,
        start: int,
        end: int,
        stream: int,
        correlation: int | None,
        category: str = "kernel",
        device: int | None = None,
        **says: Any,
    ) -> None:
        device = self._device if device is None else device + self._device
        args = {"device": device, "stream": stream} | says
        if correlation is not None:
            args |= {"correlation": correlation}
            if not self._case.amd:
                args |= {"External id": correlation}
        self._add(category, name, start, end, stream, args)
        self._events[-1] |= {"pid": device}

    @property
    def _device(self) -> int:
        return 2 if self._case.amd else 0


def _is_run(op: _Op) -> bool:
    return isinstance(op.what, Run)


def layer_name(case: Case, layer: int) -> str:
    """What the layer is called in the trace, or by whoever reads it."""
    return f"layers.{layer}" if case.style == PRIMUS else f"layers.{layer}.mlp.experts"


def assume_lines(case: Case) -> list[str]:
    """Return the lines of the --assume file that says what the trace of a PLAIN case does not."""
    size = 1 if case.loss == "group of one" else max(2, case.ranks)
    weights = (("fc1_weight", 2 * ELEMENTS), ("fc2_weight", ELEMENTS))
    lines = [f"layers = {[layer_name(case, layer) for layer in range(case.layers)]}"]
    for name, elements in weights:
        lines += [
            "[[weight]]",
            f'name = "{name}"',
            f"elements = {elements}",
            f"group_size = {size}",
        ]
    return [*lines, "[stage]", *(f"'{key}' = '{text}'" for key, text in PATTERNS.items())]
