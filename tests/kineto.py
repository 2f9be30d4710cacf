"""Builds traces like Kineto's, with a known answer. Times are in microseconds."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

from profiling.ranges import Kind, label

MAIN, AUTOGRAD, GLOO = 100, 101, 200  # threads; gloo's own are GLOO, GLOO + 1, ...
COMPUTE, COMMUNICATION = 7, 20  # streams
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class TraceBuilder:
    """One rank's trace, event by event."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, groups: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {
            "schemaVersion": 1,
            "distributedInfo": {
                "rank": rank,
                "world_size": world_size,
                "pg_config": [
                    {"pg_name": str(index), "pg_desc": "undefined", "ranks": list(ranks)}
                    for index, ranks in enumerate(groups)
                ],
            },
        }
        self.rank = rank
        self._correlations = itertools.count(1)

    def add(
        self, category: str, name: str, start: float, end: float, tid: int, **args: Any
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid}
        self.events.append({**event, "ts": start, "dur": end - start, "args": args})

    def range(self, kind: Kind, name: str, start: float, end: float, tid: int = MAIN) -> None:
        """One of our ranges."""
        self.add("user_annotation", label(kind, name), start, end, tid)

    def op(self, name: str, start: float, end: float, tid: int = MAIN, dims: Any = None) -> None:
        self.add("cpu_op", name, start, end, tid, **({"Input Dims": dims} if dims else {}))

    def gloo(self, name: str, start: float, end: float, tid: int = GLOO, dims: Any = None) -> None:
        args = {"Input Dims": dims} if dims else {}
        self.add("user_annotation", f"gloo:{name}", start, end, tid, **args)

    def kernel(
        self,
        name: str,
        launched: float,
        start: float,
        end: float,
        *,
        stream: int = COMPUTE,
        device: int = 0,
        tid: int = MAIN,
        category: str = "kernel",
        **args: Any,
    ) -> None:
        """A launch of 2 us on thread ``tid`` and what it launched."""
        correlation = next(self._correlations)
        self.add(
            "cuda_runtime", "cudaLaunchKernel", launched, launched + 2, tid, correlation=correlation
        )
        device_args = {"device": device, "stream": stream, "correlation": correlation}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": device, "tid": stream}
            | {"ts": start, "dur": end - start, "args": device_args | args}
        )

    def text(self) -> str:
        return json.dumps(self.metadata | {"traceEvents": self.events}, indent=1)

    def write(self, folder: Path, name: str | None = None) -> Path:
        path = folder / (name or f"rank{self.rank}.pt.trace.json")
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def cpu_iteration(
    trace: TraceBuilder,
    number: int,
    start: float,
    *,
    gather: tuple[float, float],
    issue: float | None = None,
    experts: str = "layers.0.mlp.experts",
    name: str | None = None,
    stage: tuple[float, float] = (100, 1100),
    elements: int = 4096,
    wait: float | None = None,
) -> None:
    """An iteration of 2,000 us with one gather and one stage1 forward; times after ``start``.

    Args:
        gather: When gloo moves it.
        issue: When its range of 20 us begins; 20 us before the stage if not given.
        name: What the collective is called; the experts' fc2_weight if not given.
        wait: When its user begins to wait for it; after the stage if not given.
    """
    at = start + (stage[0] - 20 if issue is None else issue)
    name = name or f"{experts}.fc2_weight"
    first, last = start + stage[0], start + stage[1]
    trace.range(Kind.ITERATION, str(number), start, start + 2000)
    trace.range(Kind.PARAM_GATHER, name, at, at + 20)
    trace.op("c10d::_allgather_base_", at + 2, at + 18, dims=[[2 * elements], [elements]])
    trace.gloo("all_gather", start + gather[0], start + gather[1], dims=[[elements]])
    trace.range(Kind.STAGE1_FORWARD, experts, first, last)
    trace.op("aten::mm", first, last)
    waits = max(last, at + 20) if wait is None else start + wait
    trace.range(Kind.PARAM_WAIT, name, waits, max(waits, start + gather[1]) + 1)


def gpu_iteration(
    trace: TraceBuilder,
    number: int,
    start: float,
    *,
    gather: tuple[float, float],
    stage: tuple[float, float] = (100, 1100),
    experts: str = "layers.0.mlp.experts",
    kernel: str = ALL_GATHER,
    stream: int = COMMUNICATION,
    **args: Any,
) -> None:
    """As `cpu_iteration`, on a device: everything is launched in the first 90 us.

    Args:
        kernel, stream: What the gather is called there, and where it runs.
    """
    name = f"{experts}.fc2_weight"
    trace.range(Kind.ITERATION, str(number), start, start + 2000)
    trace.range(Kind.PARAM_GATHER, name, start + 10, start + 30)
    trace.kernel(
        kernel,
        start + 15,
        start + gather[0],
        start + gather[1],
        stream=stream,
        **args,
    )
    trace.range(Kind.STAGE1_FORWARD, experts, start + 40, start + 80)
    trace.kernel("void gemm<128>(float*)", start + 50, start + stage[0], start + stage[1])
