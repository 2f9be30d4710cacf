"""The printed plan, and the ranges that a profiler sees."""

from __future__ import annotations

from collections import Counter

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from profiling import ranges
from profiling.ranges import Kind
from tests.overlap_models import Model, own_batch
from tests.ranks import Ranks

BUCKETS = [
    "dense.0",
    "blocks.0.moe.experts.fc1_weight",
    "blocks.0.moe.experts.fc2_weight",
    "blocks.1.moe.experts.fc1_weight",
    "blocks.1.moe.experts.fc2_weight",
]


def plan_of(steps: int, **config: object) -> tuple[object, str]:
    groups = ProcessGroups.build(expert_parallel_size=2)
    ddp = DistributedDataParallel(Model(groups.ep), OverlapConfig(**config), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        tokens, targets = own_batch(0)
        F.cross_entropy(ddp(tokens), targets).backward()
        optimizer.step()
    return ddp.plan(), str(ddp.plan())


def test_plan(ranks: Ranks) -> None:
    for plan, text in ranks.run(4, plan_of, 1):
        assert [b.name for b in plan.buckets] == BUCKETS
        dense, _, fc2, *_ = plan.buckets
        assert (dense.group, dense.group_size, fc2.group, fc2.group_size) == ("dp", 4, "edp", 2)
        assert dense.gather_issued == "optimizer step"
        assert fc2.gather_issued == "pre-hook of #1"
        assert fc2.gather_waited == "pre-hook of #2"
        assert fc2.param_bytes == fc2.grad_bytes == 4 * 2 * 16 * 24
        assert fc2.padding == 0 < dense.padding
        assert "gather order: as first used" in text
        assert (
            "gather 3 KiB by collective from pre-hook of #1, waited for in pre-hook of #2" in text
        )
        assert "reduce order: #4 > #3 > #2 > #1 > #0" in text
        assert len(text.splitlines()) == 2 + 4 * len(BUCKETS)


def test_plan_before_the_first_step_and_without_overlap(ranks: Ranks) -> None:
    off = {"overlap_param_gather": False, "overlap_grad_reduce": False}
    for plan, text in ranks.run(4, plan_of, 0, **off):
        assert "as registered (a guess until the first step)" in text
        assert {b.gather_waited for b in plan.buckets} == {"optimizer step"}
        assert {b.reduce_issued for b in plan.buckets} == {"finish_grad_sync"}
    for plan, _ in ranks.run(4, plan_of, 1, prefetch_depth=2):
        issued = [b.gather_issued for b in plan.buckets]
        assert issued[:3] == ["optimizer step", "optimizer step", "pre-hook of #0"]


def ranges_of_a_step() -> list[tuple[str, str]]:
    groups = ProcessGroups.build(expert_parallel_size=2)
    ddp = DistributedDataParallel(Model(groups.ep), OverlapConfig(), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.SGD, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        tokens, targets = own_batch(0)
        F.cross_entropy(ddp(tokens), targets).backward()
        optimizer.step()

    step()
    ddp.finish_in_flight()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        ddp.finish_in_flight()
    found = (ranges.parse(event.name) for event in profiler.events())
    return [(r.kind.name, r.name) for r in found if r is not None and "overlap" in r.kind.value]


def test_every_collective_runs_inside_its_range(ranks: Ranks) -> None:
    for found in ranks.run(4, ranges_of_a_step):
        count = Counter(found)
        for kind in (Kind.PARAM_GATHER, Kind.PARAM_WAIT, Kind.GRAD_REDUCE, Kind.GRAD_WAIT):
            assert {name: count[kind.name, name] for name in BUCKETS} == dict.fromkeys(BUCKETS, 1)
        assert count[Kind.OPTIMIZER_STEP.name, ""] == 1
        assert sum(count.values()) == 4 * len(BUCKETS) + 1


def test_no_profiler_no_range() -> None:
    with ranges.span(Kind.PARAM_WAIT, "x") as entered:
        assert entered is None
