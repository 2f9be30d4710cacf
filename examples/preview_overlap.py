"""What a cluster's overlap would look like, shown on one GPU: emulation, no measured collective.

    python examples/preview_overlap.py --edp 8 --bandwidth 50 --ctas 8 --clusters 4 [--profile DIR]
    python examples/preview_overlap.py --preset tiny --bandwidth 1              # on a CPU

A stack of MoE layers is trained for a few steps as one of `--edp` ranks whose collectives are
emulated (see docs/emulation.md): serialised, every collective waited for where it is issued, and
overlapped. Routing is forced to be uniform, since the weights that emulated peers send are not
those of a real run. Each run is timed without a profiler and then profiled.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's notices

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import profiling
from megamoe import MegaMoEConfig, MegaMoELayer
from overlap import (
    DistributedDataParallel,
    DistributedOptimizer,
    OverlapConfig,
    ProcessGroups,
    emulation,
)
from overlap.bucket import Bucket
from overlap.emulation import EmulatedLink
from profiling import Reading, Report


@dataclass(frozen=True)
class Preset:
    """One rank's work: T tokens, routed to K of the experts that it holds."""

    tokens: int
    top_k: int
    hidden: int
    ffn: int
    experts: int


PRESETS = {
    "deepseek-v3": Preset(8192, 8, 7168, 2048, 32),  # expert parallelism over 8 ranks
    "qwen3-30b-a3b": Preset(8192, 8, 2048, 768, 128),
    "tiny": Preset(512, 2, 128, 512, 4),
}


class Block(nn.Module):
    """A MoE layer behind a norm and around a residual, [T, H] -> [T, H]."""

    def __init__(self, config: MegaMoEConfig, fused: bool, **where: Any) -> None:
        super().__init__()
        self.mlp = MegaMoELayer(config, fused=fused, **where)

    def forward(self, x: Tensor) -> Tensor:
        # Norms without weights: emulated peers would overwrite them with other parameters.
        return x + self.mlp(F.rms_norm(x, x.shape[-1:]))[0]


def build(
    preset: Preset, layers: int, device: torch.device, *, backend: str = "auto", fused: bool = False
) -> nn.Sequential:
    """The model, drawn where it lives: bf16 on a GPU; fp32 and plain torch on a CPU."""
    on_gpu = device.type == "cuda"
    config = MegaMoEConfig(
        hidden_size=preset.hidden,
        moe_ffn_hidden_size=preset.ffn,
        num_moe_experts=preset.experts,
        moe_router_topk=preset.top_k,
        moe_router_force_load_balancing=True,
        mega_moe_backend=backend if on_gpu else "reference",
    )
    dtype = torch.bfloat16 if on_gpu else torch.float32
    blocks = (Block(config, fused, dtype=dtype, device="meta") for _ in range(layers))
    model = nn.Sequential(*blocks).to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, config.init_method_std)
    return model


class Stopwatch:
    """Moments of the compute: of the host on a CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def moment(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Wait for the last moment; return when each was, counted from the first."""
        if not self._on_gpu:
            return [(moment - self._moments[0]) * 1e3 for moment in self._moments]
        self._moments[-1].synchronize()
        return [self._moments[0].elapsed_time(moment) for moment in self._moments]


def gather_seconds(bucket: Bucket, link: EmulatedLink) -> float:
    return link.seconds(bucket.params.nbytes * _others(bucket))


def reduce_seconds(bucket: Bucket, link: EmulatedLink) -> float:
    return link.seconds(bucket.grads.nbytes * _others(bucket))


def _others(bucket: Bucket) -> float:
    return (bucket.layout.group_size - 1) / bucket.layout.group_size


@dataclass(frozen=True)
class Run:
    """One way of running, measured. Times in ms.

    Attributes:
        steps: Each timed step, without a profiler.
        waited: Mean of how long compute stood still for the engine's collectives in a step.
        gathers, reduces: What a step's collectives take, by the link's arithmetic.
        profile: What was recorded of further steps.
    """

    steps: tuple[float, ...]
    waited: float
    gathers: float
    reduces: float
    profile: Reading
    plan: str

    @property
    def step(self) -> float:
        """The median step."""
        return median(self.steps)

    @property
    def communication(self) -> float:
        return self.gathers + self.reduces


def measure(
    model: nn.Module,
    x: Tensor,
    link: EmulatedLink,
    folder: Path,
    *,
    serialize: bool,
    budget: bool = True,
    steps: int = 8,
    recorded: int = 6,
) -> Run:
    """Train ``model`` on the emulated default group: 3 steps to settle, ``steps`` timed ones, and
    ``recorded`` ones under the profiler."""
    groups = ProcessGroups.build(device_type=x.device.type)
    # None: as many as the link has CTAs. Serialised, no launch sees a collective under way.
    config = OverlapConfig(
        serialize=serialize, measure_waits=True, collective_sms=None if budget else 0
    )
    ddp = DistributedDataParallel(model, config, groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-4)
    try:
        for _ in range(3):
            step(ddp, optimizer, x)
        ddp.take_waited_ms()
        watch = Stopwatch(x.device)
        watch.moment()
        for _ in range(steps):
            step(ddp, optimizer, x)
            watch.moment()
        taken = [end - begin for begin, end in pairwise(watch.ms())]
        waited = ddp.take_waited_ms() / steps
        with profiling.record(
            folder, wait=0, warmup=2, active=recorded, settle=ddp.finish_in_flight
        ) as recorder:
            for _ in range(2 + recorded):
                step(ddp, optimizer, x)
                recorder.step()
        return Run(
            steps=tuple(taken),
            waited=waited,
            gathers=sum(1e3 * gather_seconds(bucket, link) for bucket in ddp.buckets),
            reduces=sum(1e3 * reduce_seconds(bucket, link) for bucket in ddp.buckets),
            profile=profiling.read(folder),
            plan=str(ddp.plan()),
        )
    finally:
        ddp.remove()
        del ddp, optimizer
        gc.collect()


def step(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    ddp(x).float().square().mean().backward()
    optimizer.step()


@contextmanager
def emulated(link: EmulatedLink, ranks: int) -> Iterator[None]:
    """torch.distributed over ``link``, for the length of the block."""
    emulation.init_process_group(link, ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hidden(report: Report) -> dict[str, float | None]:
    """Per check the hidden share over all layers, None where nothing was measured."""
    shares: dict[str, float | None] = {}
    for title in dict.fromkeys(row.check for row in report.rows):
        rows = [row for row in report.rows if row.check == title and row.hidden is not None]
        count = sum(row.occurrences for row in rows)
        total = sum(row.hidden * row.occurrences for row in rows)
        shares[title] = total / count if count else None
    return shares


def exposed(report: Report) -> float:
    """Mean over iterations of the time in which the rank communicated and did not compute."""
    figures = [ms for iterations in report.exposed_ms.values() for ms in iterations]
    return sum(figures) / len(figures) if figures else float("nan")


def effective(serial: Run, other: Run) -> float:
    """The share of the communication that ``other`` saves of a step, by the clock."""
    return (serial.step - other.step) / serial.communication


def least(serial: Report) -> float | None:
    """What no schedule of prefetch depth 1 hides of a step's communication, in ms."""
    forward, _, backward = serial.bounds
    if forward.least_ms is None or backward.least_ms is None:
        return None
    return forward.least_ms + backward.least_ms


def to_text(serial: Run, overlapped: Run, reports: tuple[Report, Report]) -> str:
    """The two runs side by side; ``reports`` are theirs, the second against the first."""

    def cell(value: float | None, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    rows = [
        ("step, ms", serial.step, overlapped.step),
        ("compute stood still, ms", serial.waited, overlapped.waited),
        ("exposed on the timeline, ms", *(exposed(report) for report in reports)),
    ]
    lines = [f"{'':46}{'serialised':>12}{'overlapped':>12}"]
    lines += [f"{name:46}{cell(a):>12}{cell(b):>12}" for name, a, b in rows]
    shares = [hidden(report) for report in reports]
    for title, share in shares[0].items():
        pair = (cell(share, ".1%"), cell(shares[1][title], ".1%"))
        lines.append(f"{title:46}{pair[0]:>12}{pair[1]:>12}")
    verdicts = [report.verdict.value for report in reports]
    lines.append(f"{'verdict':46}{verdicts[0]:>12}{verdicts[1]:>12}")
    lines.append(f"{'effective, by the clock':46}{'':12}{effective(serial, overlapped):>12.3f}")
    saved = reports[1].effective
    if saved is not None:
        lines.append(f"{'effective, by the profiles':46}{'':12}{cell(saved.value, '.3f'):>12}")
    lines.append(
        f"communication of a step: gathers {serial.gathers:.2f} ms, "
        f"reductions {serial.reduces:.2f} ms, of which no schedule of this depth hides "
        f"{cell(least(reports[0]))} ms"
    )
    return "\n".join(lines)


def link_from(args: argparse.Namespace) -> EmulatedLink:
    return EmulatedLink(
        bandwidth=args.bandwidth,
        latency=args.latency,
        ctas=0 if args.copy_engine else args.ctas,
        clusters=1 if args.copy_engine else args.clusters,
    )


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    link = parser.add_argument_group("emulated link")
    link.add_argument("--edp", type=int, default=8, help="ranks that hold the same experts")
    link.add_argument("--bandwidth", type=float, default=50.0, help="bus bandwidth, GB/s")
    link.add_argument("--latency", type=float, default=10.0, help="of a collective, us")
    link.add_argument("--ctas", type=int, default=8, help="of the copy kernel")
    link.add_argument("--clusters", type=int, default=1, help="CTAs per cluster; NCCL's are 4")
    link.add_argument("--copy-engine", action="store_true", help="copy without any SM")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_link_arguments(parser)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v3" if on_gpu else "tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--no-budget", action="store_true", help="leave no SM free")
    parser.add_argument("--fused", action="store_true", help="the unsplit twin: nothing can hide")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--profile", metavar="DIR", type=Path, help="keep the profiles here")
    args = parser.parse_args(argv)
    try:
        link = link_from(args)
    except ValueError as error:
        parser.error(str(error))
    for name in ("edp", "layers", "steps"):
        if getattr(args, name) < (2 if name == "edp" else 1):
            parser.error(f"--{name} is {getattr(args, name)}: nothing to show")
    device, preset = torch.device(args.device), PRESETS[args.preset]
    torch.manual_seed(1)
    model = build(preset, args.layers, device, fused=args.fused)
    x = torch.randn(preset.tokens, preset.hidden, device=device)
    x = x.to(next(model.parameters()).dtype)
    print(f"EMULATION: rank 0 of {args.edp}, {link}; {args.layers} layers of {args.preset}")
    if device.type == "cpu":
        print("on a CPU: a toy, whose times show how it works and nothing about a cluster")
    keep = nullcontext(args.profile) if args.profile else tempfile.TemporaryDirectory()
    runs = {}
    with keep as folder, emulated(link, args.edp):
        for name in ("serialised", "overlapped"):
            runs[name] = measure(
                model,
                x,
                link,
                Path(folder) / name,
                serialize=name == "serialised",
                budget=not args.no_budget,
                steps=args.steps,
            )
    serial, overlapped = runs["serialised"], runs["overlapped"]
    report = profiling.check(overlapped.profile, baseline=serial.profile)
    print(overlapped.plan)
    print(profiling.to_text(report))
    print()
    print(to_text(serial, overlapped, (profiling.check(serial.profile), report)))
    if args.profile:
        print(f"profiles of emulated collectives: moe-trace check {args.profile}/overlapped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
