"""The least that the split's schedule leaves exposed, from the times of its stages and collectives.

Forward, prefetch depth 1: the sum of max(0, G_j - C_{j-1}), where the first gather runs beside the
last part of the optimizer's step.

Backward: the ends F_j of the reductions, one after the other, none begun before its gradient is
ready, against when the optimizer needs them:

    max_j [ F_j - d_j ]+     d_j = T                       in the half of the bytes reduced first
                                 = T + O_early             among the buckets gathered first
                                 = T + O_early + O_first   elsewhere

T: the end of the backward; O: the optimizer's time for these buckets, by their bytes. With all
d_j = T, as where gradients are clipped, it is at least the last reduction: "backward, all needed at
its end".
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch

from benchmarks.ranks.here import Here
from benchmarks.ranks.training import Training
from overlap.bucket import Bucket
from profiling.bounds import backward_bound, forward_bound
from profiling.ranges import Kind, parse

__all__ = ["bound", "stage_times"]


def bound(
    here: Here, training: Training, layers: int, stages: dict[str, float]
) -> dict[str, float]:
    """The bounds, and the times of the collectives one by one, in ms. It spoils the gradients."""
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

    whole = sum(bucket.layout.nbytes for bucket in buckets.values())

    def stepping(part: Sequence[Bucket]) -> int:
        share = sum(bucket.layout.nbytes for bucket in part) / whole
        return _ns(stages["optimizer_step"] * share)

    first = training.ddp.gather.first()
    early = [bucket for bucket in training.ddp.reduce.first_half() if bucket not in first]
    rest = [bucket for bucket in buckets.values() if bucket not in (*early, *first)]
    gathers = [_ns(alone["fc1 gather"]), _ns(alone["fc2 gather"])] * layers
    compute = [_ns(stages["stage1.forward"]), _ns(stages["stage2.forward"])] * layers
    # From dW2 on: stage 1 backward, then the next layer's stage 2 backward.
    spans = [_ns(stages["stage1.backward"]), _ns(stages["stage2.backward"])] * layers
    ready = [0, *itertools.accumulate(spans[:-1])]
    reductions = [_ns(alone["fc2 reduce"]), _ns(alone["fc1 reduce"])] * layers
    needed = []
    for layer, weight in itertools.product(reversed(range(layers)), ("fc2", "fc1")):
        bucket = buckets[f"layers.{layer}.experts.{weight}_weight"]
        before = [] if bucket in early else early if bucket in first else [*early, *first]
        needed.append(ready[-1] + stepping(before))
    at_end = [ready[-1]] * len(ready)
    return {
        "forward": forward_bound(gathers, [stepping(rest), *compute[:-1]]) / 1e6,
        "backward": backward_bound(reductions, ready, needed) / 1e6,
        "backward, all needed at its end": backward_bound(reductions, ready, at_end) / 1e6,
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


def stage_times(here: Here, training: Training) -> dict[str, float]:
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
