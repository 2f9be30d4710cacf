"""Host time that the engine's hooks and ranges add, profiler off, beside Megatron-core's DDP.

    python benchmarks/hook_overhead.py [--ranks 2] [--layers 48] [--rounds 40]

The model is all weight modules, two to a layer, and so small that its arithmetic is nothing: what
is left is what Python and the dispatcher do. Three copies of it take turns in every round: bare, in
this engine, in Megatron-core's DDP (through the tests' CPU shim; left out where it is not
installed). "per module" is forward and backward together, less the bare model's, by weight
modules; "step" is finishing the gradients, clipping, AdamW and zero_grad. With one rank this
engine issues no collective; Megatron-core issues them on its group of one.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import multiprocessing
import platform
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the shim, which lives with the tests

from megamoe import MegaMoEWeightModule
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from profiling import ranges
from tests import megatron_shim

SHAPE = (1, 8, 8)


class Layer(nn.Module):
    """fc1_weight() and fc2_weight(), each followed by one product."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1_weight = MegaMoEWeightModule(SHAPE)
        self.fc2_weight = MegaMoEWeightModule(SHAPE)
        for module in (self.fc1_weight, self.fc2_weight):
            nn.init.orthogonal_(module.weight.data[0])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.matmul(x, self.fc1_weight())
        return torch.matmul(x, self.fc2_weight())


class Subject(NamedTuple):
    """A model with its optimizer, and how one iteration of it goes."""

    name: str
    forward_backward: Callable[[], None]
    step: Callable[[], None]
    context: Callable[[], Any] = nullcontext  # around a round


def bare(model: nn.Module, x: Tensor) -> Subject:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Subject("bare model", lambda: model(x).sum().backward(), step)


def engine(model: nn.Module, x: Tensor) -> Subject:
    groups = ProcessGroups.build()
    ddp = DistributedDataParallel(model, OverlapConfig(), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-4)

    def step() -> None:
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Subject("this engine", lambda: ddp(x).sum().backward(), step)


def megatron(model: nn.Module, x: Tensor) -> Subject:
    megatron_shim.initialize(expert_parallel_size=1)
    ddp = megatron_shim.wrap(model, bucket_size=model[0].fc1_weight.weight.numel())
    optimizer = megatron_shim.adamw(ddp, lr=1e-4, min_lr=1e-4, weight_decay=0.01, clip_grad=1.0)

    def step() -> None:
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()

    forward_backward = lambda: ddp(x).sum().backward()  # noqa: E731
    return Subject(
        "megatron-core DDP", forward_backward, step, lambda: megatron_shim.on_cpu(intercept=False)
    )


def measure(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    makers = [bare, engine]
    if importlib.util.find_spec("megatron") is not None:
        makers.append(megatron)
    x = torch.randn(4, SHAPE[-1])
    subjects = [make(nn.Sequential(*(Layer() for _ in range(args.layers))), x) for make in makers]
    times: dict[str, tuple[list[float], list[float]]] = {s.name: ([], []) for s in subjects}
    gc.disable()
    for round_ in range(args.warmup + args.rounds):
        for subject in subjects:
            dist.barrier()
            with subject.context():
                for _ in range(args.iterations):
                    start = time.perf_counter()
                    subject.forward_backward()
                    middle = time.perf_counter()
                    subject.step()
                    end = time.perf_counter()
                    if round_ >= args.warmup:
                        times[subject.name][0].append((middle - start) * 1e6)
                        times[subject.name][1].append((end - middle) * 1e6)
        gc.collect()
    if rank == 0:
        report(args, times)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, times: dict[str, tuple[list[float], list[float]]]) -> None:
    modules = 2 * args.layers
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if len(times) > 2:
        from importlib.metadata import version

        versions.append(f"megatron-core {version('megatron-core')}")
    print(", ".join(versions) + f", {platform.machine()}, gloo, 1 thread per rank")
    print(
        f"{args.ranks} rank(s), {modules} weight modules of {list(SHAPE)} fp32, "
        f"{args.rounds} rounds of {args.iterations} iterations, interleaved; medians [quartiles]"
    )
    span = timeit.timeit(lambda: ranges.span(ranges.Kind.PARAM_WAIT, "x"), number=100_000) * 10
    print(f"one range with no profiler running: {span:.2f} us\n")
    base, base_step = (median(values) for values in times["bare model"])
    head = ("", "fwd+bwd us", "quartiles", "of bare", "per module us", "step us", "of bare")
    rows = [head]
    for name, (both, step) in times.items():
        low, _, high = quantiles(both, n=4)
        added = (median(both) - base) / modules
        rows.append(
            (
                name,
                f"{median(both):.0f}",
                f"{low:.0f}-{high:.0f}",
                f"{median(both) / base:.2f}x",
                f"+{added:.1f}" if name != "bare model" else "",
                f"{median(step):.0f}",
                f"{median(step) / base_step:.2f}x",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))
    if len(times) > 2:
        ours, theirs = (
            (median(times[name][0]) - base) / modules
            for name in ("this engine", "megatron-core DDP")
        )
        steps = median(times["this engine"][1]) / median(times["megatron-core DDP"][1])
        print(
            f"\nadded per weight module, ours over Megatron-core's: {ours / theirs:.2f}; "
            f"step, ours over Megatron-core's: {steps:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=48, help="two weight modules each")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=3, help="per round and model")
    parser.add_argument("--warmup", type=int, default=5, help="rounds that do not count")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=measure, args=(rank, args, f"{folder}/store"))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(process.exitcode or 0 for process in ranks))


if __name__ == "__main__":
    main()
