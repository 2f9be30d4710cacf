"""Records the four GPU traces beside this file, and what the clock said in the same run.

    PYTHONPATH=. python tests/data/record_gpu_traces.py OUTPUT_DIRECTORY

Two layers of dense work and real experts train on one Hopper GPU. No process group is involved: a
collective on fc2's weight (its gather, and the reduction of its gradient) is emulated by a copy
kernel of a few programs on a high-priority stream, which follows NCCL's rules: it starts after what
the current stream was given before its issue, and a wait holds up the current stream. Only the
schedule differs between the traces:

    split        gather issued before stage 1; reduction as soon as the gradient is enqueued
    late         each issued once the stage that should hide it is enqueued
    fused        the schedule of split on the unsplit node
    serialised   the schedule of split, each waited for at its issue

A copy is sized to take a stated share of stage 1's forward time. Stages leave SMs free for it in
every variant, the serialised one included, so that the clock compares schedules and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import profiling
from megamoe import MegaMoEExperts, mega_moe_stage1
from profiling import ranges
from profiling.ranges import Kind

VARIANTS = ("split", "late", "fused", "serialised")
LAYERS, TOKENS, TOP_K, EXPERTS, HIDDEN, FFN, DENSE = 2, 16384, 8, 16, 2048, 1024, 4096
PROGRAMS = 16  # of a copy; as many SMs are left to it
ITERATIONS = 10  # recorded
ROUNDS, STEPS = 48, 3  # timed: the variants take turns, each with so many steps
SETTLE = 10  # steps before a recording

_WAIT_OF = {Kind.PARAM_GATHER: Kind.PARAM_WAIT, Kind.GRAD_REDUCE: Kind.GRAD_WAIT}


@triton.jit
def emulated_collective(source, target, numel, rounds, BLOCK: tl.constexpr):
    for _ in range(rounds):
        for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < numel
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def copy(source: Tensor, target: Tensor, rounds: int) -> None:
    """Copy as a collective would, ``rounds`` times over: a link is slower than memory."""
    grid = (PROGRAMS,)
    emulated_collective[grid](source, target, source.numel(), rounds, BLOCK=8192, num_warps=16)


class Collective:
    """One emulated collective, which is issued and waited for once a step."""

    def __init__(
        self, kind: Kind, name: str, side: torch.cuda.Stream, target: Tensor, rounds: int
    ) -> None:
        self.kind, self.name, self.side = kind, name, side
        self.target, self.rounds = target, rounds
        self.done = torch.cuda.Event()

    def issue(self, source: Tensor) -> None:
        with ranges.span(self.kind, self.name):
            self.side.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(self.side):
                copy(source, self.target, self.rounds)
            self.done = self.side.record_event()

    def wait(self) -> None:
        with ranges.span(_WAIT_OF[self.kind], self.name):
            torch.cuda.current_stream().wait_event(self.done)


class Layer(nn.Module):
    """Dense work, then experts, each beside a residual connection."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.dense = nn.Sequential(
            nn.Linear(HIDDEN, DENSE, bias=False, **options),
            nn.Linear(DENSE, HIDDEN, bias=False, **options),
        )
        self.experts = MegaMoEExperts(HIDDEN, FFN, EXPERTS, backend=backend, **options)
        self.experts.set_sm_budget(lambda: PROGRAMS)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = x + self.dense(x)
        return x + self.experts(x, ids, weights)


class Model(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(backend) for _ in range(LAYERS))
        ranges.name_modules(self)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, ids, weights)
        return x


class Run:
    """The model, its inputs and its collectives."""

    def __init__(self, backend: str, share: float) -> None:
        torch.manual_seed(0)
        self.model = Model(backend)
        on_gpu = {"device": "cuda"}
        # Zeros take the least power. With random data the chip reaches its limit and sinks its
        # clock, by how much depends on what ran before, and the schedules cannot be compared.
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, **on_gpu).requires_grad_()
        self.ids = torch.rand(TOKENS, EXPERTS, **on_gpu).topk(TOP_K).indices
        self.weights = torch.rand(TOKENS, TOP_K, **on_gpu).requires_grad_()
        self.dy = torch.zeros_like(self.x)
        side = torch.cuda.Stream(priority=-1)
        self.experts = [layer.experts for layer in self.model.layers]
        fc2 = self.experts[0].fc2_weight.weight.detach()
        self.spare = [torch.empty_like(fc2) for _ in range(2)]
        self.stage1_ms = statistics.median(_times(self._stage1, 10))
        self.round_ms = statistics.median(_times(lambda: copy(fc2, self.spare[0], 8), 10)) / 8
        self.rounds = max(1, round(share * self.stage1_ms / self.round_ms))
        self.gathers, self.reductions, self.masters = [], [], []
        for experts in self.experts:
            name = f"{experts.range_name}.fc2_weight"
            weight = experts.fc2_weight.weight.detach()
            shard = torch.empty_like(weight)
            self.masters.append(weight.clone())
            self.gathers.append(Collective(Kind.PARAM_GATHER, name, side, weight, self.rounds))
            self.reductions.append(Collective(Kind.GRAD_REDUCE, name, side, shard, self.rounds))

    @torch.no_grad()
    def _stage1(self) -> None:
        experts = self.experts[0]
        mega_moe_stage1(
            self.x.detach(),
            self.ids,
            self.weights.detach(),
            experts.fc1_weight.weight,
            None,
            num_experts=EXPERTS,
            backend=experts.backend,
        )

    @contextmanager
    def schedule(self, variant: str) -> Iterator[None]:
        """Hang a variant's collectives on the weights."""
        hooks = []
        for experts, master, gather, reduction in zip(
            self.experts, self.masters, self.gathers, self.reductions, strict=True
        ):
            experts.fused = variant == "fused"
            fc1, fc2 = experts.fc1_weight, experts.fc2_weight
            first = fc2 if variant == "late" else fc1
            waits_at = fc1 if variant == "serialised" else fc2
            hooks += [
                first.register_forward_pre_hook(_issue_gather(gather, master)),
                waits_at.register_forward_pre_hook(_wait(gather)),
                (fc1 if variant == "late" else fc2).weight.register_post_accumulate_grad_hook(
                    _issue_reduction(reduction, fc2.weight, at_once=variant == "serialised")
                ),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def step(self) -> None:
        self.model(self.x, self.ids, self.weights).backward(self.dy)
        for reduction in self.reductions:
            reduction.wait()
        for tensor in (self.x, self.weights, *self.model.parameters()):
            tensor.grad = None

    def communicate(self) -> None:
        """Do a step's collectives and nothing else."""
        for experts, collective in zip(
            (*self.experts, *self.experts), (*self.gathers, *self.reductions), strict=True
        ):
            collective.issue(self.masters[self.experts.index(experts)])
            collective.wait()


def _issue_gather(gather: Collective, master: Tensor) -> Callable[..., None]:
    return lambda *_: gather.issue(master)


def _wait(collective: Collective) -> Callable[..., None]:
    return lambda *_: collective.wait()


def _issue_reduction(
    reduction: Collective, weight: nn.Parameter, at_once: bool
) -> Callable[..., None]:
    def hook(*_: object) -> None:
        assert weight.grad is not None
        reduction.issue(weight.grad)
        if at_once:
            reduction.wait()

    return hook


def _times(call: Callable[[], None], count: int, warm: int = 2) -> list[float]:
    """Return how long each of ``count`` calls kept the current stream, in ms."""
    for _ in range(warm):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def record(run: Run, variant: str, output: Path) -> None:
    """Write one variant's trace."""
    with tempfile.TemporaryDirectory() as directory, run.schedule(variant):
        for _ in range(SETTLE):
            run.step()
        with profiling.record(directory, active=ITERATIONS, record_shapes=False) as recorder:
            for _ in range(ITERATIONS + 2):
                run.step()
                recorder.step()
        (trace,) = Path(directory).iterdir()
        (output / f"gpu_{variant}.pt.trace.json.gz").write_bytes(trace.read_bytes())


def measure(run: Run) -> dict[str, object]:
    """Return what the clock says without a profiler, in ms.

    The variants take turns in an order that rotates, so that none always follows the same other.
    """
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(ROUNDS):
        first = turn % len(VARIANTS)
        for variant in VARIANTS[first:] + VARIANTS[:first]:
            with run.schedule(variant):
                times[variant].append(statistics.median(_times(run.step, STEPS)))
    alone = _times(run.communicate, ROUNDS)
    step = {variant: statistics.median(values) for variant, values in times.items()}
    communication = statistics.median(alone)
    saved = [a - b for a, b in zip(times["serialised"], times["split"], strict=True)]
    return {
        "step_ms": step,
        "step_range_ms": {variant: [min(v), max(v)] for variant, v in times.items()},
        "communication_ms": communication,
        "communication_range_ms": [min(alone), max(alone)],
        "effective": statistics.median(saved) / communication,
        "effective_quartiles": [q / communication for q in statistics.quantiles(saved, n=4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the GPU traces of the tests.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--backend", default="triton", help="who computes the stages")
    parser.add_argument(
        "--share", type=float, default=0.8, help="a copy's time over stage 1's forward time"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.backend, arguments.share)
    clock = measure(run)  # compiles all there is to compile, too
    for variant in VARIANTS:
        record(run, variant, arguments.output)
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "backend": arguments.backend,
        "layers": LAYERS,
        "tokens": TOKENS,
        "top_k": TOP_K,
        "experts": EXPERTS,
        "hidden": HIDDEN,
        "ffn": FFN,
        "collectives_per_step": 2 * LAYERS,
        "collective_programs": PROGRAMS,
        "collective_rounds": run.rounds,
        "stage1_forward_ms": run.stage1_ms,
        **clock,
    }
    text = json.dumps(facts, indent=1)
    (arguments.output / "gpu_clock.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
