"""The SM budget: what the books say at each moment of a step, and who is handed them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from overlap import (
    DistributedDataParallel,
    DistributedOptimizer,
    OverlapConfig,
    ProcessGroups,
    collectives,
)
from overlap.budget import SmBudget
from tests.overlap_models import Model, own_batch
from tests.ranks import Ranks


class Flight:
    """A collective whose device work ends when told so."""

    def __init__(self) -> None:
        self.ended = False
        self.asked = 0

    def done(self) -> bool:
        self.asked += 1
        return self.ended


class Lane:
    def __init__(self, sms: int) -> None:
        self.sms = sms


class FakeStreams:
    captured = False

    def capturing(self) -> bool:
        return self.captured


def make() -> tuple[Any, FakeStreams]:
    streams = FakeStreams()
    return SmBudget(streams), streams  # type: ignore[arg-type]


def test_a_collective_counts_from_its_issue_to_its_wait() -> None:
    budget, _ = make()
    lane, flight = Lane(8), Flight()
    assert budget() == 0
    budget.issued(lane, flight)
    assert budget() == 8
    budget.waited(lane, flight)
    assert budget() == 0
    budget.waited(lane, flight)  # e.g. one that the device had reported before


def test_an_event_ends_it_earlier_and_is_asked_in_order() -> None:
    budget, _ = make()
    lane, first, second = Lane(8), Flight(), Flight()
    budget.issued(lane, first)
    budget.issued(lane, second)
    assert budget() == 8
    assert (first.asked, second.asked) == (1, 0)  # one query per launch, not one per collective
    first.ended = True
    assert budget() == 8
    second.ended = True
    assert budget() == 0
    assert (first.asked, second.asked) == (2, 2)


def test_a_wait_covers_what_the_same_transport_began_before() -> None:
    budget, _ = make()
    lane, other = Lane(8), Lane(4)
    flights = [Flight() for _ in range(3)]
    for flight in flights:
        budget.issued(lane, flight)
    budget.issued(other, Flight())
    assert budget() == 12  # two groups run side by side, three collectives of one in turn
    budget.waited(lane, flights[1])
    assert budget() == 12
    budget.waited(lane, flights[2])
    assert budget() == 4


def test_a_transport_without_sms_is_not_even_asked() -> None:
    budget, _ = make()
    flight = Flight()
    budget.issued(Lane(0), flight)
    assert budget() == 0
    assert flight.asked == 0


def test_a_capture_gets_the_fixed_answer_and_asks_no_event() -> None:
    budget, streams = make()
    lane, flight = Lane(8), Flight()
    budget.expect(Lane(0), lane)
    assert budget() == 0
    streams.captured = True
    assert budget() == 8  # whatever is under way now: the replays may find something else
    budget.issued(lane, flight)
    assert budget() == 8
    assert flight.asked == 0


# On a model


class Layer(nn.Module):
    """An expert layer whose stages write down the budget when they are launched."""

    def __init__(self, inner: nn.Module, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.inner = inner
        self.log = log
        self.budget: Callable[[], int] | None = None

    def set_sm_budget(self, budget: Callable[[], int] | None) -> None:
        self.budget = budget

    def note(self, moment: str) -> None:
        assert self.budget is not None
        self.log.append((moment, self.budget()))

    def forward(self, x: Tensor) -> Any:
        self.note("layer")
        return self.inner(x)


def stages(config: dict[str, Any], sms: int) -> list[tuple[str, int]]:
    """The budget at the places of a step where kernels would be launched."""
    log: list[tuple[str, int]] = []
    torch.manual_seed(0)
    model = Model()
    layers = []
    for block in model.blocks:
        layer = Layer(block.moe, log)
        block.moe = layer
        layers.append(layer)
        experts = layer.inner.experts
        experts.fc1_weight.register_forward_hook(lambda *_, at=layer: at.note("stage1"))
        experts.fc2_weight.register_forward_hook(lambda *_, at=layer: at.note("stage2"))
    ddp = DistributedDataParallel(
        model, OverlapConfig(collective_sms=sms, **config), ProcessGroups.build()
    )
    for layer in layers:
        experts = layer.inner.experts
        # After the engine's own hook: where the backward goes on.
        for weight, moment in (
            (experts.fc2_weight, "after dW2"),
            (experts.fc1_weight, "after dW1"),
        ):
            weight.weight.register_post_accumulate_grad_hook(
                lambda _, at=layer, moment=moment: at.note(moment)
            )
    optimizer = DistributedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    # gloo may end a collective by itself at any moment: here only a wait does.
    with mock.patch.object(collectives.InFlight, "done", return_value=False):
        for step in range(2):
            log.clear()
            tokens, targets = own_batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(tokens), targets).backward()
            optimizer.step()
        layers[0].note("after the step")
        ddp.finish_param_sync()
        layers[0].note("all waited for")
    assert all(layer.budget is layers[0].budget for layer in layers)  # it counts once
    ddp.remove()
    assert all(layer.budget is None for layer in layers)
    return log


def test_stages_find_the_collectives_that_run_beside_them(ranks: Ranks) -> None:
    for log in ranks.run(2, stages, {}, 8):
        forward, backward = log[:6], log[6:10]
        # The last gather of all is waited for in the pre-hook of the last bucket but the head's.
        assert [moment for moment, _ in forward] == ["layer", "stage1", "stage2"] * 2
        assert dict(forward[:3])["stage1"] == 8  # w2 is on its way
        assert dict(forward[:3])["stage2"] == 8  # and the next layer's w1
        assert [moment for moment, _ in backward] == ["after dW2", "after dW1"] * 2
        assert all(sms == 8 for _, sms in backward)
        assert log[10:] == [("after the step", 8), ("all waited for", 0)]


@pytest.mark.parametrize(
    ("config", "sms"),
    [({"serialize": True}, 8), ({}, 0)],
    ids=["serialised", "nothing reserved"],
)
def test_no_collective_under_way_and_no_sm_given_away(
    ranks: Ranks, config: dict[str, Any], sms: int
) -> None:
    for log in ranks.run(2, stages, config, sms):
        assert len(log) == 12
        assert all(reserved == 0 for _, reserved in log)


def test_a_group_of_one_gives_no_sm_away(ranks: Ranks) -> None:
    [log] = ranks.run(1, stages, {}, 8)
    assert all(reserved == 0 for _, reserved in log)


def accumulated() -> list[int]:
    """The budget in the backward of a microbatch that reduces nothing, and of the one that does."""
    model = Model()
    ddp = DistributedDataParallel(model, OverlapConfig(collective_sms=8), ProcessGroups.build())
    seen = []
    last = model.embed.weight
    last.register_post_accumulate_grad_hook(lambda _: seen.append(ddp.sm_budget()))
    tokens, targets = own_batch(0)
    with ddp.no_sync():
        nn.functional.cross_entropy(ddp(tokens), targets).backward()
    nn.functional.cross_entropy(ddp(tokens), targets).backward()
    ddp.finish_grad_sync()
    return [*seen, ddp.sm_budget()]


def test_accumulation_takes_no_sm(ranks: Ranks) -> None:
    for first, second, after in ranks.run(2, accumulated):
        assert (first, after) == (0, 0)
        assert second in (0, 8)  # gloo may be quick


def outlive() -> int:
    layer = Layer(nn.Linear(4, 4), [])
    ddp = DistributedDataParallel(layer, OverlapConfig(collective_sms=8), ProcessGroups.build())
    budget = layer.budget
    assert budget is not None
    ddp.sm_budget.issued(Lane(8), Flight())  # type: ignore[arg-type]
    assert budget() == 8
    del ddp
    gc.collect()
    return budget()


def test_an_engine_that_is_gone_reserves_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, outlive) == [0]
