"""Whole steps of four expert layers: what each schedule costs beside one without communication.

exposed = step - step without collectives
bound   = the least that the split's schedule allows, from the collectives' and stages' times
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import megatron
from benchmarks.ranks.here import Here
from benchmarks.stages import Shape
from megamoe import MegaMoEConfig, MegaMoELayer
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from overlap.collectives import InFlight
from overlap.emulation.bounds import exposed_backward, exposed_forward
from profiling.ranges import Kind, parse

LAYERS = 4
SHAPES = {
    "dsv3": Shape(8192, 8, 7168, 2048, 32),
    "qwen3": Shape(8192, 8, 2048, 768, 128),
    "toy": Shape(64, 2, 32, 64, 4),
}


@dataclass(frozen=True)
class Variant:
    """A schedule: how the groups are made, what the engine is told, whether layers are fused."""

    nccl: str = "hidden"
    fused: bool = False
    config: dict[str, Any] = field(default_factory=dict)


PULLED = {"param_gather_transport": "copy_engine", "grad_reduce_transport": "copy_engine"}
VARIANTS = {
    "no collectives": Variant(),
    "serialised": Variant("nccl", config={"serialize": True}),
    "fused": Variant("nccl", fused=True, config={"share_expert_buckets": True}),
    "late": Variant("nccl", config={"prefetch_depth": 0}),
    "split, nccl default": Variant("nccl", config={"collective_sms": 0}),
    "split, 8 CTAs": Variant("hidden"),
    "split, 16 CTAs": Variant("balanced"),
    "split, pulled gather": Variant("hidden", config={"param_gather_transport": "copy_engine"}),
    "split, pulled both": Variant("hidden", config=PULLED),
    "split, pulled, bf16": Variant("hidden", config={"reduce_dtype": torch.bfloat16, **PULLED}),
    "split, bf16 reduce": Variant("hidden", config={"reduce_dtype": torch.bfloat16}),
}


BRIEFLY = (  # of the reference backend, whose stages take twice the time
    "no collectives",
    "serialised",
    "split, nccl default",
    "split, 8 CTAs",
    "split, pulled gather",
    "Megatron-core",
)


class Tower(nn.Module):
    """Expert layers around residuals, uniform routing, [T, H] -> [T, H]."""

    def __init__(self, here: Here, shape: Shape, backend: str, layers: int = LAYERS) -> None:
        super().__init__()
        config = MegaMoEConfig(
            hidden_size=shape.hidden,
            moe_ffn_hidden_size=shape.ffn,
            num_moe_experts=shape.experts,
            moe_router_topk=shape.top_k,
            moe_router_force_load_balancing=True,
            mega_moe_backend=backend,
        )
        dtype = torch.bfloat16 if here.cuda else torch.float32
        self.layers = nn.ModuleList(
            MegaMoELayer(config, dtype=dtype, device="meta") for _ in range(layers)
        )
        self.to_empty(device=here.device)
        for param in self.parameters():  # drawn on the device: the layers' own way takes minutes
            nn.init.normal_(param, std=param.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


class _Nothing:
    """A transport that moves nothing: what is left of a step is compute."""

    sms = 0

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> InFlight:
        return InFlight(self, (output, shard), what)

    def reduce_scatter(self, shard: Tensor, source: Tensor, what: str) -> InFlight:
        return InFlight(self, (shard, source), what)

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Training:
    """One variant, wrapped and ready to step."""

    def __init__(self, here: Here, model: Tower, shape: Shape, variant: Variant) -> None:
        self.groups = ProcessGroups.build(nccl=variant.nccl)
        for layer in model.layers:
            layer.experts.fused = variant.fused
        with here.peer_memory():
            config = OverlapConfig(**variant.config)
            self.ddp = DistributedDataParallel(model, config, self.groups)
        self.optimizer = DistributedOptimizer(
            self.ddp, torch.optim.AdamW, lr=1e-5, fused=here.cuda or None
        )
        dtype = next(model.parameters()).dtype
        x = torch.randn(shape.tokens, shape.hidden, device=here.device)
        self.x = x.to(dtype).requires_grad_()
        self.dy = torch.randn_like(self.x)

    def move_nothing(self) -> None:
        for bucket in self.ddp.buckets:
            bucket._gather_by = bucket._reduce_by = _Nothing()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.x.grad = None
        self.ddp(self.x).backward(self.dy)
        self.optimizer.step()

    def close(self) -> None:
        self.ddp.remove()
        for group in (self.groups.dp, self.groups.ep, self.groups.edp):
            dist.destroy_process_group(group)


def run(here: Here) -> None:
    for shape_name in ("toy",) if here.toy else ("dsv3", "qwen3"):
        for backend in ("triton", "reference") if here.cuda else ("reference",):
            if here.seconds_left() < 25:
                here.say(f"no time left for {shape_name}, {backend}")
                return
            _compare(here, shape_name, backend)
            _free()


def _compare(here: Here, shape_name: str, backend: str) -> None:
    shape = SHAPES[shape_name]
    here.say(f"\n{shape_name}, {LAYERS} layers, {backend}: {shape}")
    torch.manual_seed(1)
    model = Tower(here, shape, backend)
    base = bound = 0.0
    variants: dict[str, Variant | None] = dict(VARIANTS)
    if megatron.available():
        variants["Megatron-core"] = None
    for name, variant in variants.items():
        if backend == "reference" and here.cuda and name not in BRIEFLY:
            continue
        if here.seconds_left() < 8:
            here.say(f"  no time left for {name} and after")
            return
        training: Training | megatron.MegatronTraining
        try:
            if variant is None:
                training = megatron.MegatronTraining(here, model, shape)
            else:
                training = Training(here, model, shape, variant)
                if name == "no collectives":
                    bound = _bound(here, training)
                    training.move_nothing()
            ms, spread = steps(here, training.step)
            training.close()
        except (RuntimeError, ValueError) as error:  # out of memory, a kernel that cannot
            here.say(f"  {name}: {type(error).__name__}: {error}")
            here.note(shape=shape_name, backend=backend, variant=name, error=str(error))
            return
        base = base or ms
        here.say(
            f"  {name:22}{ms:9.2f} ms  ({spread[0]:.2f} to {spread[1]:.2f})"
            f"  exposed {ms - base:7.2f}  bound {bound:6.2f}"
        )
        here.note(
            shape=shape_name,
            backend=backend,
            variant=name,
            step_ms=ms,
            range_ms=spread,
            exposed_ms=ms - base,
            bound_ms=bound,
        )
        del training
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def steps(here: Here, step: Callable[[], None]) -> tuple[float, tuple[float, float]]:
    """Median and range of single steps in a row, of the slowest rank."""
    warm, count = (1, 2) if here.toy else (3, 7)
    for _ in range(warm):
        step()
    here.barrier()
    times = []
    if here.cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    else:
        times = [here.medians({"step": step}, 1)["step"] for _ in range(count)]
    slowest = torch.tensor([statistics.median(times), max(times)], device=here.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0]), (min(times), float(slowest[1]))


def _bound(here: Here, training: Training) -> float:
    """What the schedule cannot hide, from the times of stages and collectives one by one."""
    stages = _stage_times(here, training)
    ddp = training.ddp
    rounds = 1 if here.toy else 3
    gathers, reduces = {}, {}
    for bucket in ddp.buckets:
        key = (bucket.layout.numel, bucket.group)
        if key in gathers:
            continue

        def gather(bucket: Any = bucket) -> None:
            bucket._gather_by.all_gather(bucket.params, bucket.param_shard, "a gather").wait()

        def reduce(bucket: Any = bucket) -> None:
            bucket._reduce_by.reduce_scatter(bucket.grad_shard, bucket.grads, "a sum").wait()

        ms = here.medians({"gather": gather, "reduce": reduce}, rounds)
        gathers[key], reduces[key] = ms["gather"], ms["reduce"]
    by_name = {b.name: (b.layout.numel, b.group) for b in ddp.buckets}
    keys = {weight: by_name[f"layers.0.experts.{weight}_weight"] for weight in ("fc1", "fc2")}
    waiting = [gathers[keys["fc1"]], gathers[keys["fc2"]]] * LAYERS
    # The first gather runs beside the rest of the optimizer's step.
    waiting[0] = max(0.0, waiting[0] - stages["optimizer_step"])
    compute = [stages["stage1.forward"], stages["stage2.forward"]] * LAYERS
    forward = exposed_forward(waiting, compute, depth=1)
    # From dW2 on: stage 1 backward, then the next layer's stage 2 backward.
    spans = [stages["stage1.backward"], stages["stage2.backward"]] * LAYERS
    ready = [0.0, *itertools.accumulate(spans[:-1])]
    backward = exposed_backward(
        ready, [reduces[keys["fc2"]], reduces[keys["fc1"]]] * LAYERS, ready[-1]
    )
    here.say(
        f"  bound: forward {forward:.2f} ms, backward {backward:.2f} ms; stages "
        + ", ".join(f"{name} {ms:.2f}" for name, ms in stages.items())
        + f"; fc1 and fc2: gathers {gathers[keys['fc1']]:.2f} {gathers[keys['fc2']]:.2f}, "
        f"reductions {reduces[keys['fc1']]:.2f} {reduces[keys['fc2']]:.2f}"
    )
    here.note(bound={"forward": forward, "backward": backward}, stages=stages)
    return forward + backward


def _stage_times(here: Here, training: Training) -> dict[str, float]:
    """Median time of each stage and of the optimizer's step, from a profile of serialised steps."""
    for _ in range(2):
        training.step()
    here.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if here.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        training.step()
        training.ddp.finish_in_flight()
        here.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events():
        parsed = parse(event.name)
        if parsed is None or parsed.kind in (Kind.ITERATION,):
            continue
        ms = event.device_time_total / 1e3 if here.cuda else event.cpu_time_total / 1e3
        if ms:
            times.setdefault(parsed.kind.value.partition("::")[2], []).append(ms)
    result = {name: statistics.median(values) for name, values in times.items()}
    for name in ("stage1.forward", "stage2.forward", "stage1.backward", "stage2.backward"):
        result.setdefault(name, 0.0)
    result.setdefault("optimizer_step", 0.0)
    return {n: ms for n, ms in result.items() if not n.startswith(("param_", "grad_"))}
