"""Traces with a known answer, written as Kineto writes them: what verdicts are tested on."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.corpus_runs import (
    AUTOGRAD,
    COMMUNICATION,
    COMPUTE,
    EACH,
    ELEMENTS,
    GATHER,
    GENERIC,
    MAIN,
    NCCL,
    OURS,
    PATTERNS,
    PEER_COPY,
    PLAIN,
    PRIMUS,
    REDUCE,
    SAME_COPY,
    UNNAMED,
    US,
    WHOLE,
    Case,
    Iteration,
    Moved,
    Run,
    Truth,
    plan,
    truth_of,
)


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


def build(case: Case) -> Built:
    """Lay out the run of ``case``, work out its truth and write its traces."""
    run = plan(case)
    writers = [_Writer(case, rank, random.Random(case.seed + 1)) for rank in range(case.ranks)]
    return Built(
        case, [writer.trace(run) for writer in writers], {} if case.loss else truth_of(case, run)
    )


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

    def trace(self, plan: list[Iteration]) -> dict[str, Any]:
        for number, (runs, moves, (start, end)) in enumerate(plan):
            self._range(self._step(number), start, end, MAIN)
            for _ in range(20):  # calls that launch nothing have correlations, too
                self._launch(start + US, MAIN, next(self._correlations), "StreamWaitEvent")
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
                if self._case.shared and run.place[0] == 1 and index == 0:
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

    def _noise(self, plan: list[Iteration]) -> None:
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
