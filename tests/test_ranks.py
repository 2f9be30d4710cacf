"""The pool that every distributed test stands on: its results, and that it can fail."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, Ranks


def total(value: float) -> float:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planned")
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers(ranks: Ranks, world_size: int) -> None:
    expected = 10.0 * world_size + sum(range(world_size))
    assert ranks.run(world_size, total, 10.0) == [expected] * world_size


def test_a_failing_rank_is_reported_and_the_pool_recovers(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*planned"):
        ranks.run(2, fail_on_rank_one)
    assert ranks.run(2, total, 1.0) == [3.0, 3.0]


def test_a_worker_that_was_killed_between_two_calls_is_replaced() -> None:
    pool = Ranks(2)
    try:
        assert pool.run(2, total, 1.0) == [3.0, 3.0]
        process, _ = pool._workers[1]
        process.kill()
        process.join()
        assert pool.run(2, total, 2.0) == [5.0, 5.0]
    finally:
        pool.close()
