"""Where collectives are issued and waited for; the twins issue them where nothing hides."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megamoe import MegaMoEExperts
from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from overlap.gather import GatherSchedule
from tests.overlap_models import Model, own_batch
from tests.overlap_spies import log_forwards, spying
from tests.ranks import Ranks

COMPUTE = re.compile("enter|dW")  # log entries that are no collective's


def steps(count: int, ep: int = 2, **config: Any) -> tuple[list[list[str]], str]:
    """The log of each iteration (zero_grad to step) of a small model, and the printed plan."""
    groups = ProcessGroups.build(expert_parallel_size=ep)
    model = Model(groups.ep)
    ddp = DistributedDataParallel(model, OverlapConfig(**config), groups)
    optimizer = DistributedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)
    tokens, targets = own_batch(0)
    logs = []
    with spying() as log:
        log_forwards(model, log)

        def note_stages(experts: MegaMoEExperts, path: str) -> None:
            """Log the backward of the products: stage 2 runs before stage 1."""
            experts.fc2_weight.weight.register_hook(lambda g: log.append(f"dW2 {path}"))
            experts.fc1_weight.weight.register_hook(lambda g: log.append(f"dW1 {path}"))

        for path, module in model.named_modules():
            if isinstance(module, MegaMoEExperts):
                note_stages(module, path)
        for _ in range(count):
            log.clear()
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(tokens), targets)
            loss.backward()
            optimizer.step()
            assert loss.isfinite()
            logs.append(list(log))
    return logs, str(ddp.plan())


def test_w2_is_gathered_from_the_pre_hook_of_w1(ranks: Ranks) -> None:
    for logs, _ in ranks.run(4, steps, 3):
        for log in logs[1:]:
            for block in ("blocks.0.moe.experts", "blocks.1.moe.experts"):
                issue = log.index(f"gather {block}.fc2_weight")
                # In fc1's hook: w1 has been waited for, stage 1 has not begun.
                assert log[issue - 1] == f"wait gather {block}.fc1_weight"
                assert log[issue + 1] == f"enter {block}.fc1_weight"
                wait = log.index(f"wait gather {block}.fc2_weight")
                next_gather = log[wait + 1].startswith("gather")
                assert log[wait + 1 + next_gather] == f"enter {block}.fc2_weight"


def test_the_first_forward_gathers_nothing_and_later_ones_everything_once(ranks: Ranks) -> None:
    for logs, _ in ranks.run(4, steps, 3):
        head = logs[0][: logs[0].index("enter head")]
        assert not [entry for entry in head if "gather" in entry]
        for log in logs[1:]:
            gathers = [entry for entry in log if entry.startswith("gather")]
            assert len(gathers) == len(set(gathers)) == 5


def test_the_step_issues_the_first_gather_only(ranks: Ranks) -> None:
    for logs, _ in ranks.run(4, steps, 2):
        for log in logs:
            after = log[len(log) - 1 - log[::-1].index("wait reduce dense.0") :]
            assert [entry for entry in after if "gather" in entry] == ["gather dense.0"]


@pytest.mark.parametrize("depth", [2, 3, 99])
def test_deeper_prefetch_issues_earlier(ranks: Ranks, depth: int) -> None:
    for logs, _ in ranks.run(2, steps, 2, ep=1, prefetch_depth=depth):
        issued = [e for e in logs[0] if e.startswith("gather")]
        assert len(issued) == min(depth, 5)


def test_dw2_is_reduced_before_stage_1_goes_backward_from_the_first_iteration_on(
    ranks: Ranks,
) -> None:
    for logs, _ in ranks.run(4, steps, 2):
        for log in logs:
            for block in ("blocks.0.moe.experts", "blocks.1.moe.experts"):
                issue = log.index(f"reduce {block}.fc2_weight")
                assert log[issue - 1] == f"dW2 {block}"
                assert issue < log.index(f"dW1 {block}")
                assert log.index(f"dW1 {block}") < log.index(f"wait reduce {block}.fc2_weight")


def test_twin_depth_0_gathers_w2_after_stage_1(ranks: Ranks) -> None:
    for logs, _ in ranks.run(2, steps, 2, ep=1, prefetch_depth=0):
        log = logs[1]
        issue = log.index("gather blocks.0.moe.experts.fc2_weight")
        assert issue > log.index("enter blocks.0.moe.experts.fc1_weight")
        assert log[issue + 1] == "wait gather blocks.0.moe.experts.fc2_weight"


def test_twin_shared_bucket_moves_both_weights_at_once(ranks: Ranks) -> None:
    shared = "blocks.0.moe.experts.fc1_weight,blocks.0.moe.experts.fc2_weight"
    for logs, plan in ranks.run(2, steps, 2, ep=1, share_expert_buckets=True):
        log = logs[1]
        assert log.index(f"wait gather {shared}") < log.index(
            "enter blocks.0.moe.experts.fc1_weight"
        )
        assert log.index(f"reduce {shared}") > log.index("dW1 blocks.0.moe.experts")
        assert shared in plan


def test_twin_group_of_one_is_silent_and_says_so(ranks: Ranks) -> None:
    for logs, plan in ranks.run(4, steps, 2, ep=4):
        moved = {entry.split()[-1] for log in logs for entry in log if not COMPUTE.match(entry)}
        assert moved == {"dense.0"}
        lines = plan.splitlines()
        weights = [index for index, line in enumerate(lines) if "fc1_weight" in line]
        assert len(weights) == 2
        assert all("edp x1" in lines[index + 1] for index in weights)
        assert all("a group of one" in lines[index + 2] for index in weights)
        assert max(map(len, lines)) <= 100
    [(logs, plan)] = ranks.run(1, steps, 2, ep=1)
    assert all(COMPUTE.match(entry) for log in logs for entry in log)
    assert plan.count("a group of one") == 5


def test_serialised_waits_where_it_issues(ranks: Ranks) -> None:
    for logs, _ in ranks.run(2, steps, 2, ep=1, serialize=True):
        for log in logs:
            issues = [i for i, e in enumerate(log) if e.startswith(("gather", "reduce"))]
            assert len(issues) >= 6
            assert all(log[i + 1] == f"wait {log[i]}" for i in issues)
        # The places are those of the overlapped run.
        issue = logs[1].index("gather blocks.0.moe.experts.fc2_weight")
        assert logs[1][issue + 2] == "enter blocks.0.moe.experts.fc1_weight"
        issue = logs[1].index("reduce blocks.0.moe.experts.fc2_weight")
        assert issue < logs[1].index("dW1 blocks.0.moe.experts")


def test_without_overlap_the_step_does_it_all(ranks: Ranks) -> None:
    config = {"overlap_param_gather": False, "overlap_grad_reduce": False}
    for logs, _ in ranks.run(2, steps, 2, ep=1, **config):
        for log in logs:
            last = max(i for i, e in enumerate(log) if e.startswith("dW"))
            kinds = [e.split()[:2] for e in log[last + 1 :]]
            kinds = [" ".join(k[:2]) if k[0] == "wait" else k[0] for k in kinds]
            assert (
                kinds == ["reduce"] * 5 + ["wait reduce"] * 5 + ["gather"] * 5 + ["wait gather"] * 5
            )


class Sized:
    """As much of a bucket as the order of gathers looks at."""

    def __init__(self, nbytes: int) -> None:
        self.layout = SimpleNamespace(nbytes=nbytes)


@pytest.mark.parametrize(
    ("sizes", "depth", "issuers"),
    [  # by place: None is the step, a number the place whose pre-hook issues it
        ([100, 100, 100, 100], 1, [None, 0, 1, 2]),
        ([100, 100, 100, 100], 2, [None, None, 0, 1]),
        ([1, 100, 100, 100], 1, [None, None, 1, 2]),  # a handful of bytes hides no gather
        ([1, 2, 100, 100], 1, [None, 0, 0, 2]),  # the second is not small beside the first
        ([100, 100, 1, 100], 1, [None, 0, 1, 1]),
        ([1, 100, 100, 100], 0, [None, 1, 2, 3]),  # depth 0 hides nothing
        ([7, 100, 100, 100], 1, [None, 0, 1, 2]),  # not small enough
    ],
)
def test_small_buckets_take_the_next_one_along(
    sizes: list[int], depth: int, issuers: list[int | None]
) -> None:
    buckets: Any = [Sized(nbytes) for nbytes in sizes]
    streams: Any = None
    schedule = GatherSchedule(buckets, streams, depth=depth, overlap=True, serialize=False)
    assert [schedule.issuer(position) for position in range(len(sizes))] == issuers
    assert schedule.first() == buckets[: issuers.count(None)]
