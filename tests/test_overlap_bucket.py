"""Bucket states, the order between streams (on fake ones), and the collectives underneath."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap import OverlapError, ProcessGroups, collectives, main_grad
from overlap.bucket import Bucket, GradState, ParamState, Slot
from overlap.budget import SmBudget
from overlap.layout import BucketLayout, ParamSpec
from overlap.streams import Mark
from overlap.waiting import WaitClock
from tests.overlap_spies import spying
from tests.ranks import Ranks


class Stream:
    """A stream that writes down what it is told to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} after stream {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} after {event}")


class FakeStreams:
    """Stands in for `overlap.streams.Streams`; ``on`` is the current stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.on = self.main
        self.captured = False
        self.events = 0

    def current(self) -> Stream:
        return self.on

    def mark(self) -> Mark:
        self.events += 1
        return Mark(self.on, f"event {self.events} of {self.on.name}")

    def after(self, mark: Mark) -> None:
        if self.on is not mark.stream:
            self.on.wait_event(mark.event)

    def capturing(self) -> bool:
        return self.captured


def make() -> tuple[Bucket, FakeStreams]:
    spec = ParamSpec("fc1.weight", (8, 16), torch.float32)
    layout = BucketLayout.pack("fc1", [spec], dist.get_world_size())
    streams = FakeStreams()
    transport = collectives.Collective(dist.group.WORLD, torch.device("cpu"), 0)
    bucket = Bucket(
        layout,
        torch.zeros(layout.numel),
        torch.zeros(layout.numel),
        dist.group.WORLD,
        streams,  # type: ignore[arg-type]
        WaitClock(torch.device("cpu"), enabled=False),
        SmBudget(streams),  # type: ignore[arg-type]
        gather_by=transport,
        reduce_by=transport,
        reduce_dtype=torch.float32,
        scale=1.0,
    )
    bucket.attach([nn.Parameter(torch.ones(8, 16))])
    return bucket, streams


def check_gather_streams() -> None:
    bucket, streams = make()
    bucket.stepped()  # on main
    stepped = f"event {streams.events} of main"
    streams.on = streams.side
    with spying() as log:
        bucket.issue_gather()
        # The gather is issued on the side stream, after what the optimizer wrote on the main one.
        assert streams.log == [f"side after {stepped}"]
        bucket.finish_gather()
    assert log == ["gather fc1", "wait gather fc1"]
    assert bucket.ready.stream is streams.side  # whoever reads on another one waits for this


def check_grad_streams() -> None:
    bucket, streams = make()
    [slot] = bucket.slots
    streams.on = streams.side
    bucket.accumulate(slot, torch.ones(8, 16))
    assert streams.log == ["side after stream main"]
    bucket.accumulate(slot, torch.ones(8, 16))
    streams.on = streams.main
    bucket.issue_reduce()
    assert streams.log == ["side after stream main", "main after stream side"]
    bucket.finish_reduce()
    expected = 2.0 * dist.get_world_size()
    assert (bucket.grad_shard[: bucket.layout.pieces(bucket.rank)[0].stop] == expected).any()


class Write(torch.autograd.Function):
    """A weight's use whose backward writes 1 to the bucket, on a stream of its own."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, slot: Slot, streams: FakeStreams) -> torch.Tensor:
        ctx.slot, ctx.streams = slot, streams
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        ctx.streams.on = ctx.streams.side
        grad = ctx.slot.param.get_main_grad()
        ctx.streams.log.append("written")
        grad.fill_(1)
        ctx.slot.param.grad_added_to_main_grad = True
        ctx.streams.on = ctx.streams.main
        return torch._efficientzerotensor(grad.shape), None, None


def check_streams_of_a_writer() -> None:
    bucket, streams = make()
    [slot] = bucket.slots
    main_grad.offer(slot, streams)
    slot.param.register_post_accumulate_grad_hook(lambda p: bucket.accumulate(slot, p.grad))
    assert slot.param.get_main_grad() is None  # no backward is running
    Write.apply(slot.param, slot, streams).backward()
    # It writes after what was done to the gradients before, and the hook comes after it.
    assert streams.log == ["side after stream main", "written", "main after stream side"]
    assert bool((slot.grad == 1).all())


def check_capture() -> None:
    bucket, streams = make()
    bucket.stepped()
    bucket.issue_gather()
    streams.captured = True
    with pytest.raises(OverlapError, match=r"fc1 .*graph capture.*finish_param_sync"):
        bucket.finish_gather()
    streams.captured = False
    bucket.finish_gather()


def check_moves() -> None:
    bucket, _ = make()
    assert (bucket.param_state, bucket.grad_state) == (ParamState.READY, GradState.ACCUMULATING)
    with pytest.raises(AssertionError):
        bucket.issue_gather()  # nothing is stale
    bucket.finish_gather()  # nothing to do
    bucket.stepped()
    with pytest.raises(AssertionError):
        bucket.stepped()
    with pytest.raises(AssertionError):
        bucket.finish_gather()  # not issued: never silently ready
    bucket.issue_gather()
    bucket.finish_gather()
    bucket.issue_reduce()
    with pytest.raises(AssertionError):
        bucket.issue_reduce()
    with pytest.raises(AssertionError):
        bucket.reset_grads()  # on its way
    bucket.finish_reduce()
    bucket.reset_grads()


@pytest.mark.parametrize(
    "check",
    [
        check_gather_streams,
        check_grad_streams,
        check_streams_of_a_writer,
        check_capture,
        check_moves,
    ],
    ids=lambda check: check.__name__,
)
def test_bucket(ranks: Ranks, check: Callable[[], None]) -> None:
    ranks.run(2, check)


def check_in_place(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the old names of torch.distributed warn
        whole = torch.zeros(4 * size, dtype=dtype)
        own = whole[4 * rank : 4 * rank + 4]
        own.fill_(rank + 1)
        collectives.all_gather(whole, own, group, "a gather").wait()
        expected = torch.arange(1, size + 1, dtype=dtype).repeat_interleave(4)
        assert torch.equal(whole, expected)

        whole = torch.arange(4.0 * size).to(dtype)
        own = whole[4 * rank : 4 * rank + 4]
        collectives.reduce_scatter(own, whole, group, "a reduction").wait()
        expected = torch.arange(4.0 * size).to(dtype)
        expected[4 * rank : 4 * rank + 4] *= size
        assert torch.equal(whole, expected)  # nothing but the own part has changed
    table = collectives.exchange([rank, 2**40 + rank], group, torch.device("cpu"), "an exchange")
    assert table == [[r, 2**40 + r] for r in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_work_in_place(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    ranks.run(size, check_in_place, dtype)


def check_groups() -> tuple[list[int], list[int], list[int]]:
    groups = ProcessGroups.build(expert_parallel_size=2)
    dist.barrier()  # nobody leaves while another is still connecting
    return tuple(dist.get_process_group_ranks(g) for g in (groups.dp, groups.ep, groups.edp))


def test_expert_parallel_ranks_are_consecutive(ranks: Ranks) -> None:
    everyone = [0, 1, 2, 3]
    assert ranks.run(4, check_groups) == [
        (everyone, [0, 1], [0, 2]),
        (everyone, [0, 1], [1, 3]),
        (everyone, [2, 3], [0, 2]),
        (everyone, [2, 3], [1, 3]),
    ]


def check_bad_size() -> None:
    with pytest.raises(ValueError, match="3 does not divide the world size 2"):
        ProcessGroups.build(expert_parallel_size=3)


def test_groups_that_do_not_fit(ranks: Ranks) -> None:
    ranks.run(2, check_bad_size)


def test_groups_need_a_default_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ProcessGroups.build()
