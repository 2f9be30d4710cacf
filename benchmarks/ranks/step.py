"""Whole steps of four expert layers: what each schedule costs beside one without communication.

exposed  = step - step without collectives
bound    = the least that the split's schedule allows (see `least`)
timeline = exposed and bound as the library reads them off a profile of our defaults

A GPU's clock drifts with its power and temperature, by more than some schedules differ. So where
there is a bound, exposed is the median of paired differences: in one and the same training, blocks
of steps with the transports and without take turns. Elsewhere it is above "no collectives", which
ran earlier. By the clock, exposed includes that compute runs slower beside a collective (memory,
power); on the timeline it does not.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import profiling
from benchmarks.ranks import megatron
from benchmarks.ranks.here import Here
from benchmarks.ranks.least import bound as least_exposed
from benchmarks.ranks.least import stage_times
from benchmarks.ranks.recorded import pack, record
from benchmarks.ranks.training import BY_NCCL, Tower, Training, Variant
from benchmarks.stages import Shape

LAYERS = 4
PAIRS, FEWER_PAIRS = 5, 3  # of blocks: for our defaults, and for the other splits
BLOCK = 3  # timed steps, after one that warms up
PROFILED = 3  # steps
NEGLIGIBLE = 0.1  # ms; nothing is compared with a bound that is less
SHAPES = {
    "dsv3": Shape(8192, 8, 7168, 2048, 32),
    "qwen3": Shape(8192, 8, 2048, 768, 128),
    "toy": Shape(64, 2, 32, 64, 4),
}
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
    model = Tower(here, shape, backend, LAYERS)
    base = 0.0
    stages: dict[str, float] = {}
    profiled = here.toy or backend == "triton"
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
        bound, paired, timeline = None, None, None
        try:
            if variant is None:
                training = megatron.MegatronTraining(here, model, shape)
                ms, spread = steps(here, training.step)
            elif name == "no collectives":
                training = Training(here, model, shape, variant)
                with training.moving_nothing():
                    stages = stage_times(here, training)
                    ms, spread = steps(here, training.step)
                    if profiled:
                        _profile(here, training, f"step_{shape_name}_no_collectives")
                base = ms
            elif name.startswith("split"):
                training = Training(here, model, shape, variant)
                ms, spread, paired = in_pairs(
                    here, training, PAIRS if name == OURS else FEWER_PAIRS
                )
                if profiled and name == OURS:
                    timeline = _timeline(
                        here, _profile(here, training, f"step_{shape_name}_our_defaults")
                    )
                bound = least_exposed(here, training, LAYERS, stages)
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
        if timeline:
            here.say(f"  {'':22}on the timeline" + "".join(_say_timeline(timeline)))
        here.note(
            shape=shape_name,
            backend=backend,
            variant=name,
            step_ms=ms,
            range_ms=spread,
            exposed_ms=exposed.ms,
            paired_ms=exposed.pairs,
            bound_ms=bound,
            timeline=timeline,
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
        at_end = bound["backward, all needed at its end"]
        text += (
            f"  bound {bound['forward']:5.2f} + {bound['backward']:5.2f}"
            f"  over it {_over(exposed.ms, bound['forward'] + bound['backward'])}"
            f"  (all needed at backward's end: {at_end:5.2f}, over it "
            f"{_over(exposed.ms, bound['forward'] + at_end)})"
        )
    return text


def _over(exposed: float, bound: float) -> str:
    return f"{exposed / bound:5.2f}" if bound >= NEGLIGIBLE else "    -"


def _profile(here: Here, training: Training, name: str) -> Path:
    """Keep a profile of a few steps."""
    folder = here.out / "profiles" / name
    record(here, training, folder, PROFILED)
    if here.rank == 0:
        pack(here, folder)
    return folder


def _timeline(here: Here, folder: Path) -> dict[str, dict[str, float | None]]:
    """On rank 0, the library's bounds and what was exposed, means of an iteration and rank."""
    if here.rank:
        return {}
    try:
        bounds = profiling.check(folder).bounds
    except profiling.LoadError as error:  # the other ranks go on
        here.say(f"  {error}")
        return {}
    return {b.name: {"least_ms": b.least_ms, "exposed_ms": b.exposed_ms} for b in bounds}


def _say_timeline(timeline: dict[str, dict[str, float | None]]) -> list[str]:
    words = []
    for name, figures in timeline.items():
        exposed, least = figures["exposed_ms"], figures["least_ms"]
        if exposed is None or least is None:
            words.append(f"  {name}: unknown")
        else:
            words.append(
                f"  {name}: exposed {exposed:.2f} bound {least:.2f} over it {_over(exposed, least)}"
            )
    return words


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def steps(here: Here, step: Callable[[], None]) -> tuple[float, tuple[float, float]]:
    """Median and range of single steps in a row, of the slowest rank."""
    times = here.slowest(_timed(here, step, *((1, 2) if here.toy else (4, 8))))
    return statistics.median(times), (min(times), max(times))


def in_pairs(
    here: Here, training: Training, pairs: int
) -> tuple[float, tuple[float, float], Exposed]:
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
    for pair in range(2 if here.toy else pairs):
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
