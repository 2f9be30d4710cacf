"""The clock around the engine's waits."""

import time

import pytest
import torch
import torch.distributed as dist

from overlap import DistributedDataParallel, DistributedOptimizer, OverlapConfig, ProcessGroups
from tests.overlap_models import Model, batch
from tests.ranks import Ranks

LATE = 0.3  # seconds


def waited_for_a_late_rank() -> list[float]:
    """Milliseconds waited in a step for which rank 1 comes late, and right after it."""
    config = OverlapConfig(measure_waits=True)
    ddp = DistributedDataParallel(Model(), config, ProcessGroups.build())
    optimizer = DistributedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    tokens, targets = batch(0, 1)
    ddp.take_waited_ms()
    loss = torch.nn.functional.cross_entropy(ddp(tokens), targets)
    if dist.get_rank() == 1:
        time.sleep(LATE)
    loss.backward()
    optimizer.step()
    ddp.finish_param_sync()
    return [ddp.take_waited_ms(), ddp.take_waited_ms()]


def without_the_clock() -> None:
    with pytest.raises(RuntimeError, match="set measure_waits"):
        DistributedDataParallel(Model()).take_waited_ms()


def test_a_late_rank_is_waited_for(ranks: Ranks) -> None:
    punctual, late = ranks.run(2, waited_for_a_late_rank)
    assert punctual[0] > LATE * 900 > late[0]
    assert punctual[1] == late[1] == 0


def test_no_clock_no_figure(ranks: Ranks) -> None:
    ranks.run(1, without_the_clock)


def test_a_group_of_one_waits_for_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, waited_for_a_late_rank) == [[0, 0]]


def gather_states() -> list[list[str]]:
    """The buckets' states after a step, and after its gathers on their way have been waited for."""
    ddp = DistributedDataParallel(Model(), OverlapConfig(), ProcessGroups.build())
    optimizer = DistributedOptimizer(ddp, torch.optim.SGD, lr=0.1)
    tokens, targets = batch(0, 1)
    torch.nn.functional.cross_entropy(ddp(tokens), targets).backward()
    optimizer.step()
    states = []
    for settle in (lambda: None, ddp.finish_in_flight, ddp.finish_in_flight):
        settle()
        states.append(sorted(bucket.param_state.value for bucket in ddp.buckets))
    ddp(tokens)
    return states


def test_what_is_on_its_way_is_waited_for_and_nothing_issued(ranks: Ranks) -> None:
    for before, after, again in ranks.run(2, gather_states):
        assert before == ["gathering"] + ["stale"] * 4
        assert after == again == ["ready"] + ["stale"] * 4
