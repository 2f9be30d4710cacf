"""When the weights are asked for, when their gradients appear, and what a profile shows of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megamoe import MegaMoEExperts
from profiling.ranges import Kind, label, name_modules, parse
from tests.megamoe_cases import SEED

SPLIT = [
    "fetch fc1",
    Kind.STAGE1_FORWARD,
    "fetch fc2",
    Kind.STAGE2_FORWARD,
    Kind.STAGE2_BACKWARD,
    "gradient fc2",
    Kind.STAGE1_BACKWARD,
    "gradient fc1",
]
FUSED = [
    "fetch fc1",
    "fetch fc2",
    Kind.STAGE1_FORWARD,
    Kind.STAGE2_FORWARD,
    Kind.STAGE2_BACKWARD,
    Kind.STAGE1_BACKWARD,
    "gradient fc1",
    "gradient fc2",
]


def build(fused: bool) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(SEED)
    model = torch.nn.ModuleDict({"experts": MegaMoEExperts(8, 6, 4, fused=fused)})
    name_modules(model)
    return model, (
        torch.randn(10, 8, requires_grad=True),
        torch.randint(4, (10, 2)),
        torch.rand(10, 2),
    )


def mark(text: str, *_: object) -> None:
    with torch.profiler.record_function(text):
        pass


def record(fused: bool) -> list[Any]:
    """The profiler's events of one forward and backward, in order of time."""
    model, inputs = build(fused)
    experts = model["experts"]
    for name in ("fc1", "fc2"):
        module = getattr(experts, f"{name}_weight")
        module.register_forward_pre_hook(partial(mark, f"fetch {name}"))
        module.weight.register_post_accumulate_grad_hook(partial(mark, f"gradient {name}"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        experts(*inputs).sum().backward()
    return sorted(profiler.events(), key=lambda event: event.time_range.start)


@pytest.mark.parametrize(("fused", "want"), [(False, SPLIT), (True, FUSED)], ids=["split", "fused"])
def test_order_of_fetches_stages_and_gradients(fused: bool, want: list[Any]) -> None:
    """In the split layer W2's gradient is out before stage 1's backward; in the fused one not."""
    seen = []
    for event in record(fused):
        found = parse(event.name)
        if found is not None:
            assert found.name == "experts"
            seen.append(found.kind)
        elif event.name.startswith(("fetch", "gradient")):
            seen.append(event.name)
    if fused:
        seen[-2:] = sorted(seen[-2:])  # both leave one node; their order means nothing
    assert seen == want


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
def test_every_product_runs_inside_its_stage_on_the_calling_thread(fused: bool) -> None:
    events = record(fused)
    stages = [event for event in events if parse(event.name)]
    products = [event for event in events if event.name == "aten::mm"]
    inside = {stage.name: 0 for stage in stages}
    for product in products:
        holders = [
            stage
            for stage in stages
            if stage.time_range.start <= product.time_range.start
            and product.time_range.end <= stage.time_range.end
        ]
        assert len(holders) == 1
        assert holders[0].thread == product.thread
        inside[holders[0].name] += 1
    experts = 4
    assert inside == {
        label(Kind.STAGE1_FORWARD, "experts"): experts,
        label(Kind.STAGE2_FORWARD, "experts"): experts,
        label(Kind.STAGE2_BACKWARD, "experts"): 2 * experts,
        label(Kind.STAGE1_BACKWARD, "experts"): 2 * experts,
    }
