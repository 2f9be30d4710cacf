"""Whole steps of four expert layers: what each schedule costs beside one without communication.

exposed = step - step without collectives
bound   = the least that the split's schedule allows, from the collectives' and stages' times

A GPU's clock drifts with its power and temperature, by more than some schedules differ. So where
there is a bound, exposed is the median of paired differences: in one and the same training, blocks
of steps with the transports and without take turns. Elsewhere it is above "no collectives", which
ran earlier.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import megatron
from benchmarks.ranks.here import Here
from benchmarks.stages import Shape
from megamoe import MegaMoEConfig, MegaMoELayer
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from overlap.bucket import Bucket, GradState, ParamState
from overlap.collectives import InFlight
from profiling.bounds import backward_bound, forward_bound
from profiling.ranges import Kind, parse

LAYERS = 4
PAIRS, BLOCK = 5, 3  # pairs of blocks; timed steps of a block, after one that warms up
SHAPES = {
    "dsv3": Shape(8192, 8, 7168, 2048, 32),
    "qwen3": Shape(8192, 8, 2048, 768, 128),
    "toy": Shape(64, 2, 32, 64, 4),
}


@dataclass(frozen=True)
class Variant:
    """A schedule: how the groups are made, what the engine is told, whether layers are fused."""

    nccl: str = "balanced"
    fused: bool = False
    config: dict[str, Any] = field(default_factory=dict)


BY_NCCL = {"param_gather_transport": "collective", "grad_reduce_transport": "collective"}
BF16 = {"reduce_dtype": torch.bfloat16}
OURS = "split, our defaults"
VARIANTS = {  # what matters most first: where time runs out the tail is lost
    "no collectives": Variant(),
    OURS: Variant(),
    "serialised": Variant("nccl", config={"serialize": True, **BY_NCCL}),
    "fused": Variant("nccl", fused=True, config={"share_expert_buckets": True, **BY_NCCL}),
    "split, nccl default": Variant("nccl", config={"collective_sms": 0, **BY_NCCL}),
    "split, 16 CTAs": Variant("balanced", config=BY_NCCL),
    "split, pulled gather": Variant(config={"grad_reduce_transport": "collective"}),
    "split, bf16 pulled": Variant(config=BF16),
    "late": Variant("nccl", config={"prefetch_depth": 0, **BY_NCCL}),
    "serialised, pulled": Variant(config={"serialize": True}),
    "split, 8 CTAs": Variant("narrow", config=BY_NCCL),
    "split, bf16, 16 CTAs": Variant("balanced", config={**BF16, **BY_NCCL}),
}
BRIEFLY = (  # of the reference backend, whose stages take twice the time
    "no collectives",
    OURS,
    "serialised",
    "split, nccl default",
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
    """A transport that moves nothing: what is left of a step is compute.

    Whoever scales besides the transport that this stands in for still does.
    """

    name = "nothing"
    sms = 0

    def __init__(self, scales: bool = True) -> None:
        self.scales = scales

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> InFlight:
        return InFlight(self, (output, shard), what)

    def reduce_scatter(
        self, shard: Tensor, source: Tensor, what: str, scale: float = 1.0
    ) -> InFlight:
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

    @contextmanager
    def moving_nothing(self) -> Iterator[None]:
        """Run whole steps without collectives meanwhile. The replicas drift apart until the next
        step with them, which makes no difference to its time."""
        self._rest()
        transports = [(bucket.gather_by, bucket.reduce_by) for bucket in self.ddp.buckets]
        for bucket, (_, reduce_by) in zip(self.ddp.buckets, transports, strict=True):
            bucket.gather_by = bucket.reduce_by = _Nothing(reduce_by.scales)
        yield
        self._rest()
        for bucket, both in zip(self.ddp.buckets, transports, strict=True):
            bucket.gather_by, bucket.reduce_by = both

    def _rest(self) -> None:
        """Wait for what the last step left under way: whoever issued a collective waits for it."""
        self.ddp.finish_param_sync()
        for bucket in self.ddp.buckets:
            assert bucket.param_state is ParamState.READY, bucket.name
            assert bucket.grad_state is not GradState.REDUCING, bucket.name

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
    for backend in ("triton", "reference") if here.cuda else ("reference",):
        for shape_name in ("toy",) if here.toy else ("dsv3", "qwen3"):
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
    base = 0.0
    stages: dict[str, float] = {}
    variants: dict[str, Variant | None] = dict(VARIANTS)
    if megatron.available():
        variants["Megatron-core"] = None
    for name, variant in variants.items():
        if backend == "reference" and here.cuda and name not in BRIEFLY:
            continue
        if here.seconds_left() < 15:
            here.say(f"  no time left for {name} and after")
            return
        training: Training | megatron.MegatronTraining
        bound, paired = None, None
        try:
            if variant is None:
                training = megatron.MegatronTraining(here, model, shape)
                ms, spread = steps(here, training.step)
            elif name == "no collectives":
                training = Training(here, model, shape, variant)
                with training.moving_nothing():
                    stages = _stage_times(here, training)
                    ms, spread = steps(here, training.step)
                base = ms
            elif name.startswith("split"):
                training = Training(here, model, shape, variant)
                ms, spread, paired = in_pairs(here, training)
                bound = _bound(here, training, stages)
            else:
                training = Training(here, model, shape, variant)
                ms, spread = steps(here, training.step)
            training.close()
        except (RuntimeError, ValueError) as error:  # out of memory, a kernel that cannot
            here.say(f"  {name}: {type(error).__name__}: {error}")
            here.note(shape=shape_name, backend=backend, variant=name, error=str(error))
            return
        exposed = paired or Exposed(ms - base, ())
        here.say(
            f"  {name:22}{ms:9.2f} ms  ({spread[0]:.2f} to {spread[1]:.2f})" + _say(exposed, bound)
        )
        here.note(
            shape=shape_name,
            backend=backend,
            variant=name,
            step_ms=ms,
            range_ms=spread,
            exposed_ms=exposed.ms,
            paired_ms=exposed.pairs,
            bound_ms=bound,
            stages_ms=stages,
        )
        del training
        _free()


class Exposed(NamedTuple):
    """What collectives add to a step.

    Attributes:
        ms: The median of the pairs, where there are some.
        pairs: Of each pair of blocks, one with and one without collectives.
    """

    ms: float
    pairs: tuple[float, ...]


def _say(exposed: Exposed, bound: dict[str, float] | None) -> str:
    text = f"  exposed {exposed.ms:7.2f}"
    if exposed.pairs:
        text += f"  ({min(exposed.pairs):.2f} to {max(exposed.pairs):.2f})"
    if bound is not None:
        text += (
            f"  bound {bound['forward']:5.2f} + {bound['backward']:5.2f}"
            f"  over it {exposed.ms / _total(bound):5.2f}"
        )
    return text


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def steps(here: Here, step: Callable[[], None]) -> tuple[float, tuple[float, float]]:
    """Median and range of single steps in a row, of the slowest rank."""
    times = here.slowest(_timed(here, step, *((1, 2) if here.toy else (4, 8))))
    return statistics.median(times), (min(times), max(times))


def in_pairs(here: Here, training: Training) -> tuple[float, tuple[float, float], Exposed]:
    """Median and range of single steps with collectives, and what these add to a block's mean.

    Each pair runs its two blocks in the other order than the one before: a drift then counts for
    and against.
    """
    single: list[float] = []
    differences = []

    def with_collectives() -> float:
        times = _timed(here, training.step, 1, BLOCK)
        single.extend(here.slowest(times))
        return here.slowest([statistics.fmean(times)])[0]

    def without() -> float:
        with training.moving_nothing():
            times = _timed(here, training.step, 1, BLOCK)
        return here.slowest([statistics.fmean(times)])[0]

    _timed(here, training.step, 2, 0)  # the orders are learned, the allocator has grown
    for pair in range(2 if here.toy else PAIRS):
        if pair % 2:
            less = without()
            more = with_collectives()
        else:
            more = with_collectives()
            less = without()
        differences.append(more - less)
    exposed = Exposed(statistics.median(differences), tuple(differences))
    return statistics.median(single), (min(single), max(single)), exposed


def _timed(here: Here, step: Callable[[], None], warm: int, count: int) -> list[float]:
    """This rank's times of single steps in a row, in ms."""
    here.barrier()
    for _ in range(warm):
        step()
    if here.cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        marks.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]


def _total(bound: dict[str, float]) -> float:
    return max(1e-3, bound["forward"] + bound["backward"])


def _bound(here: Here, training: Training, stages: dict[str, float]) -> dict[str, float]:
    """What the schedule cannot hide, and the times of its collectives one by one."""
    buckets = {bucket.name: bucket for bucket in training.ddp.buckets}
    alone: dict[str, float] = {}
    for weight in ("fc1", "fc2"):
        bucket = buckets[f"layers.0.experts.{weight}_weight"]

        def gather(bucket: Bucket = bucket) -> None:
            bucket.gather_by.all_gather(bucket.params, bucket.param_shard, "a gather").wait()

        def reduce(bucket: Bucket = bucket) -> None:
            bucket.reduce_by.reduce_scatter(*bucket._outgoing(), "a sum").wait()

        ms = here.medians({"gather": gather, "reduce": reduce}, 1 if here.toy else 3)
        alone.update({f"{weight} {what}": value for what, value in ms.items()})
    # In ns. The first gather runs beside the rest of the optimizer's step.
    gathers = [_ns(alone["fc1 gather"]), _ns(alone["fc2 gather"])] * LAYERS
    compute = [_ns(stages["stage1.forward"]), _ns(stages["stage2.forward"])] * LAYERS
    # From dW2 on: stage 1 backward, then the next layer's stage 2 backward.
    spans = [_ns(stages["stage1.backward"]), _ns(stages["stage2.backward"])] * LAYERS
    ready = [0, *itertools.accumulate(spans[:-1])]
    reductions = [_ns(alone["fc2 reduce"]), _ns(alone["fc1 reduce"])] * LAYERS
    return {
        "forward": forward_bound(gathers, [_ns(stages["optimizer_step"]), *compute[:-1]]) / 1e6,
        "backward": backward_bound(reductions, ready, ready[-1]) / 1e6,
        **alone,
    }


def _ns(ms: float) -> int:
    return int(ms * 1e6)


_TIMED = (
    Kind.STAGE1_FORWARD,
    Kind.STAGE2_FORWARD,
    Kind.STAGE1_BACKWARD,
    Kind.STAGE2_BACKWARD,
    Kind.OPTIMIZER_STEP,
)


def _stage_times(here: Here, training: Training) -> dict[str, float]:
    """Median time of each stage and of the optimizer's step, from a profile of a step."""
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
        if parsed is None or parsed.kind not in _TIMED:
            continue
        ms = event.device_time_total / 1e3 if here.cuda else event.cpu_time_total / 1e3
        if ms:
            times.setdefault(parsed.kind.value.partition("::")[2], []).append(ms)
    result = {name: statistics.median(values) for name, values in times.items()}
    for kind in _TIMED:
        result.setdefault(kind.value.partition("::")[2], 0.0)
    here.say("  " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(result.items())))
    return result
